// Sixteen f32 lanes as one AVX-512 register (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/scalar_math.h"

namespace moeflux::backend::cpu::MOEFLUX_ISA {

struct V16 {
  __m512 a;
};

MOEFLUX_MATH __mmask16 first(std::int64_t n) noexcept { return static_cast<__mmask16>((1u << n) - 1u); }
MOEFLUX_MATH V16 set1(float x) noexcept { return {_mm512_set1_ps(x)}; }
MOEFLUX_MATH V16 zero() noexcept { return {_mm512_setzero_ps()}; }
MOEFLUX_MATH V16 load(const float* p) noexcept { return {_mm512_loadu_ps(p)}; }
MOEFLUX_MATH V16 load_n(const float* p, std::int64_t n) noexcept { return {_mm512_maskz_loadu_ps(first(n), p)}; }
MOEFLUX_MATH void store(float* p, V16 x) noexcept { _mm512_storeu_ps(p, x.a); }
MOEFLUX_MATH void store_n(float* p, V16 x, std::int64_t n) noexcept { _mm512_mask_storeu_ps(p, first(n), x.a); }
MOEFLUX_MATH __m128i load128(const void* p) noexcept { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
MOEFLUX_MATH __m256i load256(const void* p) noexcept { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
MOEFLUX_MATH V16 load_bf16(const std::byte* p) noexcept {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16))};
}
MOEFLUX_MATH V16 load_f16(const std::byte* p) noexcept { return {_mm512_cvtph_ps(load256(p))}; }
MOEFLUX_MATH V16 load_u8(const std::uint8_t* p) noexcept { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load128(p)))}; }
MOEFLUX_MATH V16 load_i8(const std::int8_t* p) noexcept { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(p)))}; }
// quant::e4m3_to_f32, by way of f16: the same fields, a 256th of the value; codes that are NaN become f16's.
MOEFLUX_MATH V16 e4m3_to_f32(__m128i codes) noexcept {
  const __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_or_si128(codes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return {_mm512_mul_ps(_mm512_cvtph_ps(_mm256_mask_add_epi16(half, nan, half, _mm256_set1_epi16(0x3e80))), _mm512_set1_ps(256.0f))};
}
MOEFLUX_MATH V16 load_e4m3(const std::uint8_t* p) noexcept { return e4m3_to_f32(load128(p)); }
MOEFLUX_MATH void store_i8(std::int8_t* p, V16 x) noexcept {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.a)));
}
MOEFLUX_MATH V16 fma(V16 x, V16 y, V16 z) noexcept { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
MOEFLUX_MATH V16 add(V16 x, V16 y) noexcept { return {_mm512_add_ps(x.a, y.a)}; }
MOEFLUX_MATH V16 sub(V16 x, V16 y) noexcept { return {_mm512_sub_ps(x.a, y.a)}; }
MOEFLUX_MATH V16 mul(V16 x, V16 y) noexcept { return {_mm512_mul_ps(x.a, y.a)}; }
MOEFLUX_MATH V16 div(V16 x, V16 y) noexcept { return {_mm512_div_ps(x.a, y.a)}; }
MOEFLUX_MATH V16 max(V16 x, V16 y) noexcept { return {_mm512_max_ps(x.a, y.a)}; }
MOEFLUX_MATH V16 min(V16 x, V16 y) noexcept { return {_mm512_min_ps(x.a, y.a)}; }
MOEFLUX_MATH V16 abs(V16 x) noexcept { return {_mm512_abs_ps(x.a)}; }
MOEFLUX_MATH V16 select_lt(V16 p, V16 q, V16 x, V16 y) noexcept {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(p.a, q.a, _CMP_LT_OQ), y.a, x.a)};
}
MOEFLUX_MATH V16 select_ordered(V16 p, V16 x, V16 y) noexcept {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(p.a, p.a, _CMP_ORD_Q), y.a, x.a)};
}
// p is near 1, n whole and the result above 2^-127: rounded once, as two products by powers of two are.
MOEFLUX_MATH V16 scale_pow2(V16 p, V16 n) noexcept { return {_mm512_scalef_ps(p.a, n.a)}; }
MOEFLUX_MATH float reduce_add(V16 x) noexcept {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(x.a), _mm512_extractf32x8_ps(x.a, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
MOEFLUX_MATH float reduce_max(V16 x) noexcept {
  const __m256 s8 = _mm256_max_ps(_mm512_castps512_ps256(x.a), _mm512_extractf32x8_ps(x.a, 1));
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
}
// n is a multiple of 32.
MOEFLUX_MATH std::int32_t dot_u8(const std::uint8_t* a, const std::int8_t* b, int n) noexcept {
  __m512i s = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 32)
    s = _mm512_add_epi32(s, _mm512_madd_epi16(_mm512_cvtepu8_epi16(load256(a + i)), _mm512_cvtepi8_epi16(load256(b + i))));
  return _mm512_reduce_add_epi32(s);
}
MOEFLUX_MATH std::int32_t dot_i8(const std::int8_t* a, const std::int8_t* b, int n) noexcept {
  __m512i s = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 32)
    s = _mm512_add_epi32(s, _mm512_madd_epi16(_mm512_cvtepi8_epi16(load256(a + i)), _mm512_cvtepi8_epi16(load256(b + i))));
  return _mm512_reduce_add_epi32(s);
}

}  // namespace moeflux::backend::cpu::MOEFLUX_ISA
