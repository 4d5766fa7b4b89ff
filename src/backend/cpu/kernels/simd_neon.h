// Sixteen f32 lanes as four NEON registers; lane l of the definition is lane l mod 4 of register l / 4.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "core/scalar_math.h"

namespace moeflux::backend::cpu::MOEFLUX_ISA {

struct V16 {
  float32x4_t v[4];
};

// f of register i of the sixteen lanes, for all four.
#define MOEFLUX_QUADS(f) {{f(0), f(1), f(2), f(3)}}

MOEFLUX_MATH V16 set1(float x) noexcept {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
MOEFLUX_MATH V16 zero() noexcept { return set1(0.0f); }
MOEFLUX_MATH V16 load(const float* p) noexcept { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
MOEFLUX_MATH V16 load_n(const float* p, std::int64_t n) noexcept {
  alignas(16) float t[16] = {};
  std::memcpy(t, p, static_cast<std::size_t>(n) * 4);
  return load(t);
}
MOEFLUX_MATH void store(float* p, V16 x) noexcept {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
MOEFLUX_MATH void store_n(float* p, V16 x, std::int64_t n) noexcept {
  alignas(16) float t[16];
  store(t, x);
  std::memcpy(p, t, static_cast<std::size_t>(n) * 4);
}
MOEFLUX_MATH V16 load_bf16(const std::byte* p) noexcept {
  const auto* h = reinterpret_cast<const std::uint16_t*>(p);
#define MOEFLUX_F(i) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(h + 4 * i), 16))
  return MOEFLUX_QUADS(MOEFLUX_F);
#undef MOEFLUX_F
}
MOEFLUX_MATH V16 load_f16(const std::byte* p) noexcept {
  const auto* h = reinterpret_cast<const std::uint16_t*>(p);
#define MOEFLUX_F(i) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + 4 * i)))
  return MOEFLUX_QUADS(MOEFLUX_F);
#undef MOEFLUX_F
}
MOEFLUX_MATH V16 load_u8(const std::uint8_t* p) noexcept {
  const uint8x16_t x = vld1q_u8(p);
  const uint16x8_t a = vmovl_u8(vget_low_u8(x)), b = vmovl_u8(vget_high_u8(x));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(a))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(a))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(b))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(b)))}};
}
MOEFLUX_MATH V16 load_i8(const std::int8_t* p) noexcept {
  const int8x16_t x = vld1q_s8(p);
  const int16x8_t a = vmovl_s8(vget_low_s8(x)), b = vmovl_s8(vget_high_s8(x));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(a))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(b)))}};
}
// quant::e4m3_to_f32, by way of f16: the same fields, a 256th of the value; codes that are NaN become f16's.
MOEFLUX_MATH V16 load_e4m3(const std::uint8_t* p) noexcept {
  const int8x16_t x = vld1q_s8(reinterpret_cast<const std::int8_t*>(p));
  const uint16x8_t magnitude = vdupq_n_u16(0x3f80);
  V16 r;
  for (int i = 0; i < 2; ++i) {
    uint16x8_t half = vreinterpretq_u16_s16(vshlq_n_s16(vmovl_s8(i == 0 ? vget_low_s8(x) : vget_high_s8(x)), 7));
    half = vandq_u16(half, vdupq_n_u16(0xbfff));
    half = vaddq_u16(half, vandq_u16(vceqq_u16(vandq_u16(half, magnitude), magnitude), vdupq_n_u16(0x3e80)));
    r.v[2 * i] = vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half))), 256.0f);
    r.v[2 * i + 1] = vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(half))), 256.0f);
  }
  return r;
}
// Lanes hold integers in [-128, 127].
MOEFLUX_MATH void store_i8(std::int8_t* p, V16 x) noexcept {
  const int16x8_t a = vcombine_s16(vmovn_s32(vcvtq_s32_f32(x.v[0])), vmovn_s32(vcvtq_s32_f32(x.v[1])));
  const int16x8_t b = vcombine_s16(vmovn_s32(vcvtq_s32_f32(x.v[2])), vmovn_s32(vcvtq_s32_f32(x.v[3])));
  vst1q_s8(p, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
}

#define MOEFLUX_LANEWISE(name, EXPR)                 \
  MOEFLUX_MATH V16 name(V16 x, V16 y) noexcept {     \
    V16 r;                                           \
    for (int i = 0; i < 4; ++i) r.v[i] = EXPR;       \
    return r;                                        \
  }
MOEFLUX_LANEWISE(add, vaddq_f32(x.v[i], y.v[i]))
MOEFLUX_LANEWISE(sub, vsubq_f32(x.v[i], y.v[i]))
MOEFLUX_LANEWISE(mul, vmulq_f32(x.v[i], y.v[i]))
MOEFLUX_LANEWISE(div, vdivq_f32(x.v[i], y.v[i]))
// By comparison, as the definition says: NEON's own max and min treat NaN and signed zeros in another way.
MOEFLUX_LANEWISE(max, vbslq_f32(vcgtq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]))
MOEFLUX_LANEWISE(min, vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]))
#undef MOEFLUX_LANEWISE
#undef MOEFLUX_QUADS

