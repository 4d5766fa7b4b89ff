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

// 32 codes, one a byte: every second of them, sixteen each.
struct Codes {
  uint8x16_t even, odd;
};
template <int Bits>
MOEFLUX_MATH Codes ordered32(const std::uint8_t* p) noexcept {
  using Places = Codes32<Bits>;
  alignas(16) std::uint8_t few[16] = {};
  if constexpr (Places::kBytes < 16) std::memcpy(few, p, Places::kBytes);
  const uint8x16_t halves[2] = {vld1q_u8(Places::kBytes < 16 ? few : p), vld1q_u8(Places::kBytes < 16 ? few : p + Places::base(1))};
  const auto every_second = [&](int odd) {
    uint8x8_t bytes[2];
    for (int half = 0; half < 2; ++half) {
      const uint16x8_t words = vreinterpretq_u16_u8(vqtbl1q_u8(halves[half], vld1q_u8(kCodes32<Bits>.pick[odd][half])));
      const int16x8_t right = vnegq_s16(vreinterpretq_s16_u16(vld1q_u16(kCodes32<Bits>.shift[odd][half])));
      bytes[half] = vmovn_u16(vandq_u16(vshlq_u16(words, right), vdupq_n_u16((1 << Bits) - 1)));
    }
    return vcombine_u8(bytes[0], bytes[1]);
  };
  return {every_second(0), every_second(1)};
}
// In x8 order.
template <int Bits>
MOEFLUX_MATH void unpack_ordered32(const std::uint8_t* p, std::uint8_t* out) noexcept {
  const Codes n = ordered32<Bits>(p);
  vst1q_u8(out, n.even);
  vst1q_u8(out + 16, n.odd);
}

template <bool E2m1>
MOEFLUX_MATH Codes nibbles32(const std::uint8_t* p) noexcept {
  const uint8x16_t v = vld1q_u8(p);
  const Codes n{vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8(v, 4)};
  if constexpr (!E2m1) return n;
  const std::uint8_t lut[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  const uint8x16_t t = vld1q_u8(lut);
  return {vqtbl1q_u8(t, n.even), vqtbl1q_u8(t, n.odd)};
}

// 32 codes in the order of columns.
MOEFLUX_MATH V16 bytes_f32(int8x16_t x) noexcept {
  const int16x8_t a = vmovl_s8(vget_low_s8(x)), b = vmovl_s8(vget_high_s8(x));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(a))), vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))),
           vcvtq_f32_s32(vmovl_s16(vget_high_s16(b)))}};
}
MOEFLUX_MATH void interleaved_f32(uint8x16_t even, uint8x16_t odd, V16 (&out)[2]) noexcept {
  out[0] = bytes_f32(vreinterpretq_s8_u8(vzip1q_u8(even, odd)));
  out[1] = bytes_f32(vreinterpretq_s8_u8(vzip2q_u8(even, odd)));
}
template <int Bits>
MOEFLUX_MATH void codes_f32(const std::uint8_t* p, V16 (&out)[2]) noexcept {
  Codes n;
  if constexpr (Bits == 4)
    n = nibbles32<false>(p);
  else
    n = ordered32<Bits>(p);
  interleaved_f32(n.even, n.odd, out);
}
// e2m1: twice the values.
MOEFLUX_MATH void e2m1_f32(const std::uint8_t* p, V16 (&out)[2]) noexcept {
  const std::int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const uint8x16_t twice = vreinterpretq_u8_s8(vld1q_s8(values));
  const Codes n = nibbles32<false>(p);
  interleaved_f32(vqtbl1q_u8(twice, n.even), vqtbl1q_u8(twice, n.odd), out);
}

template <bool E2m1>
MOEFLUX_MATH void unpack_nibbles32(const std::uint8_t* p, std::uint8_t* out) noexcept {
  const Codes n = nibbles32<E2m1>(p);
  vst1q_u8(out, n.even);
  vst1q_u8(out + 16, n.odd);
}

