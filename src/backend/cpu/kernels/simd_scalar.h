// Sixteen f32 lanes in plain C++: the definition that the other instruction sets repeat.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/float_bits.h"
#include "core/scalar_math.h"

namespace moeflux::backend::cpu::MOEFLUX_ISA {

struct V16 {
  float v[16];
};

#define MOEFLUX_LANES for (int l = 0; l < 16; ++l)

MOEFLUX_MATH V16 set1(float x) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = x;
  return r;
}
MOEFLUX_MATH V16 zero() noexcept { return set1(0.0f); }
MOEFLUX_MATH V16 load(const float* p) noexcept {
  V16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
// n < 16 values; the other lanes are 0.
MOEFLUX_MATH V16 load_n(const float* p, std::int64_t n) noexcept {
  V16 r = zero();
  for (std::int64_t l = 0; l < n; ++l) r.v[l] = p[l];
  return r;
}
MOEFLUX_MATH void store(float* p, V16 a) noexcept { std::memcpy(p, a.v, 64); }
MOEFLUX_MATH void store_n(float* p, V16 a, std::int64_t n) noexcept {
  for (std::int64_t l = 0; l < n; ++l) p[l] = a.v[l];
}
MOEFLUX_MATH V16 load_bf16(const std::byte* p) noexcept {
  std::uint16_t b[16];
  std::memcpy(b, p, 32);
  V16 r;
  MOEFLUX_LANES r.v[l] = bf16_to_f32(b[l]);
  return r;
}
MOEFLUX_MATH V16 load_f16(const std::byte* p) noexcept {
  std::uint16_t b[16];
  std::memcpy(b, p, 32);
  V16 r;
  MOEFLUX_LANES r.v[l] = f16_to_f32(b[l]);
  return r;
}
MOEFLUX_MATH V16 load_u8(const std::uint8_t* p) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = static_cast<float>(p[l]);
  return r;
}
MOEFLUX_MATH V16 load_i8(const std::int8_t* p) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = static_cast<float>(p[l]);
  return r;
}
MOEFLUX_MATH V16 load_e4m3(const std::uint8_t* p) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = quant::e4m3_to_f32(p[l]);
  return r;
}
// Lanes hold integers in [-128, 127].
MOEFLUX_MATH void store_i8(std::int8_t* p, V16 a) noexcept {
  MOEFLUX_LANES p[l] = static_cast<std::int8_t>(a.v[l]);
}
MOEFLUX_MATH V16 fma(V16 a, V16 b, V16 c) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = math::fma(a.v[l], b.v[l], c.v[l]);
  return r;
}
MOEFLUX_MATH V16 add(V16 a, V16 b) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = a.v[l] + b.v[l];
  return r;
}
MOEFLUX_MATH V16 sub(V16 a, V16 b) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = a.v[l] - b.v[l];
  return r;
}
MOEFLUX_MATH V16 mul(V16 a, V16 b) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = a.v[l] * b.v[l];
  return r;
}
MOEFLUX_MATH V16 div(V16 a, V16 b) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = a.v[l] / b.v[l];
  return r;
}
// a > b ? a : b, so a NaN in either gives b.
MOEFLUX_MATH V16 max(V16 a, V16 b) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l];
  return r;
}
MOEFLUX_MATH V16 min(V16 a, V16 b) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = a.v[l] < b.v[l] ? a.v[l] : b.v[l];
  return r;
}
MOEFLUX_MATH V16 abs(V16 a) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = __builtin_fabsf(a.v[l]);
  return r;
}
// a < b ? x : y, lane by lane.
MOEFLUX_MATH V16 select_lt(V16 a, V16 b, V16 x, V16 y) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = a.v[l] < b.v[l] ? x.v[l] : y.v[l];
  return r;
}
// a is a number ? x : y.
MOEFLUX_MATH V16 select_ordered(V16 a, V16 x, V16 y) noexcept {
  V16 r;
  MOEFLUX_LANES r.v[l] = a.v[l] == a.v[l] ? x.v[l] : y.v[l];
  return r;
}
// (p * 2^(n >> 1)) * 2^(n - (n >> 1)) for lanes with integral n in [-126, 128].
MOEFLUX_MATH V16 scale_pow2(V16 p, V16 n) noexcept {
  V16 r;
  MOEFLUX_LANES {
    const auto ni = static_cast<std::int32_t>(n.v[l]);
    const std::int32_t half = ni >> 1;
    r.v[l] = (p.v[l] * math::pow2i(half)) * math::pow2i(ni - half);
  }
  return r;
}
// Lanes l and l + 8, then l + 4, l + 2, l + 1.
MOEFLUX_MATH float reduce_add(V16 a) noexcept {
  for (int step = 8; step >= 1; step /= 2)
    for (int l = 0; l < step; ++l) a.v[l] = a.v[l] + a.v[l + step];
  return a.v[0];
}
MOEFLUX_MATH float reduce_max(V16 a) noexcept {
  float m = a.v[0];
  for (int l = 1; l < 16; ++l) m = m > a.v[l] ? m : a.v[l];
  return m;
}

MOEFLUX_MATH std::int32_t dot_u8(const std::uint8_t* a, const std::int8_t* b, int n) noexcept {
  std::int32_t s = 0;
  for (int i = 0; i < n; ++i) s += static_cast<std::int32_t>(a[i]) * b[i];
  return s;
}
MOEFLUX_MATH std::int32_t dot_i8(const std::int8_t* a, const std::int8_t* b, int n) noexcept {
  std::int32_t s = 0;
  for (int i = 0; i < n; ++i) s += static_cast<std::int32_t>(a[i]) * b[i];
  return s;
}

#undef MOEFLUX_LANES

}  // namespace moeflux::backend::cpu::MOEFLUX_ISA
