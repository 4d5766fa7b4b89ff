// fast matmul over bands (quant/bands.h): sixteen rows side by side, one per lane, read as one ascending stream. A word of a row
// meets eight values of x8: its low nibbles the first four, its high nibbles the others, broadcast. No sums across lanes, no scales
// from elsewhere: a core reads its weights as fast as it can read memory.

namespace {

inline constexpr int kMaxBandTokens = 4;

// Scales and biases of a group: 16 bits each, a row's two in one lane.
template <bool Bf16>
MOEFLUX_MATH void band_scales(const std::uint8_t* p, __m512& scales, __m512& biases) noexcept {
  const __m512i pairs = load512(p);
  if constexpr (Bf16) {
    scales = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    biases = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  } else {
    scales = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
    biases = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
  }
}

// Some tokens of the block, from `token` on.
template <int Group, int Tokens, bool Bf16, bool Ahead>
void matvec_bands(const MatMulBlock& b, std::int64_t token, std::int64_t row_begin, std::int64_t row_end) noexcept {
  constexpr int kLines = Group / 8;
  const std::int64_t cols = b.w.cols, n_groups = cols / Group;
  const std::uint8_t* codes = band_at(b.w, row_begin);
  const std::int8_t* const x0 = b.xq.x8 + token * cols;
  const float* const d0 = b.xq.d + token * n_groups;
  const std::int32_t* const sx0 = b.xq.sx + token * n_groups;
  MoreRows* const more = b.n_tokens <= Tokens ? b.more : nullptr;
  BandsAhead<Ahead> ahead(b, row_begin, row_end);
  const auto goes_on = [&]() noexcept {
    RowsToCome then;
    if (more == nullptr || !more->next(row_end, then)) return false;
    ahead.go_on(row_end, then);
    return true;
  };
  for (std::int64_t row = row_begin; row < row_end || goes_on(); row += kTileRows) {
    __m512 acc[Tokens];
    for (int t = 0; t < Tokens; ++t) acc[t] = _mm512_setzero_ps();
    const std::int8_t* x = x0;
    for (std::int64_t g = 0; g < n_groups; ++g, x += Group) {
      __m512i low[Tokens], high[Tokens];
      for (int t = 0; t < Tokens; ++t) low[t] = high[t] = _mm512_setzero_si512();
      ahead.template group<kLines + 1>();
#pragma GCC unroll 16
      for (int k = 0; k < kLines; ++k, codes += 64) {
        __m512i v = load512(codes);
        asm volatile("" : "+v"(v));  // once from memory, in this order, then from its register
        ahead.line(k);
        const __m512i l = low_codes<6>(v), h = high_codes<6>(v);
#pragma GCC unroll 4
        for (int t = 0; t < Tokens; ++t) {
          low[t] = _mm512_dpbusd_epi32(low[t], l, broadcast4(x + t * cols + 8 * k));
          high[t] = _mm512_dpbusd_epi32(high[t], h, broadcast4(x + t * cols + 8 * k + 4));
        }
      }
      ahead.line(kLines);
      __m512 scales, biases;
      band_scales<Bf16>(codes, scales, biases);
      codes += 64;
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) {
        const __m512 d = _mm512_set1_ps(d0[t * n_groups + g]);
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(low[t], high[t])), _mm512_mul_ps(scales, d), acc[t]);
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_set1_epi32(sx0[t * n_groups + g])), _mm512_mul_ps(biases, d), acc[t]);
      }
    }
    for (int t = 0; t < Tokens; ++t) store_rows(b, token + t, row, kTileRows, acc[t]);
  }
}

template <int Group, bool Bf16, bool Ahead>
void matvec_bands_of(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  for (std::int64_t t = 0; t < b.n_tokens; t += kMaxBandTokens) switch (b.n_tokens - t) {
      case 1: matvec_bands<Group, 1, Bf16, Ahead>(b, t, row_begin, row_end); break;
      case 2: matvec_bands<Group, 2, Bf16, Ahead>(b, t, row_begin, row_end); break;
      case 3: matvec_bands<Group, 3, Bf16, Ahead>(b, t, row_begin, row_end); break;
      default: matvec_bands<Group, 4, Bf16, Ahead>(b, t, row_begin, row_end); break;
    }
}

template <int Group, bool Bf16>
void matvec_bands_of(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  reads_better_ahead() ? matvec_bands_of<Group, Bf16, true>(b, row_begin, row_end) : matvec_bands_of<Group, Bf16, false>(b, row_begin, row_end);
}

[[maybe_unused]] void matvec_bands(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {  // not in every table
  const bool bf16 = b.w.format.scale_dtype == DType::BF16;
  switch (b.w.format.group) {
    case 32: return bf16 ? matvec_bands_of<32, true>(b, row_begin, row_end) : matvec_bands_of<32, false>(b, row_begin, row_end);
    case 64: return bf16 ? matvec_bands_of<64, true>(b, row_begin, row_end) : matvec_bands_of<64, false>(b, row_begin, row_end);
    default: return bf16 ? matvec_bands_of<128, true>(b, row_begin, row_end) : matvec_bands_of<128, false>(b, row_begin, row_end);
  }
}

}  // namespace
