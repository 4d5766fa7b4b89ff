// core/scalar_math.h, sixteen lanes at a time, and the dot product that everything is made of.

namespace {

MOEFLUX_MATH V16 exp(V16 x) noexcept {
  const V16 lo = set1(-87.33654f), hi = set1(88.72283f);
  const V16 c = select_lt(x, lo, lo, select_lt(hi, x, hi, x));
  const V16 magic = set1(12582912.0f);
  const V16 n = sub(add(mul(c, set1(1.44269504f)), magic), magic);
  V16 r = fma(n, set1(-0.693359375f), c);
  r = fma(n, set1(2.12194440e-4f), r);
  V16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  const V16 y = scale_pow2(p, select_ordered(x, n, zero()));
  const V16 inf = set1(__builtin_inff());
  return select_lt(x, lo, zero(), select_lt(hi, x, inf, select_ordered(x, y, x)));
}

MOEFLUX_MATH V16 sigmoid(V16 x) noexcept {
  const V16 one = set1(1.0f);
  // 0 - x and -x differ only for x = 0, where exp gives 1 either way.
  return div(one, add(one, exp(sub(zero(), x))));
}

MOEFLUX_MATH V16 silu(V16 x) noexcept { return mul(x, sigmoid(x)); }

MOEFLUX_MATH float dot16(const float* a, const float* b, std::int64_t n) noexcept {
  V16 acc = zero();
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) acc = fma(load(a + i), load(b + i), acc);
  if (i < n) acc = fma(load_n(a + i, n - i), load_n(b + i, n - i), acc);
  return reduce_add(acc);
}

// y[i] = f(i-th sixteen lanes); the tail is computed on zero-filled lanes and cut.
#define MOEFLUX_MAP(n, y, EXPR, EXPR_N)                       \
  std::int64_t i = 0;                                         \
  for (; i + 16 <= (n); i += 16) store((y) + i, EXPR);        \
  if (const std::int64_t rest = (n)-i; rest > 0) store_n((y) + i, EXPR_N, rest);

}  // namespace
