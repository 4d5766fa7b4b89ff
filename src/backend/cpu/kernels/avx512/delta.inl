// The gated delta rule. One token: a state row lives in eight registers, two rows at a time. Many tokens: eight rows at a time from the
// first-level cache. Rows in registers wait for their own chains (sums over keys, a tree, the way back) most of the time; eight rows
// have enough to do meanwhile, and their sums share one tree of additions. What a token still has to do with the state and what the next
// one begins with go in one pass, so it is read and written once a token.

namespace {

#define MOEFLUX_EACH8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

// One token, 128 keys. Not inlined: a loop over rows around it makes it a quarter slower.
[[gnu::noinline]] void delta_rows_128(const DeltaBlock& b, std::int64_t c) noexcept {
  float* s = b.state + c * 128;
#define MOEFLUX_LOAD(i) V16 s##i = load(s + 16 * i), r##i = load(s + 128 + 16 * i);
  MOEFLUX_EACH8(MOEFLUX_LOAD)
#undef MOEFLUX_LOAD
  const V16 decay = set1(b.decay[0]);
  const float beta = b.beta[0];
  V16 m0 = zero(), m1 = zero();
#define MOEFLUX_DECAY(i)                            \
  s##i = mul(s##i, decay), r##i = mul(r##i, decay); \
  m0 = fma(load(b.k + 16 * i), s##i, m0), m1 = fma(load(b.k + 16 * i), r##i, m1);
  MOEFLUX_EACH8(MOEFLUX_DECAY)
#undef MOEFLUX_DECAY
  const V16 d0 = set1(beta * (b.v[c] - reduce_add(m0))), d1 = set1(beta * (b.v[c + 1] - reduce_add(m1)));
  m0 = zero(), m1 = zero();
#define MOEFLUX_UPDATE(i)                                                             \
  s##i = fma(load(b.k + 16 * i), d0, s##i), r##i = fma(load(b.k + 16 * i), d1, r##i); \
  m0 = fma(load(b.q + 16 * i), s##i, m0), m1 = fma(load(b.q + 16 * i), r##i, m1);     \
  store(s + 16 * i, s##i), store(s + 128 + 16 * i, r##i);
  MOEFLUX_EACH8(MOEFLUX_UPDATE)
#undef MOEFLUX_UPDATE
  b.y[c] = reduce_add(m0), b.y[c + 1] = reduce_add(m1);
}

inline constexpr int kDeltaRows = 8;

// sums[0 .. 8) = reduce_add(m0 .. m7), sums[8 .. 16) = reduce_add(o0 .. o7), pairing the same lanes.
#define MOEFLUX_SUMS                                                                                                                  \
  fold1(fold2(fold4(fold8(m0, m4), fold8(o0, o4)), fold4(fold8(m1, m5), fold8(o1, o5))),                                              \
        fold2(fold4(fold8(m2, m6), fold8(o2, o6)), fold4(fold8(m3, m7), fold8(o3, o7))))

// Eight rows of the state s [8][dk], decayed for token t, whose corrections are d[8]: the update, y of token t and, unless it is the
// Last, decay and sums for the next one. Sums as above.
template <bool Last>
MOEFLUX_MATH __m512 delta_pass(float* s, std::int64_t dk, const float* k, const float* q, const float* d, const float* next_k,
                               float next_decay) noexcept {
  const V16 decay = set1(next_decay);
#define MOEFLUX_CLEAR(r) V16 m##r = zero(), o##r = zero(), d##r = set1(d[r]);
  MOEFLUX_EACH8(MOEFLUX_CLEAR)
#undef MOEFLUX_CLEAR
  for (std::int64_t i = 0; i < dk; i += 16) {
    const V16 ki = load(k + i), qi = load(q + i), ni = Last ? zero() : load(next_k + i);
    float* at = s + i;
#define MOEFLUX_ROW(r)                        \
  {                                           \
    V16 x = fma(ki, d##r, load(at + r * dk)); \
    o##r = fma(qi, x, o##r);                  \
    if constexpr (!Last) {                    \
      x = mul(x, decay);                      \
      m##r = fma(ni, x, m##r);                \
    }                                         \
    store(at + r * dk, x);                    \
  }
    MOEFLUX_EACH8(MOEFLUX_ROW)
#undef MOEFLUX_ROW
  }
  return MOEFLUX_SUMS;
}

// Decay and sums of the first token.
MOEFLUX_MATH __m512 delta_begin(float* s, std::int64_t dk, const float* k, float first_decay) noexcept {
  const V16 decay = set1(first_decay);
#define MOEFLUX_CLEAR(r) V16 m##r = zero(), o##r = zero();
  MOEFLUX_EACH8(MOEFLUX_CLEAR)
#undef MOEFLUX_CLEAR
  for (std::int64_t i = 0; i < dk; i += 16) {
    const V16 ki = load(k + i);
    float* at = s + i;
#define MOEFLUX_ROW(r)                               \
  {                                                  \
    const V16 x = mul(load(at + r * dk), decay);     \
    m##r = fma(ki, x, m##r), store(at + r * dk, x);  \
  }
    MOEFLUX_EACH8(MOEFLUX_ROW)
#undef MOEFLUX_ROW
  }
  return MOEFLUX_SUMS;
}

#undef MOEFLUX_SUMS
#undef MOEFLUX_EACH8

// Some tokens' keys and queries without gaps: in the op's tensors a head's lie as far apart as all heads are wide, often a power of two, so
// that few of them stay in the caches. Keys of one token more: the pass of the last one asks for them.
struct DeltaTokens {
  static constexpr std::int64_t kFloats = 4096;
  alignas(64) float q[kFloats];
  alignas(64) float k[2 * kFloats];

  MOEFLUX_MATH static std::int64_t most(std::int64_t dk) noexcept { return kFloats / dk; }
  // Tokens [t0, t1); values and results of columns [c0, c1) are asked for meanwhile.
  MOEFLUX_MATH void fill(const DeltaBlock& b, std::int64_t t0, std::int64_t t1, std::int64_t c0, std::int64_t c1) noexcept {
    for (std::int64_t t = t0; t < t1; ++t) {
      const float *from_q = b.q + t * b.q_stride, *from_k = b.k + t * b.k_stride;
      for (std::int64_t i = 0; i < b.dk; i += 16) {
        store(q + (t - t0) * b.dk + i, load(from_q + i));
        store(k + (t - t0) * b.dk + i, load(from_k + i));
      }
      for (std::int64_t c = c0; c < c1; c += 16) {
        __builtin_prefetch(b.v + t * b.v_stride + c, 0, 2);
        __builtin_prefetch(b.y + t * b.y_stride + c, 1, 2);
      }
    }
    if (t1 < b.n_tokens)
      for (std::int64_t i = 0; i < b.dk; i += 16) store(k + (t1 - t0) * b.dk + i, load(b.k + t1 * b.k_stride + i));
  }
};

// What eight rows from c on are corrected by for token t, from the sums of delta_pass.
MOEFLUX_MATH void corrections(const DeltaBlock& b, std::int64_t c, std::int64_t t, __m512 sums, float* d) noexcept {
  const __m256 v = _mm256_loadu_ps(b.v + t * b.v_stride + c), beta = _mm256_set1_ps(b.beta[t * b.beta_stride]);
  _mm256_storeu_ps(d, _mm256_mul_ps(beta, _mm256_sub_ps(v, _mm512_castps512_ps256(sums))));
}

// Tokens [t0, t1), which are in `in`, for sixteen rows from c on, eight and eight: while the sums of some find their way back the others
// are multiplied. d[16]: the corrections of t0, then of t1.
void delta_rows16(const DeltaBlock& b, std::int64_t c, std::int64_t t0, std::int64_t t1, const DeltaTokens& in, float* d) noexcept {
  for (std::int64_t t = t0; t < t1; ++t) {
    const float *q = in.q + (t - t0) * b.dk, *k = in.k + (t - t0) * b.dk;
    for (std::int64_t h = 0; h < 2 * kDeltaRows; h += kDeltaRows) {
      float* s = b.state + (c + h) * b.dk;
      __m512 sums;
      if (t + 1 < b.n_tokens) {
        sums = delta_pass<false>(s, b.dk, k, q, d + h, k + b.dk, b.decay[(t + 1) * b.decay_stride]);
        corrections(b, c + h, t + 1, sums, d + h);
      } else {
        sums = delta_pass<true>(s, b.dk, k, q, d + h, nullptr, 0.0f);
      }
      _mm256_storeu_ps(b.y + t * b.y_stride + c + h, _mm512_extractf32x8_ps(sums, 1));
    }
  }
}

inline constexpr std::int64_t kMostDeltaColumns = 128;

// [c_begin, c_end): a multiple of sixteen columns, at most kMostDeltaColumns.
void delta_many(const DeltaBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  DeltaTokens in;
  float d[kMostDeltaColumns];
  for (std::int64_t t0 = 0; t0 < b.n_tokens; t0 += DeltaTokens::most(b.dk)) {
    const std::int64_t t1 = b.n_tokens - t0 < DeltaTokens::most(b.dk) ? b.n_tokens : t0 + DeltaTokens::most(b.dk);
    in.fill(b, t0, t1, c_begin, c_end);
    if (t0 == 0)
      for (std::int64_t c = c_begin; c < c_end; c += kDeltaRows)
        corrections(b, c, 0, delta_begin(b.state + c * b.dk, b.dk, in.k, b.decay[0]), d + (c - c_begin));
    for (std::int64_t c = c_begin; c < c_end; c += 2 * kDeltaRows) delta_rows16(b, c, t0, t1, in, d + (c - c_begin));
  }
}

void delta_columns_tiles(const DeltaBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  std::int64_t c = c_begin;
  if (b.n_tokens > 1 && b.dk % 16 == 0 && b.dk <= DeltaTokens::kFloats) {
    const std::int64_t whole = c_begin + (c_end - c_begin) / (2 * kDeltaRows) * 2 * kDeltaRows;
    for (; c < whole; c += kMostDeltaColumns) delta_many(b, c, whole - c < kMostDeltaColumns ? whole : c + kMostDeltaColumns);
    c = whole;
  }
  if (b.n_tokens == 1 && b.dk == 128)
    for (; c + 2 <= c_end; c += 2) delta_rows_128(b, c);
  if (c < c_end) delta_columns(b, c, c_end);
}

}  // namespace
