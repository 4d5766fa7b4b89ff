// The gated delta rule for 128 keys: a state row lives in eight registers while its tokens pass, two rows at
// a time because one row's chain of additions leaves the multipliers idle.

namespace {

#define MOEFLUX_EACH8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

// `n_tokens` are b's, known to the compiler where there is one. Not inlined: a loop over rows around it makes one token a quarter slower.
[[gnu::noinline]] void delta_columns_128(const DeltaBlock& b, std::int64_t c, std::int64_t n_tokens) noexcept {
  float* s = b.state + c * 128;
#define MOEFLUX_LOAD(i) V16 s##i = load(s + 16 * i), r##i = load(s + 128 + 16 * i);
  MOEFLUX_EACH8(MOEFLUX_LOAD)
#undef MOEFLUX_LOAD
  for (std::int64_t t = 0; t < n_tokens; ++t) {
    const float* q = b.q + t * b.q_stride;
    const float* k = b.k + t * b.k_stride;
    const float* v = b.v + t * b.v_stride + c;
    const V16 decay = set1(b.decay[t * b.decay_stride]);
    const float beta = b.beta[t * b.beta_stride];
    V16 m0 = zero(), m1 = zero();
#define MOEFLUX_DECAY(i)                            \
  s##i = mul(s##i, decay), r##i = mul(r##i, decay); \
  m0 = fma(load(k + 16 * i), s##i, m0), m1 = fma(load(k + 16 * i), r##i, m1);
    MOEFLUX_EACH8(MOEFLUX_DECAY)
#undef MOEFLUX_DECAY
    const V16 d0 = set1(beta * (v[0] - reduce_add(m0))), d1 = set1(beta * (v[1] - reduce_add(m1)));
    m0 = zero(), m1 = zero();
#define MOEFLUX_UPDATE(i)                                                         \
  s##i = fma(load(k + 16 * i), d0, s##i), r##i = fma(load(k + 16 * i), d1, r##i); \
  m0 = fma(load(q + 16 * i), s##i, m0), m1 = fma(load(q + 16 * i), r##i, m1);
    MOEFLUX_EACH8(MOEFLUX_UPDATE)
#undef MOEFLUX_UPDATE
    b.y[t * b.y_stride + c] = reduce_add(m0);
    b.y[t * b.y_stride + c + 1] = reduce_add(m1);
  }
#define MOEFLUX_STORE(i) store(s + 16 * i, s##i), store(s + 128 + 16 * i, r##i);
  MOEFLUX_EACH8(MOEFLUX_STORE)
#undef MOEFLUX_STORE
}

#undef MOEFLUX_EACH8

void delta_columns_tiles(const DeltaBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  std::int64_t c = c_begin;
  if (b.dk == 128)
    for (; c + 2 <= c_end; c += 2) b.n_tokens == 1 ? delta_columns_128(b, c, 1) : delta_columns_128(b, c, b.n_tokens);
  if (c < c_end) delta_columns(b, c, c_end);
}

}  // namespace
