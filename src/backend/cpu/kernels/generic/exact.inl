// exact matmul for AVX2 and NEON: codes become f32 weights in registers. One token: four rows at a time, straight from the codes. Several: a
// row is decoded once and meets them all (generic/matmul.inl). Sixteen lanes and their tree as in generic/math.inl.
// codes_f32 and e2m1_f32 of the instruction set give 32 codes in the order of columns.

namespace {

inline constexpr int kExactRows = 4;
template <int Slot>
inline constexpr int kExactStep = Slot >= 3 && Slot <= 8 ? 32 : 16;  // columns
template <int Slot>
using StepWeights = V16[kExactStep<Slot> / 16];

// Weights of columns [c, c + kExactStep) of a row, as decode_row gives them; s and b: scale and bias of their group.
template <int Slot>
MOEFLUX_MATH void step_weights(const std::uint8_t* row, std::int64_t c, const float* s, const float* b, StepWeights<Slot>& w) noexcept {
  const auto* p = reinterpret_cast<const std::byte*>(row);
  if constexpr (Slot == 0) w[0] = load(reinterpret_cast<const float*>(p) + c);
  if constexpr (Slot == 1) w[0] = load_f16(p + 2 * c);
  if constexpr (Slot == 2) w[0] = load_bf16(p + 2 * c);
  if constexpr (Slot == 3) {
    e2m1_f32(row + c / 2, w);
    w[0] = fma(set1(*s), w[0], zero()), w[1] = fma(set1(*s), w[1], zero());
  }
  if constexpr (Slot >= 4 && Slot <= 8) {
    codes_f32<kBits<Slot>>(row + c / 8 * kBits<Slot>, w);
    w[0] = fma(set1(*s), w[0], set1(*b)), w[1] = fma(set1(*s), w[1], set1(*b));
  }
  if constexpr (Slot == 9) w[0] = fma(set1(*s), load_u8(row + c), set1(*b));
  if constexpr (Slot == 10) w[0] = mul(load_e4m3(row + c), set1(*s));
}
template <int Slot>
MOEFLUX_MATH V16 add_step(const float* x, const std::uint8_t* row, std::int64_t c, const float* s, const float* b, V16 acc) noexcept {
  StepWeights<Slot> w;
  step_weights<Slot>(row, c, s, b, w);
  acc = fma(load(x + c), w[0], acc);
  if constexpr (kExactStep<Slot> == 32) acc = fma(load(x + c + 16), w[1], acc);
  return acc;
}

// Scales and biases of four rows as f32: [row][scales, biases][groups]. Rows past the end repeat the last one.
template <int Slot>
MOEFLUX_MATH void widen_scales(const MatrixView& w, std::int64_t r, std::int64_t end, float* out) noexcept {
  const auto n = static_cast<std::int64_t>(w.format.n_groups(static_cast<std::uint64_t>(w.cols)));
  const DType dtype = w.format.scale_dtype;
  const auto widen = [&](const std::byte* p, float* to) noexcept {
    std::int64_t g = 0;
    if (dtype != DType::F32)
      for (; g + 16 <= n; g += 16) store(to + g, dtype == DType::BF16 ? load_bf16(p + 2 * g) : load_f16(p + 2 * g));
    for (; g < n; ++g) to[g] = load_scale(p, dtype, g);
  };
  for (int i = 0; i < kExactRows; ++i, out += 2 * n) {
    const std::uint64_t at = row_or_last(r + i, end) * w.scale_row_bytes();
    if constexpr (Slot == 3) {
      for (std::int64_t g = 0; g < n; ++g) out[g] = quant::e8m0_half_to_f32(static_cast<std::uint8_t>(w.scales[at + static_cast<std::uint64_t>(g)]));
    } else {
      widen(w.scales + at, out);
      if constexpr (Slot != 10) widen(w.biases + at, out + n);
    }
  }
}

template <int Slot>
void matvec_exact(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  constexpr std::uint64_t kAhead = 16 << 10;
  const MatrixView& w = b.w;
  // Plain rows are one group of all columns; what is left of them behind the last sixteen is done apart.
  const std::int64_t whole = w.cols / 16 * 16, group = Slot <= 2 ? whole : w.format.group;
  const std::int64_t n_groups = group == 0 ? 0 : Slot == 10 ? (w.cols + group - 1) / group : whole / group;
  auto* scales = reinterpret_cast<float*>(b.scratch);
  for (std::int64_t r = row_begin; r < row_end; r += kExactRows) {
    const std::uint8_t* rows[kExactRows];
    for (int i = 0; i < kExactRows; ++i) rows[i] = codes_of(w, row_or_last(r + i, row_end));
    if constexpr (Slot > 2) widen_scales<Slot>(w, r, row_end, scales);
    const char* ahead = reinterpret_cast<const char*>(rows[0]) + kAhead;
    V16 a0 = zero(), a1 = zero(), a2 = zero(), a3 = zero();
    const float* s = scales;
    for (std::int64_t g = 0; g < n_groups; ++g, ++s) {
      ahead = fetch_lines(ahead, static_cast<int>(kExactRows * w.format.row_bytes(static_cast<std::uint64_t>(group))));
      for (std::int64_t c = g * group, end = Slot == 10 ? std::min((g + 1) * group, whole) : (g + 1) * group; c < end; c += kExactStep<Slot>) {
        a0 = add_step<Slot>(b.x, rows[0], c, s, s + n_groups, a0);
        a1 = add_step<Slot>(b.x, rows[1], c, s + 2 * n_groups, s + 3 * n_groups, a1);
        a2 = add_step<Slot>(b.x, rows[2], c, s + 4 * n_groups, s + 5 * n_groups, a2);
        a3 = add_step<Slot>(b.x, rows[3], c, s + 6 * n_groups, s + 7 * n_groups, a3);
      }
    }
    V16 acc[kExactRows] = {a0, a1, a2, a3};
    for (int i = 0; i < kExactRows && r + i < row_end; ++i) {
      if (const std::int64_t rest = w.cols - whole; (Slot <= 2 || Slot == 10) && rest > 0) {
        alignas(32) float tail[16] = {};
        for (std::int64_t k = 0; k < rest; ++k)
          tail[k] = Slot == 10  ? quant::e4m3_to_f32(rows[i][whole + k]) * scales[2 * n_groups * i + whole / group]
                    : Slot == 0 ? quant::load_scalar<DType::F32>(reinterpret_cast<const std::byte*>(rows[i]), whole + k)
                    : Slot == 1 ? quant::load_scalar<DType::F16>(reinterpret_cast<const std::byte*>(rows[i]), whole + k)
                                : quant::load_scalar<DType::BF16>(reinterpret_cast<const std::byte*>(rows[i]), whole + k);
        acc[i] = fma(load_n(b.x + whole, rest), load(tail), acc[i]);
      }
      const float v = reduce_add(acc[i]);
      y_row(b, 0)[r + i] = b.bias != nullptr ? v + b.bias[r + i] : v;
    }
  }
}

// What decode_row_slot does, with codes in registers.
template <int Slot>
MOEFLUX_MATH void decode_codes(const MatrixView& w, std::int64_t row, const RowScratch& out) noexcept {
  const std::int64_t group = w.format.group, n_groups = w.cols / group;
  const std::uint64_t at = static_cast<std::uint64_t>(row) * w.scale_row_bytes();
  if constexpr (Slot == 3) {
    for (std::int64_t g = 0; g < n_groups; ++g) out.scales[g] = quant::e8m0_half_to_f32(static_cast<std::uint8_t>(w.scales[at + static_cast<std::uint64_t>(g)]));
  } else {
    decode_scales(w.scales + at, w.format.scale_dtype, n_groups, out.scales);
    decode_scales(w.biases + at, w.format.scale_dtype, n_groups, out.biases);
  }
  const std::uint8_t* codes = codes_of(w, static_cast<std::uint64_t>(row));
  for (std::int64_t g = 0; g < n_groups; ++g)
    for (std::int64_t c = g * group; c < (g + 1) * group; c += kExactStep<Slot>) {
      StepWeights<Slot> v;
      step_weights<Slot>(codes, c, out.scales + g, out.biases + g, v);
      store(out.values + c, v[0]);
      store(out.values + c + 16, v[1]);
    }
}

template <int Slot>
void matmul_exact_rows(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if (b.n_tokens == 1) return matvec_exact<Slot>(b, row_begin, row_end);
  if constexpr (kExactStep<Slot> == 32)
    matmul_decoded(b, row_begin, row_end, [](const MatrixView& w, std::int64_t row, const RowScratch& s) noexcept { decode_codes<Slot>(w, row, s); });
  else
    matmul_exact<Slot>(b, row_begin, row_end);
}

constexpr KernelTable with_exact(KernelTable t) {
  const MatMulFn exact[] = {matmul_exact_rows<0>, matmul_exact_rows<1>, matmul_exact_rows<2>, matmul_exact_rows<3>, matmul_exact_rows<4>, matmul_exact_rows<5>,
                            matmul_exact_rows<6>, matmul_exact_rows<7>, matmul_exact_rows<8>, matmul_exact_rows<9>, matmul_exact_rows<10>};
  for (int i = 0; i < kFormatSlots; ++i) t.exact[i] = exact[i];
  return t;
}

}  // namespace
