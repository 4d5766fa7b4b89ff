// Sixteen f32 lanes as two AVX2 registers; lane l of the definition is lane l mod 8 of register l / 8.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/scalar_math.h"

namespace moeflux::backend::cpu::MOEFLUX_ISA {

struct V16 {
  __m256 a, b;
};

MOEFLUX_MATH V16 set1(float x) noexcept { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MOEFLUX_MATH V16 zero() noexcept { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
MOEFLUX_MATH V16 load(const float* p) noexcept { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MOEFLUX_MATH V16 load_n(const float* p, std::int64_t n) noexcept {
  alignas(32) float t[16] = {};
  std::memcpy(t, p, static_cast<std::size_t>(n) * 4);
  return {_mm256_load_ps(t), _mm256_load_ps(t + 8)};
}
MOEFLUX_MATH void store(float* p, V16 x) noexcept {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
MOEFLUX_MATH void store_n(float* p, V16 x, std::int64_t n) noexcept {
  alignas(32) float t[16];
  store(t, x);
  std::memcpy(p, t, static_cast<std::size_t>(n) * 4);
}
MOEFLUX_MATH __m128i load128(const void* p) noexcept { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
MOEFLUX_MATH __m256 widen_bf16(__m128i x) noexcept {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
MOEFLUX_MATH V16 load_bf16(const std::byte* p) noexcept { return {widen_bf16(load128(p)), widen_bf16(load128(p + 16))}; }
MOEFLUX_MATH V16 load_f16(const std::byte* p) noexcept {
  return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))};
}
MOEFLUX_MATH V16 load_u8(const std::uint8_t* p) noexcept {
  const __m128i x = load128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
MOEFLUX_MATH V16 load_i8(const std::int8_t* p) noexcept {
  const __m128i x = load128(p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
// quant::e4m3_to_f32, by way of f16: the same fields, a 256th of the value; codes that are NaN become f16's.
MOEFLUX_MATH V16 load_e4m3(const std::uint8_t* p) noexcept {
  const __m256i magnitude = _mm256_set1_epi16(0x3f80);
  __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, magnitude), magnitude);
  half = _mm256_add_epi16(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x3e80)));
  const __m256 unit = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), unit), _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), unit)};
}
MOEFLUX_MATH void store_i8(std::int8_t* p, V16 x) noexcept {
  // packs works within 128-bit halves; the permutation restores the order.
  const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  const __m256i o = _mm256_permute4x64_epi64(w, 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(o), _mm256_extracti128_si256(o, 1)));
}
MOEFLUX_MATH V16 fma(V16 x, V16 y, V16 z) noexcept {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
MOEFLUX_MATH V16 add(V16 x, V16 y) noexcept { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
MOEFLUX_MATH V16 sub(V16 x, V16 y) noexcept { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
MOEFLUX_MATH V16 mul(V16 x, V16 y) noexcept { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
MOEFLUX_MATH V16 div(V16 x, V16 y) noexcept { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
MOEFLUX_MATH V16 max(V16 x, V16 y) noexcept { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
MOEFLUX_MATH V16 min(V16 x, V16 y) noexcept { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
MOEFLUX_MATH V16 abs(V16 x) noexcept {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
MOEFLUX_MATH V16 select_lt(V16 p, V16 q, V16 x, V16 y) noexcept {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}
MOEFLUX_MATH V16 select_ordered(V16 p, V16 x, V16 y) noexcept {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, p.a, _CMP_ORD_Q)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, p.b, _CMP_ORD_Q))};
}
MOEFLUX_MATH __m256 scale_half(__m256 p, __m256 n) noexcept {
  const __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1), rest = _mm256_sub_epi32(i, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 f = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(p, f), g);
}
MOEFLUX_MATH V16 scale_pow2(V16 p, V16 n) noexcept { return {scale_half(p.a, n.a), scale_half(p.b, n.b)}; }
MOEFLUX_MATH float reduce_add(V16 x) noexcept {
  const __m256 s8 = _mm256_add_ps(x.a, x.b);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
MOEFLUX_MATH float reduce_max(V16 x) noexcept {
  const __m256 s8 = _mm256_max_ps(x.a, x.b);
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}
MOEFLUX_MATH std::int32_t reduce_i32(__m256i s) noexcept {
  const __m128i s4 = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  const __m128i s2 = _mm_add_epi32(s4, _mm_shuffle_epi32(s4, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s2, _mm_shuffle_epi32(s2, 0xb1)));
}
// n is a multiple of 32.
MOEFLUX_MATH std::int32_t dot_u8(const std::uint8_t* a, const std::int8_t* b, int n) noexcept {
  __m256i s = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 16)
    s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_cvtepu8_epi16(load128(a + i)), _mm256_cvtepi8_epi16(load128(b + i))));
  return reduce_i32(s);
}
MOEFLUX_MATH std::int32_t dot_i8(const std::int8_t* a, const std::int8_t* b, int n) noexcept {
  __m256i s = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 16)
    s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_cvtepi8_epi16(load128(a + i)), _mm256_cvtepi8_epi16(load128(b + i))));
  return reduce_i32(s);
}

}  // namespace moeflux::backend::cpu::MOEFLUX_ISA
