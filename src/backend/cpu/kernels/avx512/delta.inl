// The gated delta rule. One token: a state row lives in eight registers, two rows at a time. Many tokens: the passes of
// generic/delta_rows.inl for eight rows, whose sums share one tree of additions.

namespace {

#define MOEFLUX_EACH8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

inline constexpr std::int64_t kDeltaAhead = 14 * 128;  // values: 7 KB, as weights (generic/ahead.inl)

// One token, 128 keys; what comes is asked for, to be written. Not inlined: a loop over rows around it makes it a quarter slower. (Asking the
// processor outside of that loop took 2 us more of 50.)
[[gnu::noinline]] void delta_rows_128(const DeltaBlock& b, std::int64_t c) noexcept {
  float* s = b.state + c * 128;
  if (reads_better_ahead())
    for (int i = 0; i < 16; ++i) __builtin_prefetch(s + kDeltaAhead + 16 * i, 1, 2);
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

struct DeltaSums {};

// Lanes 0 to 7 reduce_add(m0 .. m7), 8 to 15 reduce_add(o0 .. o7), pairing the same lanes.
#define MOEFLUX_SUMS                                                                                                                  \
  fold1(fold2(fold4(fold8(m0, m4), fold8(o0, o4)), fold4(fold8(m1, m5), fold8(o1, o5))),                                              \
        fold2(fold4(fold8(m2, m6), fold8(o2, o6)), fold4(fold8(m3, m7), fold8(o3, o7))))

template <bool Last>
MOEFLUX_MATH void delta_pass(float* s, std::int64_t dk, const float* k, const float* q, const float* d, const float* next_k, float next_decay,
                             DeltaSums&, float* sums, float* y) noexcept {
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
  const __m512 all = MOEFLUX_SUMS;
  _mm256_store_ps(sums, _mm512_castps512_ps256(all));
  _mm256_storeu_ps(y, _mm512_extractf32x8_ps(all, 1));
}

MOEFLUX_MATH void delta_begin(float* s, std::int64_t dk, const float* k, float first_decay, DeltaSums&, float* sums) noexcept {
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
  _mm256_store_ps(sums, _mm512_castps512_ps256(MOEFLUX_SUMS));
}

#undef MOEFLUX_SUMS
#undef MOEFLUX_EACH8

MOEFLUX_MATH std::int64_t delta_one(const DeltaBlock& b, std::int64_t c, std::int64_t c_end) noexcept {
  if (b.dk == 128)
    for (; c + 2 <= c_end; c += 2) delta_rows_128(b, c);
  return c;
}

}  // namespace
