// Attention for the query heads that share a kv head: keys and values are read and widened once for all of
// them. Scores four keys by four queries at a time; the sixteen dot products are summed by one tree for all,
// pairing the same lanes as reduce_add.

namespace {

// Four queries by four keys as named variables: xqk.
#define MOEFLUX_EACH16(X)                                                                                 \
  X(0, 0)                                                                                                 \
  X(0, 1) X(0, 2) X(0, 3) X(1, 0) X(1, 1) X(1, 2) X(1, 3) X(2, 0) X(2, 1) X(2, 2) X(2, 3) X(3, 0) X(3, 1) \
      X(3, 2) X(3, 3)

// Lanes l and l + 8 of a in the lower half, of b in the upper.
MOEFLUX_MATH __m512 fold8(V16 a, V16 b) noexcept {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a.a, b.a, 0x44), _mm512_shuffle_f32x4(a.a, b.a, 0xee));
}
MOEFLUX_MATH __m512 fold4(__m512 ab, __m512 cd) noexcept {
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}
MOEFLUX_MATH __m512 fold2(__m512 a, __m512 b) noexcept {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
MOEFLUX_MATH __m512 fold1(__m512 a, __m512 b) noexcept {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// Four rows that will be needed, asked for line by line.
struct RowsAhead {
  const std::byte* first;
  std::int64_t stride;  // bytes
  MOEFLUX_MATH void fetch(std::int64_t at) const noexcept {
    const auto* p = reinterpret_cast<const char*>(first + at);
    for (int i = 0; i < 4; ++i, p += stride) _mm_prefetch(p, _MM_HINT_T1);
  }
};

// scores[query][key] for keys at k[0..3] and four queries; 128-bit quarter q of the result is query q. Meanwhile the rows of
// ahead[0 .. Ahead) are asked for.
template <bool F16, int Ahead>
MOEFLUX_MATH __m512 scores_4x4(const float* const* q, const std::byte* const (&k)[4], std::int64_t n,
                               const RowsAhead* ahead) noexcept {
#define MOEFLUX_CLEAR(i, j) V16 x##i##j = zero();
  MOEFLUX_EACH16(MOEFLUX_CLEAR)
#undef MOEFLUX_CLEAR
  const float *q0 = q[0], *q1 = q[1], *q2 = q[2], *q3 = q[3];
  const std::byte *p0 = k[0], *p1 = k[1], *p2 = k[2], *p3 = k[3];
  for (std::int64_t i = 0; i < n; i += 16) {
    for (int a = 0; a < Ahead; ++a) ahead[a].fetch(i * (F16 ? 2 : 4));
    const V16 k0 = load_kv(p0, i, F16), k1 = load_kv(p1, i, F16), k2 = load_kv(p2, i, F16),
              k3 = load_kv(p3, i, F16);
    const V16 v0 = load(q0 + i), v1 = load(q1 + i), v2 = load(q2 + i), v3 = load(q3 + i);
#define MOEFLUX_STEP(a, b) x##a##b = fma(v##a, k##b, x##a##b);
    MOEFLUX_EACH16(MOEFLUX_STEP)
#undef MOEFLUX_STEP
  }
  // fold2 puts its arguments side by side as pairs, fold1 as single values: keys 0 1 | 2 3, then quarters by
  // query.
  const __m512 a = fold4(fold8(x00, x10), fold8(x20, x30)), b = fold4(fold8(x01, x11), fold8(x21, x31));
  const __m512 c = fold4(fold8(x02, x12), fold8(x22, x32)), d = fold4(fold8(x03, x13), fold8(x23, x33));
  return fold1(fold2(a, b), fold2(c, d));
}

#undef MOEFLUX_EACH16

inline constexpr int kMaxHeads = 8;

struct HeadTile {
  const float* q[kMaxHeads];
  SoftmaxState* s[kMaxHeads];
  float* p;  // [kMaxHeads][Attention::kTile]
};

// acc = acc * c, then acc = fma(p_j, v_j, acc) for 32 columns of four heads. Ahead: meanwhile the same columns of the next tile's keys are
// asked for, so that memory is read in this half of the time, too.
template <bool F16, bool Ahead>
MOEFLUX_MATH void add_values(const AttentionGroup& a, const HeadTile& h, int first_head, const float* c,
                             std::int64_t base, std::int64_t j0, std::int64_t j1, std::int64_t i) noexcept {
  float *y0 = h.s[first_head]->acc + i, *y1 = h.s[first_head + 1]->acc + i,
        *y2 = h.s[first_head + 2]->acc + i, *y3 = h.s[first_head + 3]->acc + i;
  const float* p = h.p + first_head * Attention::kTile - base;
  constexpr std::int64_t kTile = Attention::kTile, kSize = F16 ? 2 : 4;
  const V16 c0 = set1(c[0]), c1 = set1(c[1]), c2 = set1(c[2]), c3 = set1(c[3]);
  V16 a0 = mul(load(y0), c0), a1 = mul(load(y1), c1), a2 = mul(load(y2), c2), a3 = mul(load(y3), c3);
  V16 b0 = mul(load(y0 + 16), c0), b1 = mul(load(y1 + 16), c1), b2 = mul(load(y2 + 16), c2),
      b3 = mul(load(y3 + 16), c3);
  for (std::int64_t j = j0; j < j1; ++j) {
    if constexpr (Ahead) {
      const auto* key = reinterpret_cast<const char*>(a.k + ((j + kTile < a.j_end ? j + kTile : a.j_end - 1) * a.k_stride + i) * kSize);
      _mm_prefetch(key, _MM_HINT_T1);
      if constexpr (!F16) _mm_prefetch(key + 64, _MM_HINT_T1);
    }
    const std::byte* v = a.v + j * a.v_stride * kSize;
    const V16 v0 = load_kv(v, i, F16), v1 = load_kv(v, i + 16, F16);
    const V16 p0 = set1(p[j]), p1 = set1(p[j + kTile]), p2 = set1(p[j + 2 * kTile]),
              p3 = set1(p[j + 3 * kTile]);
    a0 = fma(p0, v0, a0), b0 = fma(p0, v1, b0);
    a1 = fma(p1, v0, a1), b1 = fma(p1, v1, b1);
    a2 = fma(p2, v0, a2), b2 = fma(p2, v1, b2);
    a3 = fma(p3, v0, a3), b3 = fma(p3, v1, b3);
  }
  store(y0, a0), store(y1, a1), store(y2, a2), store(y3, a3);
  store(y0 + 16, b0), store(y1 + 16, b1), store(y2 + 16, b2), store(y3 + 16, b3);
}

template <bool F16>
void attend_heads_tile(const AttentionGroup& a, const HeadTile& h, int n_heads, std::int64_t base,
                       std::int64_t j0, std::int64_t j1) noexcept {
  constexpr std::int64_t kTile = Attention::kTile, kSize = F16 ? 2 : 4, kAheadKeys = 8;
  const float minus_inf = -__builtin_inff();
  for (std::int64_t i = 0; i < n_heads * kTile; i += 16) store(h.p + i, set1(minus_inf));
  const __m512 scale = _mm512_set1_ps(a.scale);
  for (std::int64_t j = j0; j < j1; j += 4) {
    const std::byte* k[4];
    for (int i = 0; i < 4; ++i) k[i] = a.k + (j + i < j1 ? j + i : j1 - 1) * a.k_stride * kSize;
    const auto mask = static_cast<__mmask8>((1u << (j1 - j < 4 ? j1 - j : 4)) - 1u);
    // Key and value rows lie apart, and values are read by columns: more than the hardware sees coming. Keys of the next steps and
    // the values of these keys are asked for into the second-level cache, a line of each row between two steps of arithmetic: all
    // at once they would wait for each other.
    const RowsAhead ahead[2] = {{a.k + (j + kAheadKeys) * a.k_stride * kSize, a.k_stride * kSize}, {a.v + j * a.v_stride * kSize, a.v_stride * kSize}};
    for (int q = 0; q < n_heads; q += 4) {
      const __m512 dots = !a.cold        ? scores_4x4<F16, 0>(h.q + q, k, a.head_dim, nullptr)
                          : n_heads == 4 ? scores_4x4<F16, 2>(h.q + q, k, a.head_dim, ahead)
                                         : scores_4x4<F16, 1>(h.q + q, k, a.head_dim, ahead + q / 4);
      const __m512 v = _mm512_mul_ps(scale, dots);
      float* p = h.p + q * kTile + (j - base);
      _mm_mask_storeu_ps(p, mask, _mm512_castps512_ps128(v));
      _mm_mask_storeu_ps(p + kTile, mask, _mm512_extractf32x4_ps(v, 1));
      _mm_mask_storeu_ps(p + 2 * kTile, mask, _mm512_extractf32x4_ps(v, 2));
      _mm_mask_storeu_ps(p + 3 * kTile, mask, _mm512_extractf32x4_ps(v, 3));
    }
  }
  float c[kMaxHeads];
  for (int q = 0; q < n_heads; ++q) {
    SoftmaxState& s = *h.s[q];
    float* p = h.p + q * kTile;
    const V16 s0 = load(p), s1 = load(p + 16), s2 = load(p + 32), s3 = load(p + 48);
    const float tile_top = reduce_max(max(max(s0, s1), max(s2, s3)));
    const float top = s.m > tile_top ? s.m : tile_top;
    c[q] = s.m == minus_inf ? 0.0f : math::exp(s.m - top);
    V16 sum = zero();
    for (std::int64_t j = 0; j < kTile; j += 16) {
      const V16 e = exp(sub(load(p + j), set1(top)));
      store(p + j, e);
      sum = add(sum, e);
    }
    s.l = math::fma(s.l, c[q], reduce_add(sum));
    s.m = top;
  }
  for (std::int64_t i = 0; i < a.v_dim; i += 32)
    for (int q = 0; q < n_heads; q += 4)
      a.cold && q == 0 && i < a.head_dim ? add_values<F16, true>(a, h, q, c + q, base, j0, j1, i) : add_values<F16, false>(a, h, q, c + q, base, j0, j1, i);
}

// n_heads is a multiple of 4 (heads to fill up repeat one and write to a state of their own), head_dim and v_dim
// are multiples of 32.
void attention_heads(const AttentionGroup& a, std::int64_t q_stride, int n_queries, SoftmaxState* state,
                     int n_heads) noexcept {
  HeadTile h;
  h.p = a.scores;
  for (int i = 0; i < n_heads; ++i) {
    h.q[i] = a.q + (i < n_queries ? i : 0) * q_stride;
    h.s[i] = state + i;
  }
  for (std::int64_t j = a.j_begin; j < a.j_end;) {
    const std::int64_t base = j / Attention::kTile * Attention::kTile;
    const std::int64_t end = base + Attention::kTile < a.j_end ? base + Attention::kTile : a.j_end;
    a.f16 ? attend_heads_tile<true>(a, h, n_heads, base, j, end)
          : attend_heads_tile<false>(a, h, n_heads, base, j, end);
    j = end;
  }
}

}  // namespace
