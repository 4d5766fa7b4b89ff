// Norms, gates, activations, combination of expert rows.

namespace {

void add_rows(const float* a, const float* b, float* y, std::int64_t n) noexcept {
  MOEFLUX_MAP(n, y, add(load(a + i), load(b + i)), add(load_n(a + i, rest), load_n(b + i, rest)))
}

MOEFLUX_MATH float inverse_rms(const float* x, std::int64_t n, float eps) noexcept {
  return 1.0f / math::sqrt(dot16(x, x, n) / static_cast<float>(n) + eps);
}

void rms_norm(const float* x, const float* w, float* y, std::int64_t n, float eps) noexcept {
  const V16 r = set1(inverse_rms(x, n, eps));
  MOEFLUX_MAP(n, y, mul(mul(load(x + i), r), load(w + i)), mul(mul(load_n(x + i, rest), r), load_n(w + i, rest)))
}

void gated_rms_norm(const float* x, const float* gate, const float* w, float* y, std::int64_t n, float eps) noexcept {
  const V16 r = set1(inverse_rms(x, n, eps));
  MOEFLUX_MAP(n, y, mul(mul(mul(load(x + i), r), load(w + i)), silu(load(gate + i))),
              mul(mul(mul(load_n(x + i, rest), r), load_n(w + i, rest)), silu(load_n(gate + i, rest))))
}

void l2_norm(const float* x, float* y, std::int64_t n, float eps, float scale) noexcept {
  const V16 r = set1(scale / math::sqrt(dot16(x, x, n) + eps));
  MOEFLUX_MAP(n, y, mul(load(x + i), r), mul(load_n(x + i, rest), r))
}

void sigmoid_gate(const float* x, const float* gate, float* y, std::int64_t n) noexcept {
  MOEFLUX_MAP(n, y, mul(load(x + i), sigmoid(load(gate + i))), mul(load_n(x + i, rest), sigmoid(load_n(gate + i, rest))))
}

void sigmoid_rows(const float* x, float* y, std::int64_t n) noexcept {
  MOEFLUX_MAP(n, y, sigmoid(load(x + i)), sigmoid(load_n(x + i, rest)))
}

void silu_glu(const float* gate, const float* up, float* y, std::int64_t n) noexcept {
  MOEFLUX_MAP(n, y, mul(silu(load(gate + i)), load(up + i)), mul(silu(load_n(gate + i, rest)), load_n(up + i, rest)))
}

MOEFLUX_MATH V16 clamped(V16 g, V16 u, V16 limit, V16 alpha) noexcept {
  const V16 gc = min(g, limit);
  const V16 uc = max(min(u, limit), sub(zero(), limit));
  return mul(add(uc, set1(1.0f)), mul(gc, sigmoid(mul(alpha, gc))));
}

void clamped_glu(const float* gate, const float* up, float* y, std::int64_t n, float limit, float alpha) noexcept {
  const V16 lim = set1(limit), al = set1(alpha);
  MOEFLUX_MAP(n, y, clamped(load(gate + i), load(up + i), lim, al),
              clamped(load_n(gate + i, rest), load_n(up + i, rest), lim, al))
}

float exp_shifted(const float* x, float* out, std::int64_t n) noexcept {
  float top = x[0];
  for (std::int64_t e = 1; e < n; ++e) top = top > x[e] ? top : x[e];
  const V16 m = set1(top);
  V16 sum = zero();
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const V16 p = exp(sub(load(x + i), m));
    store(out + i, p);
    sum = add(sum, p);
  }
  if (i < n) {
    store_n(out + i, exp(sub(load_n(x + i, n - i), m)), n - i);
    sum = add(sum, load_n(out + i, n - i));
  }
  return reduce_add(sum);
}

void combine_rows(const float* rows, std::int64_t row_stride, const float* weights, std::int64_t n_ranks,
                  const float* shared, float shared_weight, bool shared_gated, float* h, std::int64_t n) noexcept {
  for (std::int64_t i = 0; i < n; i += 16) {
    const std::int64_t rest = n - i < 16 ? n - i : 16;
    const bool whole = rest == 16;
    V16 s = zero();
    for (std::int64_t r = 0; r < n_ranks; ++r) {
      const float* p = rows + r * row_stride + i;
      s = fma(set1(weights[r]), whole ? load(p) : load_n(p, rest), s);
    }
    if (shared != nullptr) {
      const V16 x = whole ? load(shared + i) : load_n(shared + i, rest);
      s = shared_gated ? fma(set1(shared_weight), x, s) : add(s, x);
    }
    if (whole)
      store(h + i, add(load(h + i), s));
    else
      store_n(h + i, add(load_n(h + i, rest), s), rest);
  }
}

}  // namespace
