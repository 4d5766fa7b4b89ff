// One register of the sixteen lanes at a time, for generic/attention_heads.inl: half of the 32 registers hold
// the sums of four queries and four keys, or of four queries and four registers of values.

namespace {

using Reg = float32x4_t;
inline constexpr int kRegLanes = 4, kScoreKeys = 4, kValueRegs = 4;

MOEFLUX_MATH Reg reg_set1(float x) noexcept { return vdupq_n_f32(x); }
MOEFLUX_MATH Reg reg_load(const float* p) noexcept { return vld1q_f32(p); }
MOEFLUX_MATH Reg reg_load_f16(const std::byte* p) noexcept {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p))));
}
MOEFLUX_MATH void reg_store(float* p, Reg x) noexcept { vst1q_f32(p, x); }
MOEFLUX_MATH Reg reg_mul(Reg x, Reg y) noexcept { return vmulq_f32(x, y); }
MOEFLUX_MATH Reg reg_fma(Reg x, Reg y, Reg z) noexcept { return vfmaq_f32(z, x, y); }

// scores[q][key] = scale * sum of lanes[register][q][key][..] for four queries `stride` apart and four keys.
MOEFLUX_MATH void sum_lanes(const float (&lanes)[4][4][4][4], float scale, float* scores,
                            std::int64_t stride) noexcept {
  for (int q = 0; q < 4; ++q) {
    Reg t[4];
    for (int k = 0; k < 4; ++k) {
      const auto at = [&](int r) noexcept { return vld1q_f32(lanes[r][q][k]); };
      t[k] = vaddq_f32(vaddq_f32(at(0), at(2)), vaddq_f32(at(1), at(3)));
    }
    Reg u[2];
    for (int k = 0; k < 2; ++k) {
      const float64x2_t x = vreinterpretq_f64_f32(t[2 * k]), y = vreinterpretq_f64_f32(t[2 * k + 1]);
      u[k] = vaddq_f32(vreinterpretq_f32_f64(vtrn1q_f64(x, y)), vreinterpretq_f32_f64(vtrn2q_f64(x, y)));
    }
    vst1q_f32(scores + q * stride, vmulq_f32(vdupq_n_f32(scale), vpaddq_f32(u[0], u[1])));
  }
}

}  // namespace
