// One register of the sixteen lanes at a time, for generic/attention_heads.inl: sixteen registers hold the
// sums of four queries and three keys, or of four queries and three registers of values, with one left for
// what is multiplied.

namespace {

using Reg = __m256;
inline constexpr int kRegLanes = 8, kScoreKeys = 3, kValueRegs = 3;

MOEFLUX_MATH Reg reg_set1(float x) noexcept { return _mm256_set1_ps(x); }
MOEFLUX_MATH Reg reg_load(const float* p) noexcept { return _mm256_loadu_ps(p); }
MOEFLUX_MATH Reg reg_load_f16(const std::byte* p) noexcept { return _mm256_cvtph_ps(load128(p)); }
MOEFLUX_MATH void reg_store(float* p, Reg x) noexcept { _mm256_storeu_ps(p, x); }
MOEFLUX_MATH Reg reg_mul(Reg x, Reg y) noexcept { return _mm256_mul_ps(x, y); }
MOEFLUX_MATH Reg reg_fma(Reg x, Reg y, Reg z) noexcept { return _mm256_fmadd_ps(x, y, z); }

// scores[q][key] = scale * sum of lanes[register][q][key][..] for four queries `stride` apart and four keys,
// two queries at a time.
MOEFLUX_MATH void sum_lanes(const float (&lanes)[2][4][4][8], float scale, float* scores,
                            std::int64_t stride) noexcept {
  const Reg factor = reg_set1(scale);
  for (int q = 0; q < 4; q += 2) {
    Reg t[4];  // lanes l and l + 4 of query q in the lower half, of q + 1 in the upper
    for (int k = 0; k < kScoreKeys; ++k) {
      const Reg a = _mm256_add_ps(_mm256_load_ps(lanes[0][q][k]), _mm256_load_ps(lanes[1][q][k]));
      const Reg b = _mm256_add_ps(_mm256_load_ps(lanes[0][q + 1][k]), _mm256_load_ps(lanes[1][q + 1][k]));
      t[k] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    t[3] = t[2];
    Reg u[2];
    for (int k = 0; k < 2; ++k) {
      const __m256d x = _mm256_castps_pd(t[2 * k]), y = _mm256_castps_pd(t[2 * k + 1]);
      u[k] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                           _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    const Reg sums = _mm256_add_ps(_mm256_shuffle_ps(u[0], u[1], 0x88), _mm256_shuffle_ps(u[0], u[1], 0xdd));
    const Reg v = _mm256_mul_ps(factor, sums);
    _mm_storeu_ps(scores + q * stride, _mm256_castps256_ps128(v));
    _mm_storeu_ps(scores + (q + 1) * stride, _mm256_extractf128_ps(v, 1));
  }
}

}  // namespace
