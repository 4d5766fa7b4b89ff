// Attention for the query heads that share a kv head, where registers have fewer than sixteen lanes: keys and
// values are read and widened once for four heads. Scores go register by register of the sixteen lanes, so
// that the sums of four queries and kScoreKeys keys stay in registers; sum_lanes then adds the lanes of all
// of them by the tree of reduce_add. What a register is, registers.inl says.

namespace {

inline constexpr int kLaneRegs = 16 / kRegLanes;
inline constexpr int kMaxHeads = 8;
// A tile's scores, and room for what the last step writes beyond.
inline constexpr std::int64_t kScoreStride = Attention::kTile + 16;

// Four queries (or heads) by up to four keys (or registers of values) as named variables: xqk.
#define MOEFLUX_EACH_KEY(X, q) X(q, 0) X(q, 1) X(q, 2) X(q, 3)
#define MOEFLUX_EACH16(X) \
  MOEFLUX_EACH_KEY(X, 0) MOEFLUX_EACH_KEY(X, 1) MOEFLUX_EACH_KEY(X, 2) MOEFLUX_EACH_KEY(X, 3)

template <bool F16>
MOEFLUX_MATH Reg reg_load_kv(const std::byte* p, std::int64_t i) noexcept {
  if constexpr (F16)
    return reg_load_f16(p + i * 2);
  else
    return reg_load(reinterpret_cast<const float*>(p) + i);
}

// Rows that will be needed.
struct RowsAhead {
  const std::byte* first;
  std::int64_t stride;  // bytes
};

// Lanes first .. first + kRegLanes of the dot products of four queries with kScoreKeys keys, to
// out[query][key]. Meanwhile the rows of `ahead` are asked for.
template <bool F16, bool Ahead>
MOEFLUX_MATH void score_lanes(const float* const* q, const std::byte* const (&k)[4], std::int64_t first,
                              std::int64_t n, const RowsAhead& ahead,
                              float (&out)[4][4][kRegLanes]) noexcept {
#define MOEFLUX_CLEAR(a, b) [[maybe_unused]] Reg x##a##b = reg_set1(0.0f);
  MOEFLUX_EACH16(MOEFLUX_CLEAR)
#undef MOEFLUX_CLEAR
  const float *q0 = q[0], *q1 = q[1], *q2 = q[2], *q3 = q[3];
  const std::byte *p0 = k[0], *p1 = k[1], *p2 = k[2], *p3 = k[3];
  for (std::int64_t i = first; i < n; i += 16) {
    if constexpr (Ahead) {
      const std::byte* line = ahead.first + i * (F16 ? 2 : 4);
      for (int r = 0; r < kScoreKeys; ++r, line += ahead.stride) __builtin_prefetch(line, 0, 2);
    }
    [[maybe_unused]] const Reg k0 = reg_load_kv<F16>(p0, i), k1 = reg_load_kv<F16>(p1, i),
                               k2 = reg_load_kv<F16>(p2, i), k3 = reg_load_kv<F16>(p3, i);
#define MOEFLUX_STEP(a, b) \
  if constexpr (b < kScoreKeys) x##a##b = reg_fma(v, k##b, x##a##b);
#define MOEFLUX_QUERY(a)              \
  {                                   \
    const Reg v = reg_load(q##a + i); \
    MOEFLUX_EACH_KEY(MOEFLUX_STEP, a) \
  }
    MOEFLUX_QUERY(0) MOEFLUX_QUERY(1) MOEFLUX_QUERY(2) MOEFLUX_QUERY(3)
#undef MOEFLUX_QUERY
#undef MOEFLUX_STEP
  }
#define MOEFLUX_STORE(a, b) \
  if constexpr (b < kScoreKeys) reg_store(out[a][b], x##a##b);
  MOEFLUX_EACH16(MOEFLUX_STORE)
#undef MOEFLUX_STORE
}

struct HeadTile {
  const float* q[kMaxHeads];
  SoftmaxState* s[kMaxHeads];
  float p[kMaxHeads][kScoreStride];
};

// Key and value rows lie apart, and values are read by columns: more than the hardware sees coming. Keys of
// the next steps and the values of these keys are asked for into the second-level cache, a line of each row
// between two steps of arithmetic.
template <bool F16, bool Cold>
MOEFLUX_MATH void score_keys(const AttentionGroup& a, HeadTile& h, int n_heads, std::int64_t base,
                             std::int64_t j, std::int64_t j1) noexcept {
  constexpr std::int64_t kSize = F16 ? 2 : 4, kAheadKeys = 8;
  const std::byte* k[4];
  for (int i = 0; i < 4; ++i) k[i] = a.k + (j + i < j1 ? j + i : j1 - 1) * a.k_stride * kSize;
  const RowsAhead keys{a.k + (j + kAheadKeys) * a.k_stride * kSize, a.k_stride * kSize};
  const RowsAhead values{a.v + j * a.v_stride * kSize, a.v_stride * kSize};
  alignas(64) float lanes[kLaneRegs][4][4][kRegLanes];
  for (int q = 0; q < n_heads; q += 4) {
    score_lanes<F16, Cold>(h.q + q, k, 0, a.head_dim, q == 0 ? keys : values, lanes[0]);
    for (int r = 1; r < kLaneRegs - 1; ++r)
      score_lanes<F16, false>(h.q + q, k, r * kRegLanes, a.head_dim, values, lanes[r]);
    if (Cold && n_heads == 4)
      score_lanes<F16, true>(h.q + q, k, 16 - kRegLanes, a.head_dim, values, lanes[kLaneRegs - 1]);
    else
      score_lanes<F16, false>(h.q + q, k, 16 - kRegLanes, a.head_dim, values, lanes[kLaneRegs - 1]);
    sum_lanes(lanes, a.scale, h.p[q] + (j - base), kScoreStride);
  }
}

// acc = acc * c, then acc = fma(p_j, v_j, acc) for N registers of columns of four heads. Meanwhile the same columns of
// the first n_ahead keys behind these are asked for, so that memory is read in this half of the time, too.
template <bool F16, int N>
MOEFLUX_MATH void add_values(const AttentionGroup& a, const HeadTile& h, int first_head, const float* c,
                             std::int64_t base, std::int64_t j0, std::int64_t j1, std::int64_t i,
                             std::int64_t n_ahead) noexcept {
  constexpr std::int64_t kSize = F16 ? 2 : 4;
  float *y0 = h.s[first_head]->acc + i, *y1 = h.s[first_head + 1]->acc + i,
        *y2 = h.s[first_head + 2]->acc + i, *y3 = h.s[first_head + 3]->acc + i;
#define MOEFLUX_LOAD(q, r)      \
  [[maybe_unused]] Reg x##q##r; \
  if constexpr (r < N) x##q##r = reg_mul(reg_load(y##q + r * kRegLanes), reg_set1(c[q]));
  MOEFLUX_EACH16(MOEFLUX_LOAD)
#undef MOEFLUX_LOAD
  const float* p = h.p[first_head] + (j0 - base);
  const std::byte* v = a.v + (j0 * a.v_stride + i) * kSize;
  const std::int64_t step = a.v_stride * kSize;
  const std::byte* ahead = a.k + (j1 * a.k_stride + i) * kSize;
  const std::byte* const ahead_end = ahead + n_ahead * a.k_stride * kSize;
  for (std::int64_t n = j1 - j0; n > 0; --n, ++p, v += step) {
    if (ahead < ahead_end) {
      for (int b = 0; b < N * kRegLanes * kSize; b += 64) __builtin_prefetch(ahead + b, 0, 2);
      ahead += a.k_stride * kSize;
    }
#define MOEFLUX_VALUE(r)     \
  [[maybe_unused]] Reg v##r; \
  if constexpr (r < N) v##r = reg_load_kv<F16>(v, r * kRegLanes);
    MOEFLUX_VALUE(0) MOEFLUX_VALUE(1) MOEFLUX_VALUE(2) MOEFLUX_VALUE(3)
#undef MOEFLUX_VALUE
#define MOEFLUX_STEP(q, r) \
  if constexpr (r < N) x##q##r = reg_fma(w, v##r, x##q##r);
#define MOEFLUX_HEAD(q)                          \
  {                                              \
    const Reg w = reg_set1(p[q * kScoreStride]); \
    MOEFLUX_EACH_KEY(MOEFLUX_STEP, q)            \
  }
    MOEFLUX_HEAD(0) MOEFLUX_HEAD(1) MOEFLUX_HEAD(2) MOEFLUX_HEAD(3)
#undef MOEFLUX_HEAD
#undef MOEFLUX_STEP
  }
#define MOEFLUX_STORE(q, r) \
  if constexpr (r < N) reg_store(y##q + r * kRegLanes, x##q##r);
  MOEFLUX_EACH16(MOEFLUX_STORE)
#undef MOEFLUX_STORE
}

#undef MOEFLUX_EACH16
#undef MOEFLUX_EACH_KEY

// Scores to probabilities in place; returns what the sums so far are multiplied by.
MOEFLUX_MATH float soften(SoftmaxState& s, float* p) noexcept {
  const float tile_top = reduce_max(max(max(load(p), load(p + 16)), max(load(p + 32), load(p + 48))));
  const float top = s.m > tile_top ? s.m : tile_top;
  const float c = s.m == -__builtin_inff() ? 0.0f : math::exp(s.m - top);
  V16 sum = zero();
  for (std::int64_t j = 0; j < Attention::kTile; j += 16) {
    const V16 e = exp(sub(load(p + j), set1(top)));
    store(p + j, e);
    sum = add(sum, e);
  }
  s.l = math::fma(s.l, c, reduce_add(sum));
  s.m = top;
  return c;
}

template <bool F16>
void attend_heads_tile(const AttentionGroup& a, HeadTile& h, int n_heads, std::int64_t base, std::int64_t j0,
                       std::int64_t j1) noexcept {
  for (std::int64_t j = j0; j < j1; j += kScoreKeys)
    a.cold ? score_keys<F16, true>(a, h, n_heads, base, j, j1)
           : score_keys<F16, false>(a, h, n_heads, base, j, j1);
  float c[kMaxHeads];
  for (int q = 0; q < n_heads; ++q) {
    for (std::int64_t j = 0; j < j0 - base; ++j) h.p[q][j] = -__builtin_inff();
    for (std::int64_t j = j1 - base; j < Attention::kTile; ++j) h.p[q][j] = -__builtin_inff();
    c[q] = soften(*h.s[q], h.p[q]);
  }
  const std::int64_t left = a.j_end - j1, next = left < Attention::kTile ? left : Attention::kTile;
  const auto ahead = [&](int q) noexcept { return a.cold && q == 0 ? next : 0; };
  std::int64_t i = 0;
  for (; i + kValueRegs * kRegLanes <= a.v_dim; i += kValueRegs * kRegLanes)
    for (int q = 0; q < n_heads; q += 4) add_values<F16, kValueRegs>(a, h, q, c + q, base, j0, j1, i, ahead(q));
  const std::int64_t rest = (a.v_dim - i) / kRegLanes;
  for (int q = 0; q < n_heads && rest > 0; q += 4)
    rest == 1 ? add_values<F16, 1>(a, h, q, c + q, base, j0, j1, i, ahead(q))
              : add_values<F16, 2>(a, h, q, c + q, base, j0, j1, i, ahead(q));
}

// n_heads is a multiple of 4 (heads to fill up repeat one and write to a state of their own), head_dim and
// v_dim are multiples of 32.
void attention_heads(const AttentionGroup& a, std::int64_t q_stride, int n_queries, SoftmaxState* state,
                     int n_heads) noexcept {
  HeadTile h;
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
