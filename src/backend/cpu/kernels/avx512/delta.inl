// The gated delta rule for 128 keys: a state row lives in eight registers while its tokens pass, two rows at
// a time because one row's chain of additions leaves the multipliers idle.

namespace {

#define MOEFLUX_EACH8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

// `n_tokens` are b's, known to the compiler where there is one. Not inlined: a loop over rows around it makes one token a quarter slower.
// Rows: two, or three, whose sums take no longer than those of two but leave no register free.
template <int Rows>
[[gnu::noinline]] void delta_columns_128(const DeltaBlock& b, std::int64_t c, std::int64_t n_tokens) noexcept {
  constexpr bool kThree = Rows == 3;
  float* s = b.state + c * 128;
#define MOEFLUX_LOAD(i) V16 s##i = load(s + 16 * i), r##i = load(s + 128 + 16 * i), p##i = kThree ? load(s + 256 + 16 * i) : zero();
  MOEFLUX_EACH8(MOEFLUX_LOAD)
#undef MOEFLUX_LOAD
  for (std::int64_t t = 0; t < n_tokens; ++t) {
    const float* q = b.q + t * b.q_stride;
    const float* k = b.k + t * b.k_stride;
    const float* v = b.v + t * b.v_stride + c;
    const V16 decay = set1(b.decay[t * b.decay_stride]);
    const float beta = b.beta[t * b.beta_stride];
    V16 m0 = zero(), m1 = zero(), m2 = zero();
#define MOEFLUX_DECAY(i)                                                       \
  s##i = mul(s##i, decay), r##i = mul(r##i, decay);                            \
  m0 = fma(load(k + 16 * i), s##i, m0), m1 = fma(load(k + 16 * i), r##i, m1);  \
  if constexpr (kThree) p##i = mul(p##i, decay), m2 = fma(load(k + 16 * i), p##i, m2);
    MOEFLUX_EACH8(MOEFLUX_DECAY)
#undef MOEFLUX_DECAY
    const V16 d0 = set1(beta * (v[0] - reduce_add(m0))), d1 = set1(beta * (v[1] - reduce_add(m1)));
    const V16 d2 = kThree ? set1(beta * (v[2] - reduce_add(m2))) : zero();
    m0 = zero(), m1 = zero(), m2 = zero();
#define MOEFLUX_UPDATE(i)                                                         \
  s##i = fma(load(k + 16 * i), d0, s##i), r##i = fma(load(k + 16 * i), d1, r##i); \
  m0 = fma(load(q + 16 * i), s##i, m0), m1 = fma(load(q + 16 * i), r##i, m1);     \
  if constexpr (kThree) p##i = fma(load(k + 16 * i), d2, p##i), m2 = fma(load(q + 16 * i), p##i, m2);
    MOEFLUX_EACH8(MOEFLUX_UPDATE)
#undef MOEFLUX_UPDATE
    float* y = b.y + t * b.y_stride + c;
    y[0] = reduce_add(m0), y[1] = reduce_add(m1);
    if constexpr (kThree) y[2] = reduce_add(m2);
  }
#define MOEFLUX_STORE(i)                                  \
  store(s + 16 * i, s##i), store(s + 128 + 16 * i, r##i); \
  if constexpr (kThree) store(s + 256 + 16 * i, p##i);
  MOEFLUX_EACH8(MOEFLUX_STORE)
#undef MOEFLUX_STORE
}

#undef MOEFLUX_EACH8

void delta_columns_tiles(const DeltaBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  std::int64_t c = c_begin;
  if (b.dk == 128) {
    if (b.n_tokens == 1)
      for (; c + 2 <= c_end; c += 2) delta_columns_128<2>(b, c, 1);
    else
      for (; c + 2 <= c_end;) {
        const std::int64_t left = c_end - c;
        if (left >= 3 && left != 4)
          delta_columns_128<3>(b, c, b.n_tokens), c += 3;
        else
          delta_columns_128<2>(b, c, b.n_tokens), c += 2;
      }
  }
  if (c < c_end) delta_columns(b, c, c_end);
}

}  // namespace
