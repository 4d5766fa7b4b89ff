// fast matmul over bands (quant/bands.h) for the tables of generic/panels.inl: sixteen rows side by side, read as one ascending stream. The
// low nibbles of the four words of 32 columns are the even codes, the high ones the odd codes: the order of x8.
//
// The instruction set supplies besides: Codes4 (four codes of each of sixteen rows, a byte each) with split_words and add_codes4;
// band_scales.

namespace {

// The two fmas of a group.
MOEFLUX_MATH V16 add_band_group(V16 acc, I16 idot, V16 scales, V16 biases, float d, std::int32_t sx) noexcept {
  const V16 dv = set1(d);
  acc = fma(to_f32(idot), mul(scales, dv), acc);
  return fma(set1(static_cast<float>(sx)), mul(biases, dv), acc);
}

template <bool Ahead>
void matvec_bands(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const MatrixView& w = b.w;
  const std::int64_t group = w.format.group, n_groups = w.cols / group;
  const bool bf16 = w.format.scale_dtype == DType::BF16;
  for (std::int64_t t = 0; t < b.n_tokens; ++t) {
    const float* d = b.xq.d + t * n_groups;
    const std::int32_t* sx = b.xq.sx + t * n_groups;
    MoreRows* const more = b.n_tokens == 1 ? b.more : nullptr;
    const std::uint8_t* codes = band_at(w, row_begin);
    BandsAhead<Ahead> ahead(b, row_begin, row_end);
    const auto goes_on = [&]() noexcept {
      RowsToCome then;
      if (more == nullptr || !more->next(row_end, then)) return false;
      ahead.go_on(row_end, then);
      return true;
    };
    for (std::int64_t r = row_begin; r < row_end || goes_on(); r += kRows) {
      V16 acc = zero();
      const std::int8_t* x = b.xq.x8 + t * w.cols;
      for (std::int64_t g = 0; g < n_groups; ++g) {
        I16 sum = izero();
        for (std::int64_t c = 0; c < group; c += 32, x += 32) {
          ahead.template group<4>();
          Part part = begin_part<6>(sum);
#pragma GCC unroll 4
          for (int k = 0; k < 16; k += 4, codes += 64) {
            Codes4 low, high;
            split_words(codes, low, high);
            ahead.line(k / 4);
            add_codes4<6>(part, low, x + k);
            add_codes4<6>(part, high, x + 16 + k);
          }
          end_part<6>(sum, part);
        }
        ahead.template group<1>();
        ahead.line(0);
        V16 scales, biases;
        band_scales(codes, bf16, scales, biases);
        codes += 64;
        acc = add_band_group(acc, sum, scales, biases, d[g], sx[g]);
      }
      store_panel_rows(b, t, r, kRows, acc);
    }
  }
}

#define MOEFLUX_EACH_TOKEN(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define MOEFLUX_CLEAR(t) I16 a##t = izero();
#define MOEFLUX_BEGIN(t) Part p##t = begin_part<6>(a##t);
#define MOEFLUX_LOW(t) \
  if constexpr (NT > t) add_codes4<6>(p##t, low, x + k * NT + 4 * t);
#define MOEFLUX_HIGH(t) \
  if constexpr (NT > t) add_codes4<6>(p##t, high, x + (16 + k) * NT + 4 * t);
#define MOEFLUX_END(t) \
  if constexpr (NT > t) end_part<6>(a##t, p##t);
#define MOEFLUX_FINISH(t) \
  if constexpr (NT > t) store(out + kRows * t, add_band_group(load(out + kRows * t), a##t, scales, biases, d[t], sx[t]));

// NT tokens against a band.
template <int NT>
void band_tile(const std::uint8_t* codes, bool bf16, std::int64_t n_groups, std::int64_t group, const std::int8_t* x, const float* d,
               const std::int32_t* sx, float* out, PanelAhead& ahead) noexcept {
  for (int t = 0; t < NT; ++t) store(out + kRows * t, zero());
  for (std::int64_t g = 0; g < n_groups; ++g, d += NT, sx += NT) {
    MOEFLUX_EACH_TOKEN(MOEFLUX_CLEAR)
    for (std::int64_t c = 0; c < group; c += 32, x += 32 * NT) {
      ahead.ask();
      MOEFLUX_EACH_TOKEN(MOEFLUX_BEGIN)
#pragma GCC unroll 4
      for (int k = 0; k < 16; k += 4, codes += 64) {
        Codes4 low, high;
        split_words(codes, low, high);
        MOEFLUX_EACH_TOKEN(MOEFLUX_LOW)
        MOEFLUX_EACH_TOKEN(MOEFLUX_HIGH)
      }
      MOEFLUX_EACH_TOKEN(MOEFLUX_END)
    }
    V16 scales, biases;
    band_scales(codes, bf16, scales, biases);
    codes += 64;
    MOEFLUX_EACH_TOKEN(MOEFLUX_FINISH)
    asm volatile("" : : : "memory");  // keeps `out` in memory: in registers it would push the sums out of them
  }
}

#undef MOEFLUX_EACH_TOKEN
#undef MOEFLUX_CLEAR
#undef MOEFLUX_BEGIN
#undef MOEFLUX_LOW
#undef MOEFLUX_HIGH
#undef MOEFLUX_END
#undef MOEFLUX_FINISH

void gemm_bands(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  constexpr decltype(&band_tile<1>) kTiles[kMostTokens] = {band_tile<1>, band_tile<2>, band_tile<3>, band_tile<4>, band_tile<5>, band_tile<6>};
  const MatrixView& w = b.w;
  const std::int64_t group = w.format.group, n_groups = w.cols / group, tile = b.xq.tile, n_tiles = (b.n_tokens + tile - 1) / tile;
  const bool bf16 = w.format.scale_dtype == DType::BF16;
  alignas(64) float out[kMostTokens * kRows];
  for (std::int64_t r = row_begin; r < row_end; r += kRows) {
    PanelAhead ahead(r + kRows < row_end ? RowsToCome{&w, r + kRows} : b.then, kRows, n_tiles * (w.cols / 32));
    for (std::int64_t t = 0; t < b.n_tokens; t += tile) {
      const std::int64_t n = b.n_tokens - t < tile ? b.n_tokens - t : tile;
      for (std::int64_t i = 0; i < n; ++i) ask_for_results(b, t + i, r, kRows);
      kTiles[n - 1](band_at(w, r), bf16, n_groups, group, b.xq.x8 + t * w.cols, b.xq.d + t * n_groups, b.xq.sx + t * n_groups, out, ahead);
      for (std::int64_t i = 0; i < n; ++i) store_panel_rows(b, t + i, r, kRows, load(out + i * kRows));
    }
  }
}

// 4-bit codes: bands, or what `Rows` computes of a matrix in rows.
template <MatMulFn Rows>
void matmul_bands_or(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if (b.w.order != quant::Order::Bands) return Rows(b, row_begin, row_end);
  if (b.xq.tile > 1) return gemm_bands(b, row_begin, row_end);
  reads_better_ahead() ? matvec_bands<true>(b, row_begin, row_end) : matvec_bands<false>(b, row_begin, row_end);
}

template <MatMulFn Rows>
constexpr KernelTable with_bands(KernelTable t) {
  t.fast[6] = matmul_bands_or<Rows>;
  t.bands = true;
  return t;
}

}  // namespace
