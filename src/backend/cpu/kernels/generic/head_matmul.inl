// Products of heads with matrices of their own: one fma chain per output in ascending inputs, sixteen outputs side by side.

namespace {

// The matrix of a head as f32 [inputs][outputs], decoded into scratch unless it lies like that already.
MOEFLUX_MATH const float* inputs_first(const HeadMatMulBlock& b) noexcept {
  const std::int64_t k = b.n_inputs, n = b.n_outputs;
  auto* out = reinterpret_cast<float*>(b.scratch);
  std::byte* row_scratch = b.scratch + static_cast<std::size_t>(k * n + (b.inputs_first ? n : k)) * 4;
  if (b.inputs_first) {
    for (std::int64_t i = 0; i < k; ++i) decode_row(b.w, i, out + i * n, row_scratch);
    return out;
  }
  float* row = out + k * n;
  for (std::int64_t o = 0; o < n; ++o) {
    decode_row(b.w, o, row, row_scratch);
    for (std::int64_t i = 0; i < k; ++i) out[i * n + o] = row[i];
  }
  return out;
}

// Four tokens share every load of the matrix.
void head_matmul(const HeadMatMulBlock& b) noexcept {
  const float* w = inputs_first(b);
  const std::int64_t k = b.n_inputs, n = b.n_outputs;
  for (std::int64_t t = 0; t < b.n_tokens; t += 4) {
    const std::int64_t tokens = b.n_tokens - t < 4 ? b.n_tokens - t : 4;
    const float* x[4];
    for (std::int64_t i = 0; i < 4; ++i) x[i] = b.x + (t + (i < tokens ? i : 0)) * b.x_stride;
    for (std::int64_t o = 0; o < n; o += 16) {
      const std::int64_t rest = n - o < 16 ? n - o : 16;
      V16 a0 = zero(), a1 = zero(), a2 = zero(), a3 = zero();
      for (std::int64_t i = 0; i < k; ++i) {
        const V16 v = rest == 16 ? load(w + i * n + o) : load_n(w + i * n + o, rest);
        a0 = fma(set1(x[0][i]), v, a0);
        if (tokens == 1) continue;
        a1 = fma(set1(x[1][i]), v, a1);
        a2 = fma(set1(x[2][i]), v, a2);
        a3 = fma(set1(x[3][i]), v, a3);
      }
      const V16 acc[4] = {a0, a1, a2, a3};
      for (std::int64_t i = 0; i < tokens; ++i) store_n(b.y + (t + i) * b.y_stride + o, acc[i], rest);
    }
  }
}

}  // namespace
