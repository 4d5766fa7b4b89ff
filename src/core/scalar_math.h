// The elementary functions that define our results: polynomials with explicit fma, the same bits on every
// machine. No libm, no fast-math. Vector kernels repeat these steps lane by lane.
//
// Forced inline for the reason given in quant/codes.h. Errors against the true value: exp 1.02 ulp, log1p
// 2.5, sigmoid 2.5, softplus 2.9 (measured over all floats from 1e-9 up, sampled in tests/core), sincos 0.51 (sampled).
// CUDA sources include it too: there everything but fma and sqrt is the same text, compiled without contraction.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define MOEFLUX_MATH __host__ __device__ inline
#else
#define MOEFLUX_MATH inline __attribute__((always_inline))
#endif

namespace moeflux::math {

#ifdef __CUDA_ARCH__
MOEFLUX_MATH float fma(float a, float b, float c) noexcept { return __fmaf_rn(a, b, c); }
MOEFLUX_MATH double fma(double a, double b, double c) noexcept { return __fma_rn(a, b, c); }
#else
MOEFLUX_MATH float fma(float a, float b, float c) noexcept { return __builtin_fmaf(a, b, c); }
MOEFLUX_MATH double fma(double a, double b, double c) noexcept { return __builtin_fma(a, b, c); }
#endif

// Round to nearest even for |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
MOEFLUX_MATH float round_even(float x) noexcept { return (x + 12582912.0f) - 12582912.0f; }
MOEFLUX_MATH double round_even(double x) noexcept { return (x + 6755399441055744.0) - 6755399441055744.0; }

MOEFLUX_MATH float pow2i(std::int32_t n) noexcept {  // 2^n for -126 <= n <= 127
  return std::bit_cast<float>(static_cast<std::uint32_t>(n + 127) << 23);
}

// e^x. Below -87.33 the result is 0 (no subnormals), above 88.72 infinity; NaN stays NaN.
MOEFLUX_MATH float exp(float x) noexcept {
  const float lo = -87.33654f, hi = 88.72283f;
  const float c = x < lo ? lo : (x > hi ? hi : x);
  const float n = round_even(c * 1.44269504f);
  float r = fma(n, -0.693359375f, c);  // ln 2 in two parts, the first with few bits: n * part is exact
  r = fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fma(p, r, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
  // The clamp keeps n in [-126, 128]; NaN has no integer, so it takes the value of a harmless 0 and is restored below.
  const auto ni = static_cast<std::int32_t>(x == x ? n : 0.0f);
  const std::int32_t half = ni >> 1;  // 2^128 is no float: two factors
  const float y = (p * pow2i(half)) * pow2i(ni - half);
  return x < lo ? 0.0f : (x > hi ? std::bit_cast<float>(0x7f800000u) : (x == x ? y : x));
}

MOEFLUX_MATH float sigmoid(float x) noexcept { return 1.0f / (1.0f + exp(-x)); }
MOEFLUX_MATH float silu(float x) noexcept { return x * sigmoid(x); }

// ln x for normal positive x.
MOEFLUX_MATH float log_positive(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  // x = m * 2^e with m in [sqrt(1/2), sqrt(2)): shifting by the bits of sqrt(1/2) makes the exponent come out so.
  const std::uint32_t shifted = bits - 0x3f3504f3u;
  const auto e = static_cast<float>(static_cast<std::int32_t>(shifted) >> 23);
  const float m = std::bit_cast<float>((shifted & 0x007fffffu) + 0x3f3504f3u);
  const float r = m - 1.0f;
  const float z = r * r;
  float p = 7.0376836292e-2f;
  p = fma(p, r, -1.1514610310e-1f);
  p = fma(p, r, 1.1676998740e-1f);
  p = fma(p, r, -1.2420140846e-1f);
  p = fma(p, r, 1.4249322787e-1f);
  p = fma(p, r, -1.6668057665e-1f);
  p = fma(p, r, 2.0000714765e-1f);
  p = fma(p, r, -2.4999993993e-1f);
  p = fma(p, r, 3.3333331174e-1f);
  float y = (p * r) * z;
  y = fma(e, -2.12194440e-4f, y);
  y = fma(-0.5f, z, y);
  return fma(e, 0.693359375f, r + y);
}

// ln(1 + x) for x >= 0: the factor undoes the rounding of 1 + x.
MOEFLUX_MATH float log1p_nonnegative(float x) noexcept {
  const float u = 1.0f + x;
  const float y = log_positive(u) * (x / (u - 1.0f));
  return u == 1.0f ? x : y;
}

// ln(1 + e^x); x itself above 20, where the two agree in f32.
MOEFLUX_MATH float softplus(float x) noexcept { return x > 20.0f ? x : log1p_nonnegative(exp(x)); }

struct SinCos {
  float sin, cos;
};

// Sine and cosine of an f32 angle with |x| < 2^31, computed in f64 and rounded once: context positions reach
// hundreds of thousands of radians, where f32 reduction would lose everything.
MOEFLUX_MATH SinCos sincos(float x) noexcept {
  const auto a = static_cast<double>(x);
  const double n = round_even(a * 0.63661977236758134308);  // 2 / pi
  double r = fma(n, -1.57079632679489655800, a);            // pi / 2 in two parts
  r = fma(n, -6.12323399573676603587e-17, r);
  const double z = r * r;
  double s = 1.58969099521155010221e-10;
  s = fma(s, z, -2.50507602534068634195e-8);
  s = fma(s, z, 2.75573137070700676789e-6);
  s = fma(s, z, -1.98412698298579493134e-4);
  s = fma(s, z, 8.33333333332248946124e-3);
  s = fma(s, z, -1.66666666666666324348e-1);
  s = fma(s, z * r, r);
  double c = -1.13596475577881948265e-11;
  c = fma(c, z, 2.08757232129817482790e-9);
  c = fma(c, z, -2.75573143513906633035e-7);
  c = fma(c, z, 2.48015872894767294178e-5);
  c = fma(c, z, -1.38888888888741095749e-3);
  c = fma(c, z, 4.16666666666666019037e-2);
  c = fma(c, z * z, fma(-0.5, z, 1.0));
  const auto q = static_cast<std::int64_t>(n) & 3;
  const double ss = (q & 1) != 0 ? c : s;
  const double cc = (q & 1) != 0 ? s : c;
  return {static_cast<float>((q & 2) != 0 ? -ss : ss), static_cast<float>(((q + 1) & 2) != 0 ? -cc : cc)};
}

#ifdef __CUDA_ARCH__
MOEFLUX_MATH float sqrt(float x) noexcept { return __fsqrt_rn(x); }
#else
MOEFLUX_MATH float sqrt(float x) noexcept { return __builtin_sqrtf(x); }
#endif

}  // namespace moeflux::math
