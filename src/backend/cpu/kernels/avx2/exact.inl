// exact matmul of one token with AVX2: four rows at a time, codes become f32 weights in registers (many tokens: generic/matmul.inl).
// Sixteen lanes and their tree as in generic/math.inl.

namespace {

inline constexpr int kExactRows = 4;

// Sixteen codes of four bits, in order, one a byte.
MOEFLUX_MATH __m128i nibbles16(const std::uint8_t* p) noexcept {
  const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(v, mask), _mm_and_si128(_mm_srli_epi16(v, 4), mask));
}
MOEFLUX_MATH V16 bytes_to_f32(__m128i x) noexcept {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)))};
}

// Weights of columns c .. c + 15 of a row, as decode_row gives them; s and b: scale and bias of their group.
template <int Slot>
MOEFLUX_MATH V16 weights16(const std::uint8_t* row, std::int64_t c, const float* s, const float* b) noexcept {
  const auto* p = reinterpret_cast<const std::byte*>(row);
  if constexpr (Slot == 0) return load(reinterpret_cast<const float*>(p) + c);
  if constexpr (Slot == 1) return load_f16(p + 2 * c);
  if constexpr (Slot == 2) return load_bf16(p + 2 * c);
  if constexpr (Slot == 3) {
    const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return fma(set1(*s), bytes_to_f32(_mm_shuffle_epi8(twice, nibbles16(row + c / 2))), zero());
  }
  if constexpr (Slot == 6) return fma(set1(*s), bytes_to_f32(nibbles16(row + c / 2)), set1(*b));
  if constexpr (Slot == 9) return fma(set1(*s), load_u8(row + c), set1(*b));
  if constexpr (Slot == 10) return mul(load_e4m3(row + c), set1(*s));
  return zero();
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
      for (std::int64_t c = g * group, end = Slot == 10 ? std::min((g + 1) * group, whole) : (g + 1) * group; c < end; c += 16) {
        const V16 x = load(b.x + c);
        a0 = fma(x, weights16<Slot>(rows[0], c, s, s + n_groups), a0);
        a1 = fma(x, weights16<Slot>(rows[1], c, s + 2 * n_groups, s + 3 * n_groups), a1);
        a2 = fma(x, weights16<Slot>(rows[2], c, s + 4 * n_groups, s + 5 * n_groups), a2);
        a3 = fma(x, weights16<Slot>(rows[3], c, s + 6 * n_groups, s + 7 * n_groups), a3);
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

template <int Slot>
void matmul_exact_rows(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  b.n_tokens == 1 ? matvec_exact<Slot>(b, row_begin, row_end) : matmul_exact<Slot>(b, row_begin, row_end);
}

}  // namespace