MOEFLUX_MATH V16 fma(V16 x, V16 y, V16 z) noexcept {
  for (int i = 0; i < 4; ++i) z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]);
  return z;
}
MOEFLUX_MATH V16 abs(V16 x) noexcept {
  for (int i = 0; i < 4; ++i) x.v[i] = vabsq_f32(x.v[i]);
  return x;
}
MOEFLUX_MATH V16 select_lt(V16 p, V16 q, V16 x, V16 y) noexcept {
  for (int i = 0; i < 4; ++i) y.v[i] = vbslq_f32(vcltq_f32(p.v[i], q.v[i]), x.v[i], y.v[i]);
  return y;
}
MOEFLUX_MATH V16 select_ordered(V16 p, V16 x, V16 y) noexcept {
  for (int i = 0; i < 4; ++i) y.v[i] = vbslq_f32(vceqq_f32(p.v[i], p.v[i]), x.v[i], y.v[i]);
  return y;
}
MOEFLUX_MATH V16 scale_pow2(V16 p, V16 n) noexcept {
  for (int i = 0; i < 4; ++i) {
    const int32x4_t k = vcvtq_s32_f32(n.v[i]), half = vshrq_n_s32(k, 1), rest = vsubq_s32(k, half), bias = vdupq_n_s32(127);
    const float32x4_t f = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    const float32x4_t g = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23));
    p.v[i] = vmulq_f32(vmulq_f32(p.v[i], f), g);
  }
  return p;
}
// Lanes l and l + 8, then l + 4, l + 2, l + 1.
MOEFLUX_MATH float reduce_add(V16 x) noexcept {
  const float32x4_t s = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
MOEFLUX_MATH float reduce_max(V16 x) noexcept {
  const V16 y = max(V16{{x.v[0], x.v[1], x.v[0], x.v[1]}}, V16{{x.v[2], x.v[3], x.v[2], x.v[3]}});
  float t[16];
  store(t, y);
  float m = t[0];
  for (int i = 1; i < 8; ++i) m = m > t[i] ? m : t[i];
  return m;
}
// n is a multiple of 32.
MOEFLUX_MATH std::int32_t dot_i8(const std::int8_t* a, const std::int8_t* b, int n) noexcept {
  int32x4_t s = vdupq_n_s32(0);
  for (int i = 0; i < n; i += 16) s = vdotq_s32(s, vld1q_s8(a + i), vld1q_s8(b + i));
  return vaddvq_s32(s);
}
// 128 is taken off the codes, which makes them signed, and 128 times the sum of b added again.
MOEFLUX_MATH std::int32_t dot_u8(const std::uint8_t* a, const std::int8_t* b, int n) noexcept {
  int32x4_t s = vdupq_n_s32(0), sum = s;
  for (int i = 0; i < n; i += 16) {
    const int8x16_t x = vld1q_s8(b + i);
    s = vdotq_s32(s, vreinterpretq_s8_u8(veorq_u8(vld1q_u8(a + i), vdupq_n_u8(128))), x);
    sum = vdotq_s32(sum, x, vdupq_n_s8(1));
  }
  return vaddvq_s32(s) + 128 * vaddvq_s32(sum);
}

}  // namespace moeflux::backend::cpu::MOEFLUX_ISA
