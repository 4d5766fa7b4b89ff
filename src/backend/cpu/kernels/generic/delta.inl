// Causal convolution and the gated delta rule.

namespace {

inline constexpr std::int64_t kConvChannels = 256;  // taps of a block, tap by tap: at most 16 KiB, 4 KiB for 4 taps

// Taps of `width` channels side by side. A number of taps that the compiler knows is a few shuffles.
template <std::int64_t Taps>
void spread_taps(const float* w, std::int64_t width, float (&out)[CausalConv::kMaxTaps][kConvChannels]) noexcept {
  for (std::int64_t l = 0; l < width; ++l)
    for (std::int64_t j = 0; j < Taps; ++j) out[j][l] = w[l * Taps + j];
}

// Tokens outside: rows are read in order, and the rows of the taps before stay in the first-level cache.
void conv_block(const ConvBlock& b, std::int64_t c0, std::int64_t width) noexcept {
  const std::int64_t taps = b.n_taps;
  float w[CausalConv::kMaxTaps][kConvChannels];
  if (taps == 4)
    spread_taps<4>(b.w + c0 * 4, width, w);
  else
    for (std::int64_t j = 0; j < taps; ++j)
      for (std::int64_t l = 0; l < width; ++l) w[j][l] = b.w[(c0 + l) * taps + j];
  if (b.n_tokens == 1 && reads_better_ahead() && c0 + 2 * kConvChannels <= b.n_channels) {  // one token: all of it comes from memory
    const float* const next = b.w + (c0 + kConvChannels) * taps;
    for (std::int64_t i = 0; i < kConvChannels * taps; i += 16) __builtin_prefetch(next + i, 0, 2);
    for (std::int64_t j = 0; j + 1 < taps; ++j)
      for (std::int64_t i = 0; i < kConvChannels; i += 16) __builtin_prefetch(b.state + j * b.n_channels + c0 + kConvChannels + i, 1, 2);
  }
  for (std::int64_t t = 0; t < b.n_tokens; ++t) {
    const float* rows[CausalConv::kMaxTaps];
    for (std::int64_t j = 0; j < taps; ++j) {
      const std::int64_t at = t - (taps - 1) + j;  // before 0: the saved rows, oldest first
      rows[j] = (at < 0 ? b.state + (at + taps - 1) * b.n_channels : b.u + at * b.u_stride) + c0;
    }
    float* out = b.y + t * b.y_stride + c0;
    std::int64_t c = 0;
    for (; c + 16 <= width; c += 16) {
      V16 acc = zero();
      for (std::int64_t j = 0; j < taps; ++j) acc = fma(load(w[j] + c), load(rows[j] + c), acc);
      store(out + c, silu(acc));
    }
    if (const std::int64_t n = width - c; n > 0) {
      V16 acc = zero();
      for (std::int64_t j = 0; j < taps; ++j) acc = fma(load_n(w[j] + c, n), load_n(rows[j] + c, n), acc);
      store_n(out + c, silu(acc), n);
    }
  }
}

void conv_channels(const ConvBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  for (std::int64_t c = c_begin; c < c_end; c += kConvChannels)
    conv_block(b, c, c_end - c < kConvChannels ? c_end - c : kConvChannels);
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
