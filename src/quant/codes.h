// The bit layout of codes, as code that every kernel inlines.
//
// Functions here are forced inline: they are compiled again under each instruction set, and no copy
// made for a newer one may be linked into code for an older one.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "core/float_bits.h"

#ifdef __CUDACC__
#define MOEFLUX_INLINE __host__ __device__ inline
#else
#define MOEFLUX_INLINE inline __attribute__((always_inline))
#endif

namespace moeflux::quant {

static_assert(std::endian::native == std::endian::little, "bit streams are read as little-endian words");

// Eight consecutive codes take exactly `Bits` bytes, whatever the width: the unit of unpacking.
template <int Bits>
MOEFLUX_INLINE void unpack8(const std::uint8_t* p, std::uint8_t* out) noexcept {
  static_assert(Bits == 2 || Bits == 3 || Bits == 4 || Bits == 5 || Bits == 6 || Bits == 8);
  std::uint64_t word = 0;
  std::memcpy(&word, p, Bits);
  for (int i = 0; i < 8; ++i) out[i] = static_cast<std::uint8_t>(word >> (Bits * i) & ((1u << Bits) - 1u));
}

// n codes (a multiple of 8) from the start of a row or any multiple of 8 codes into it.
template <int Bits>
MOEFLUX_INLINE void unpack(const std::uint8_t* p, std::int64_t n, std::uint8_t* out) noexcept {
  if constexpr (Bits == 8) {
    std::memcpy(out, p, static_cast<std::size_t>(n));
  } else if constexpr (Bits == 4) {  // byte j holds codes 2j and 2j + 1: a form that compilers vectorize
    for (std::int64_t i = 0; i < n / 2; ++i) {
      out[2 * i] = p[i] & 15;
      out[2 * i + 1] = p[i] >> 4;
    }
  } else {
    for (std::int64_t i = 0; i < n; i += 8) unpack8<Bits>(p + i / 8 * Bits, out + i);
  }
}

template <int Bits>
MOEFLUX_INLINE void pack8(const std::uint8_t* codes, std::uint8_t* p) noexcept {
  std::uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word |= static_cast<std::uint64_t>(codes[i]) << (Bits * i);
  std::memcpy(p, &word, Bits);
}

// Twice the value of an e2m1 code: an integer, so that MXFP4 dot products can be integers too.
inline constexpr std::int8_t kE2m1Twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// 2^(u - 127), u < 255 (255 is refused when a file is loaded).
MOEFLUX_INLINE float e8m0_to_f32(std::uint8_t u) noexcept {
  const std::uint32_t bits = u == 0 ? 0x00400000u : static_cast<std::uint32_t>(u) << 23;
  return std::bit_cast<float>(bits);
}

// 2^(u - 128): the scale that goes with kE2m1Twice.
MOEFLUX_INLINE float e8m0_half_to_f32(std::uint8_t u) noexcept {
  return u <= 1 ? std::bit_cast<float>(0x00200000u << u) : std::bit_cast<float>(static_cast<std::uint32_t>(u - 1) << 23);
}

// e4m3 ("fn": no infinities, 0x7f and 0xff are NaN).
MOEFLUX_INLINE float e4m3_to_f32(std::uint8_t u) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(u & 0x80u) << 24;
  const std::uint32_t magnitude = u & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1p120f));
}

// Element i of an array of scales, biases or plain values, wherever it lies (files are not aligned).
template <DType T>
MOEFLUX_INLINE float load_scalar(const std::byte* p, std::int64_t i) noexcept {
  if constexpr (T == DType::F32) {
    float v;
    std::memcpy(&v, p + i * 4, 4);
    return v;
  } else {
    static_assert(T == DType::BF16 || T == DType::F16);
    std::uint16_t v;
    std::memcpy(&v, p + i * 2, 2);
    return T == DType::BF16 ? bf16_to_f32(v) : f16_to_f32(v);
  }
}

}  // namespace moeflux::quant