MOEFLUX_MATH int8x16_t load_codes(const std::uint8_t* p) noexcept { return vreinterpretq_s8_u8(vld1q_u8(p)); }
MOEFLUX_MATH int8x16_t broadcast4(const std::int8_t* p) noexcept {
  std::int32_t four;
  std::memcpy(&four, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

// Sums go on in 32 bits.
template <int Slot>
inline constexpr int kColumns = 8;
using Part = I16;

template <int Slot>
MOEFLUX_MATH Part begin_part(const I16& acc) noexcept {
  return acc;
}
struct Codes4 {
  int8x16_t v[4];
};
MOEFLUX_MATH void split_words(const std::uint8_t* p, Codes4& low, Codes4& high) noexcept {
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t v = vld1q_u8(p + 16 * i);
    low.v[i] = vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15)));
    high.v[i] = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
  }
}
template <int Slot>
MOEFLUX_MATH void add_codes4(Part& part, const Codes4& codes, const std::int8_t* x) noexcept {
  const int8x16_t v = broadcast4(x);
  for (int i = 0; i < 4; ++i) part.v[i] = vdotq_s32(part.v[i], codes.v[i], v);
}
template <int Slot>
MOEFLUX_MATH void add_columns4(Part& part, const std::uint8_t* codes, const std::int8_t* x) noexcept {
  add_codes4<Slot>(part, {{load_codes(codes), load_codes(codes + 16), load_codes(codes + 32), load_codes(codes + 48)}}, x);
}
template <int Slot>
MOEFLUX_MATH void end_part(I16& acc, const Part& part) noexcept {
  acc = part;
}

// Scales and biases of sixteen rows, 16 bits each, a row's two in one double word.
MOEFLUX_MATH void band_scales(const std::uint8_t* p, bool bf16, V16& scales, V16& biases) noexcept {
  std::uint16_t pairs[32];
  std::memcpy(pairs, p, sizeof pairs);
  const auto widen = [bf16](uint16x4_t x) { return bf16 ? vreinterpretq_f32_u32(vshll_n_u16(x, 16)) : vcvt_f32_f16(vreinterpret_f16_u16(x)); };
  for (int i = 0; i < 4; ++i) {
    const uint16x4x2_t two = vld2_u16(pairs + 8 * i);
    scales.v[i] = widen(two.val[0]);
    biases.v[i] = widen(two.val[1]);
  }
}

// out[j][i] = the j-th four codes of row i.
MOEFLUX_MATH void transpose32(const std::uint8_t (&block)[16][32], std::uint8_t* out) noexcept {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) std::memcpy(out + 64 * j + 4 * i, block[i] + 4 * j, 4);
}

template <bool E2m1>
MOEFLUX_MATH void transpose_nibbles32(const std::uint8_t* const (&rows)[16], std::uint8_t* out) noexcept {
  alignas(16) std::uint8_t block[16][32];
  for (int i = 0; i < 16; ++i) unpack_nibbles32<E2m1>(rows[i], block[i]);
  transpose32(block, out);
}

// Eight bf16 of each of sixteen rows -> out[j][i] = value j of row i.
MOEFLUX_MATH void transpose_bf16(const std::byte* p, std::uint64_t row_bytes, float* out) noexcept {
  for (int i = 0; i < 16; ++i, p += row_bytes)
    for (int j = 0; j < 8; ++j) out[16 * j + i] = quant::load_scalar<DType::BF16>(p, j);
}

template <int Slot>
MOEFLUX_MATH Partial row_dot(const std::uint8_t* codes, const std::int8_t* x8, int n) noexcept {
  int32x4_t s = vdupq_n_s32(0);
  for (int i = 0; i < n; i += 32) {
    if constexpr (Slot == 3 || Slot == 6) {
      const Codes c = nibbles32<Slot == 3>(codes + i / 2);
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
