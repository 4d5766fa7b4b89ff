// Online softmax over tiles of keys, as backend/ops.h defines Attention.

namespace {

MOEFLUX_MATH V16 load_kv(const std::byte* p, std::int64_t i, bool f16) noexcept {
  return f16 ? load_f16(p + i * 2) : load(reinterpret_cast<const float*>(p) + i);
}

MOEFLUX_MATH V16 load_kv_n(const std::byte* p, std::int64_t i, std::int64_t n, bool f16) noexcept {
  if (!f16) return load_n(reinterpret_cast<const float*>(p) + i, n);
  float t[16];
  for (std::int64_t l = 0; l < n; ++l) t[l] = quant::load_scalar<DType::F16>(p, i + l);
  return load_n(t, n);
}

MOEFLUX_MATH float dot_kv(const float* q, const std::byte* k, std::int64_t n, bool f16) noexcept {
  V16 acc = zero();
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) acc = fma(load(q + i), load_kv(k, i, f16), acc);
  if (i < n) acc = fma(load_n(q + i, n - i), load_kv_n(k, i, n - i, f16), acc);
  return reduce_add(acc);
}

// One tile: keys [j0, j1) of the tile that starts at `base`.
MOEFLUX_MATH void attend_tile(const AttentionGroup& a, std::int64_t base, std::int64_t j0, std::int64_t j1,
                              SoftmaxState& s) noexcept {
  const std::int64_t size = a.f16 ? 2 : 4;
  const float minus_inf = -__builtin_inff();
  float* p = a.scores;
  for (std::int64_t j = 0; j < Attention::kTile; ++j) p[j] = minus_inf;
  float top = s.m;
  for (std::int64_t j = j0; j < j1; ++j) {
    const float v = a.scale * dot_kv(a.q, a.k + j * a.k_stride * size, a.head_dim, a.f16);
    p[j - base] = v;
    top = top > v ? top : v;
  }
  const float c = s.m == minus_inf ? 0.0f : math::exp(s.m - top);
  V16 sum = zero();
  for (std::int64_t j = 0; j < Attention::kTile; j += 16) {  // lanes without a key hold exp(-inf) = 0
    const V16 e = exp(sub(load(p + j), set1(top)));
    store(p + j, e);
    sum = add(sum, e);
  }
  s.l = math::fma(s.l, c, reduce_add(sum));
  s.m = top;
  const V16 cv = set1(c);
  for (std::int64_t i = 0; i < a.v_dim; i += 16) {
    const std::int64_t n = a.v_dim - i < 16 ? a.v_dim - i : 16;
    V16 acc = mul(n == 16 ? load(s.acc + i) : load_n(s.acc + i, n), cv);
    for (std::int64_t j = j0; j < j1; ++j) {
      const std::byte* v = a.v + j * a.v_stride * size;
      acc = fma(set1(p[j - base]), n == 16 ? load_kv(v, i, a.f16) : load_kv_n(v, i, n, a.f16), acc);
    }
    n == 16 ? store(s.acc + i, acc) : store_n(s.acc + i, acc, n);
  }
}

void attention_group(const AttentionGroup& a, SoftmaxState& out) noexcept {
  out.m = -__builtin_inff();
  out.l = 0.0f;
  for (std::int64_t i = 0; i < a.v_dim; ++i) out.acc[i] = 0.0f;
  for (std::int64_t j = a.j_begin; j < a.j_end;) {
    const std::int64_t base = j / Attention::kTile * Attention::kTile;
    const std::int64_t end = base + Attention::kTile < a.j_end ? base + Attention::kTile : a.j_end;
    attend_tile(a, base, j, end, out);
    j = end;
  }
}

void attention_merge(SoftmaxState& into, const SoftmaxState& next, std::int64_t head_dim) noexcept {
  const float m = into.m > next.m ? into.m : next.m;
  const float ca = math::exp(into.m - m), cb = math::exp(next.m - m);
  into.l = math::fma(next.l, cb, into.l * ca);
  into.m = m;
  const V16 a = set1(ca), b = set1(cb);
  MOEFLUX_MAP(head_dim, into.acc, fma(load(next.acc + i), b, mul(load(into.acc + i), a)),
              fma(load_n(next.acc + i, rest), b, mul(load_n(into.acc + i, rest), a)))
}

void attention_finish(const SoftmaxState& s, const float* sink, float* y, std::int64_t head_dim) noexcept {
  float l = s.l, c = 1.0f;
  if (sink != nullptr) {
    const float m = s.m > *sink ? s.m : *sink;
    c = math::exp(s.m - m);
    l = math::fma(l, c, math::exp(*sink - m));
  }
  const V16 cv = set1(c), inv = set1(1.0f / l);
  const bool scaled = sink != nullptr;
  MOEFLUX_MAP(head_dim, y, mul(scaled ? mul(load(s.acc + i), cv) : load(s.acc + i), inv),
              mul(scaled ? mul(load_n(s.acc + i, rest), cv) : load_n(s.acc + i, rest), inv))
}

}  // namespace
