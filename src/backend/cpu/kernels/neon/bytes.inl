// Products of bytes with NEON's sdot, for generic/panels.inl: both sides are signed, so 8-bit codes are shifted by -128.

namespace {

template <int Slot>
inline constexpr int kShift = Slot == 3 ? 12 : Slot == 9 ? -128 : 0;

struct I16 {
  int32x4_t v[4];
};
using Partial = int32x4_t;

MOEFLUX_MATH I16 izero() noexcept { return {{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}}; }
MOEFLUX_MATH I16 iload(const std::int32_t* p) noexcept { return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}}; }
MOEFLUX_MATH I16 isub(I16 x, std::int32_t c) noexcept {
  const int32x4_t v = vdupq_n_s32(c);
  return {{vsubq_s32(x.v[0], v), vsubq_s32(x.v[1], v), vsubq_s32(x.v[2], v), vsubq_s32(x.v[3], v)}};
}
MOEFLUX_MATH V16 to_f32(I16 x) noexcept {
  return {{vcvtq_f32_s32(x.v[0]), vcvtq_f32_s32(x.v[1]), vcvtq_f32_s32(x.v[2]), vcvtq_f32_s32(x.v[3])}};
}

MOEFLUX_MATH void order32(const std::uint8_t* in, std::uint8_t* out) noexcept {
  const uint8x16_t a = vld1q_u8(in), b = vld1q_u8(in + 16);
  vst1q_u8(out, vuzp1q_u8(a, b));
  vst1q_u8(out + 16, vuzp2q_u8(a, b));
}

struct Nibbles {
  uint8x16_t even, odd;
};
template <bool E2m1>
MOEFLUX_MATH Nibbles nibbles32(const std::uint8_t* p) noexcept {
  const uint8x16_t v = vld1q_u8(p);
  const Nibbles n{vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8(v, 4)};
  if constexpr (!E2m1) return n;
  const std::uint8_t lut[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  const uint8x16_t t = vld1q_u8(lut);
  return {vqtbl1q_u8(t, n.even), vqtbl1q_u8(t, n.odd)};
}

template <bool E2m1>
MOEFLUX_MATH void unpack_nibbles32(const std::uint8_t* p, std::uint8_t* out) noexcept {
  const Nibbles n = nibbles32<E2m1>(p);
  vst1q_u8(out, n.even);
  vst1q_u8(out + 16, n.odd);
}

MOEFLUX_MATH int8x16_t load_codes(const std::uint8_t* p) noexcept { return vreinterpretq_s8_u8(vld1q_u8(p)); }
MOEFLUX_MATH int8x16_t broadcast4(const std::int8_t* p) noexcept {
  std::int32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

template <int Slot>
MOEFLUX_MATH void add_products8(I16& acc, const std::uint8_t* codes, const std::int8_t* x0, const std::int8_t* x1) noexcept {
  const int8x16_t v0 = broadcast4(x0), v1 = broadcast4(x1);
  for (int i = 0; i < 4; ++i) {
    acc.v[i] = vdotq_s32(acc.v[i], load_codes(codes + 16 * i), v0);
    acc.v[i] = vdotq_s32(acc.v[i], load_codes(codes + 64 + 16 * i), v1);
  }
}

template <int Slot>
MOEFLUX_MATH Partial row_dot(const std::uint8_t* codes, const std::int8_t* x8, int n) noexcept {
  int32x4_t s = vdupq_n_s32(0);
  for (int i = 0; i < n; i += 32) {
    if constexpr (Slot == 3 || Slot == 6) {
      const Nibbles c = nibbles32<Slot == 3>(codes + i / 2);
      s = vdotq_s32(s, vreinterpretq_s8_u8(c.even), vld1q_s8(x8 + i));
      s = vdotq_s32(s, vreinterpretq_s8_u8(c.odd), vld1q_s8(x8 + i + 16));
    } else {
      s = vdotq_s32(s, load_codes(codes + i), vld1q_s8(x8 + i));
      s = vdotq_s32(s, load_codes(codes + i + 16), vld1q_s8(x8 + i + 16));
    }
  }
  return s;
}

MOEFLUX_MATH void reduce8(const Partial (&p)[8], std::int32_t* out) noexcept {
  vst1q_s32(out, vpaddq_s32(vpaddq_s32(p[0], p[1]), vpaddq_s32(p[2], p[3])));
  vst1q_s32(out + 4, vpaddq_s32(vpaddq_s32(p[4], p[5]), vpaddq_s32(p[6], p[7])));
}

}  // namespace
