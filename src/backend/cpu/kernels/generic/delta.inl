// Causal convolution and the gated delta rule.

namespace {

void conv_channels(const ConvBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  const std::int64_t taps = b.n_taps;
  for (std::int64_t c = c_begin; c < c_end; c += 16) {
    const std::int64_t n = c_end - c < 16 ? c_end - c : 16;
    float w[CausalConv::kMaxTaps][16] = {};
    for (std::int64_t j = 0; j < taps; ++j)
      for (std::int64_t l = 0; l < n; ++l) w[j][l] = b.w[(c + l) * taps + j];
    for (std::int64_t t = 0; t < b.n_tokens; ++t) {
      V16 acc = zero();
      for (std::int64_t j = 0; j < taps; ++j) {
        const std::int64_t at = t - (taps - 1) + j;  // before 0: the saved rows, oldest first
        const float* row = at < 0 ? b.state + (at + taps - 1) * b.n_channels : b.u + at * b.u_stride;
        acc = fma(load(w[j]), n == 16 ? load(row + c) : load_n(row + c, n), acc);
      }
      const V16 y = silu(acc);
      float* out = b.y + t * b.y_stride + c;
      n == 16 ? store(out, y) : store_n(out, y, n);
    }
  }
}

// Tokens outside, columns inside: a block's state stays in the first-level cache while its tokens pass.
void delta_columns(const DeltaBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  for (std::int64_t t = 0; t < b.n_tokens; ++t) {
    const float* q = b.q + t * b.q_stride;
    const float* k = b.k + t * b.k_stride;
    const float* v = b.v + t * b.v_stride;
    const V16 decay = set1(b.decay[t * b.decay_stride]);
    const float beta = b.beta[t * b.beta_stride];
    for (std::int64_t c = c_begin; c < c_end; ++c) {
      float* s = b.state + c * b.dk;
      V16 acc = zero();
      for (std::int64_t i = 0; i < b.dk; i += 16) {
        const std::int64_t n = b.dk - i < 16 ? b.dk - i : 16;
        const V16 x = mul(n == 16 ? load(s + i) : load_n(s + i, n), decay);
        acc = fma(n == 16 ? load(k + i) : load_n(k + i, n), x, acc);
        n == 16 ? store(s + i, x) : store_n(s + i, x, n);
      }
      const V16 d = set1(beta * (v[c] - reduce_add(acc)));
      acc = zero();
      for (std::int64_t i = 0; i < b.dk; i += 16) {
        const std::int64_t n = b.dk - i < 16 ? b.dk - i : 16;
        const V16 x = fma(n == 16 ? load(k + i) : load_n(k + i, n), d, n == 16 ? load(s + i) : load_n(s + i, n));
        acc = fma(n == 16 ? load(q + i) : load_n(q + i, n), x, acc);
        n == 16 ? store(s + i, x) : store_n(s + i, x, n);
      }
      b.y[t * b.y_stride + c] = reduce_add(acc);
    }
  }
}

}  // namespace
