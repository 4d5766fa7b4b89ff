// The table of this instruction set, from the bodies above.

namespace {

// With the widest loads: a core keeps as many loads in flight, and each of them is a line then.
std::uint64_t sum_words(const std::uint64_t* words, std::size_t n_words) noexcept {
  using Line = std::uint64_t __attribute__((vector_size(64)));
  Line a{}, b{};
  for (std::size_t i = 0; i < n_words; i += 16) {
    Line x, y;
    std::memcpy(&x, words + i, sizeof x);
    std::memcpy(&y, words + i + 8, sizeof y);
    a += x, b += y;
  }
  a += b;
  std::uint64_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += a[i];
  return sum;
}

constexpr KernelTable kTable = {
    .name = MOEFLUX_ISA_NAME,
    .exact = {matmul_exact<0>, matmul_exact<1>, matmul_exact<2>, matmul_exact<3>, matmul_exact<4>, matmul_exact<5>,
              matmul_exact<6>, matmul_exact<7>, matmul_exact<8>, matmul_exact<9>, matmul_exact<10>},
    .fast = {nullptr, nullptr, nullptr, matmul_fast<3>, matmul_fast<4>, matmul_fast<5>, matmul_fast<6>, matmul_fast<7>,
             matmul_fast<8>, matmul_fast<9>, nullptr},
    .decode_row = decode_row,
    .quantize_row = quantize_row,
    .add = add_rows,
    .rms_norm = rms_norm,
    .gated_rms_norm = gated_rms_norm,
    .l2_norm = l2_norm,
    .sigmoid_gate = sigmoid_gate,
    .silu_glu = silu_glu,
    .clamped_glu = clamped_glu,
    .exp_shifted = exp_shifted,
    .sigmoid = sigmoid_rows,
    .combine = combine_rows,
    .attention_group = attention_group,
    .attention_merge = attention_merge,
    .attention_finish = attention_finish,
    .conv = conv_channels,
    .delta_columns = delta_columns,
    .head_matmul = head_matmul,
    .token_tile = nullptr,
    .interleave = nullptr,
    .attention_heads = nullptr,
    .attention_tile = nullptr,
    .sum_words = sum_words,
};

}  // namespace
