// fast matmul for many tokens: codes of 32 rows are unpacked once into a panel, then every tile of tokens passes.
//
// Panel: [cols / 4][32 rows][4 codes]; tokens: [cols / 4][tokens of the tile][4 values]. A step multiplies four
// columns of 32 rows by one token's four values, broadcast: sums of a group stay in registers, one per (row, token).

namespace {

inline constexpr int kPanelRows = 32;
// 12 tokens x 2 registers of rows are 24 sums, which leaves room for codes and the broadcast.
inline constexpr int kMaxTileTokens = 12;

struct Panel {
  std::uint8_t* codes;  // [cols / 4][32][4]
  float* scales;        // [groups][32]
  float* biases;
};

MOEFLUX_MATH Panel split_panel(std::byte* scratch, std::int64_t cols, std::int64_t n_groups) noexcept {
  auto* scales = reinterpret_cast<float*>(scratch + cols * kPanelRows);
  return {reinterpret_cast<std::uint8_t*>(scratch), scales, scales + n_groups * kPanelRows};
}

// 16 rows into their half of the panel.
template <int Slot>
MOEFLUX_MATH void fill_half(const MatrixView& w, const TileRows& rows, std::uint8_t* out) noexcept {
  constexpr int kWidth = kUnit<Slot>;
  const auto* base = reinterpret_cast<const std::uint8_t*>(w.data);
  constexpr int kUnitBytes = kNibbles<Slot> ? 64 : 8 * kBits<Slot>;
  const std::uint64_t row_bytes = w.row_bytes();
  const char* ahead = reinterpret_cast<const char*>(base + rows.offset[0] * row_bytes + kTileRows * row_bytes);
  for (std::int64_t c = 0; c < w.cols; c += kWidth) {
    const int n = static_cast<int>(w.cols - c < kWidth ? w.cols - c : kWidth);
    __m512i r[16];
    for (int i = 0; i < kTileRows; ++i) {
      const std::uint8_t* p = base + rows.offset[i] * row_bytes;
      _mm_prefetch(ahead + (c / kWidth * kTileRows + i) * kUnitBytes, _MM_HINT_T1);
      if constexpr (kNibbles<Slot>)
        r[i] = _mm512_maskz_loadu_epi8(n == 128 ? ~std::uint64_t{0} : (std::uint64_t{1} << (n / 2)) - 1, p + c / 2);
      else
        r[i] = unpack64<kBits<Slot>>(p + c / 8 * kBits<Slot>, n);
    }
    transpose16(r);
    std::uint8_t* to = out + c * kPanelRows;
    if constexpr (kNibbles<Slot>) {
      for (int i = 0; i < n / 8; ++i) {
        _mm512_store_si512(to + i * 8 * kPanelRows, low_codes<Slot>(r[i]));
        _mm512_store_si512(to + i * 8 * kPanelRows + 4 * kPanelRows, high_codes<Slot>(r[i]));
      }
    } else {
      for (int i = 0; i < n / 4; ++i) _mm512_store_si512(to + i * 4 * kPanelRows, r[i]);
    }
  }
}

template <int Slot>
void fill_panel(const MatrixView& w, std::int64_t row, std::int64_t row_end, const Panel& panel) noexcept {
  const std::int64_t n_groups = w.cols / w.format.group;
  for (int half = 0; half < 2; ++half) {
    const TileRows rows = tile_rows(row + half * kTileRows < row_end ? row + half * kTileRows : row_end - 1, row_end);
    fill_half<Slot>(w, rows, panel.codes + half * 64);
    for (std::int64_t g = 0; g < n_groups; g += kChunkGroups) {
      const int n = static_cast<int>(n_groups - g < kChunkGroups ? n_groups - g : kChunkGroups);
      const std::int64_t at = g * kPanelRows + half * kTileRows;
      load_scales<Slot>(w, rows, g, n, panel.scales + at, panel.biases + at, kPanelRows);
    }
  }
}

// NT tokens against a panel: y[t][0..31] into out.
template <int NT, bool Signed>
void gemm_tile(const Panel& panel, std::int64_t n_groups, std::int64_t steps, const std::int8_t* x, const float* d,
               const std::int32_t* sx, float* out) noexcept {
  for (int t = 0; t < 2 * NT; ++t) _mm512_store_ps(out + t * 16, _mm512_setzero_ps());
  const std::uint8_t* codes = panel.codes;
  for (std::int64_t g = 0; g < n_groups; ++g, d += NT, sx += NT) {
    __m512i sum[NT][2];
#pragma GCC unroll 12
    for (int t = 0; t < NT; ++t) sum[t][0] = sum[t][1] = _mm512_setzero_si512();
    for (std::int64_t k = 0; k < steps; ++k, codes += 4 * kPanelRows, x += 4 * NT) {
      const __m512i w0 = _mm512_load_si512(codes), w1 = _mm512_load_si512(codes + 64);
#pragma GCC unroll 12
      for (int t = 0; t < NT; ++t) {
        std::int32_t four;
        std::memcpy(&four, x + 4 * t, 4);
        const __m512i v = _mm512_set1_epi32(four);
        sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], w0, v);
        sum[t][1] = _mm512_dpbusd_epi32(sum[t][1], w1, v);
      }
    }
    const __m512 s0 = _mm512_load_ps(panel.scales + g * kPanelRows), s1 = _mm512_load_ps(panel.scales + g * kPanelRows + 16);
    __m512 b0 = s0, b1 = s1;
    if constexpr (!Signed) {
      b0 = _mm512_load_ps(panel.biases + g * kPanelRows);
      b1 = _mm512_load_ps(panel.biases + g * kPanelRows + 16);
    }
#pragma GCC unroll 12
    for (int t = 0; t < NT; ++t) {
      const __m512 dv = _mm512_set1_ps(d[t]);
      __m512i i0 = sum[t][0], i1 = sum[t][1];
      if constexpr (Signed) {
        const __m512i shift = _mm512_set1_epi32(kE2m1Offset * sx[t]);
        i0 = _mm512_sub_epi32(i0, shift);
        i1 = _mm512_sub_epi32(i1, shift);
      }
      __m512 a0 = _mm512_load_ps(out + 32 * t), a1 = _mm512_load_ps(out + 32 * t + 16);
      a0 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i0), _mm512_mul_ps(s0, dv), a0);
      a1 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i1), _mm512_mul_ps(s1, dv), a1);
      if constexpr (!Signed) {
        const __m512 sv = _mm512_cvtepi32_ps(_mm512_set1_epi32(sx[t]));
        a0 = _mm512_fmadd_ps(sv, _mm512_mul_ps(b0, dv), a0);
        a1 = _mm512_fmadd_ps(sv, _mm512_mul_ps(b1, dv), a1);
      }
      _mm512_store_ps(out + 32 * t, a0);
      _mm512_store_ps(out + 32 * t + 16, a1);
    }
  }
}

using GemmTileFn = void (*)(const Panel&, std::int64_t, std::int64_t, const std::int8_t*, const float*, const std::int32_t*,
                            float*) noexcept;
template <bool Signed>
inline constexpr GemmTileFn kGemmTiles[kMaxTileTokens] = {
    gemm_tile<1, Signed>, gemm_tile<2, Signed>, gemm_tile<3, Signed>, gemm_tile<4, Signed>,
    gemm_tile<5, Signed>, gemm_tile<6, Signed>, gemm_tile<7, Signed>, gemm_tile<8, Signed>,
    gemm_tile<9, Signed>, gemm_tile<10, Signed>, gemm_tile<11, Signed>, gemm_tile<12, Signed>};

template <int Slot>
void gemm_rows(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const MatrixView& w = b.w;
  const std::int64_t n_groups = w.cols / w.format.group, tile = b.xq.tile;
  const Panel panel = split_panel(b.scratch, w.cols, n_groups);
  alignas(64) float out[kMaxTileTokens * kPanelRows];
  for (std::int64_t r = row_begin; r < row_end; r += kPanelRows) {
    fill_panel<Slot>(w, r, row_end, panel);
    for (std::int64_t t = 0; t < b.n_tokens; t += tile) {
      const std::int64_t n = b.n_tokens - t < tile ? b.n_tokens - t : tile;
      kGemmTiles<Slot == 3>[n - 1](panel, n_groups, w.format.group / 4, b.xq.x8 + t * w.cols, b.xq.d + t * n_groups,
                                   b.xq.sx + t * n_groups, out);
      for (std::int64_t i = 0; i < n; ++i) {
        store_rows(b, t + i, r, row_end - r, _mm512_load_ps(out + i * kPanelRows));
        if (row_end - r > 16) store_rows(b, t + i, r + 16, row_end - r - 16, _mm512_load_ps(out + i * kPanelRows + 16));
      }
    }
  }
}

template <int Slot>
void matmul_fast_tiles(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if (b.xq.tile > 1)
    gemm_rows<Slot>(b, row_begin, row_end);
  else
    matvec_fast<Slot>(b, row_begin, row_end);
}

// Below three tokens unpacking a panel costs more than reading the codes again from the first-level cache.
std::int64_t token_tile(std::int64_t n_tokens) noexcept {
  if (n_tokens < 3) return 1;
  const std::int64_t tiles = (n_tokens + kMaxTileTokens - 1) / kMaxTileTokens;
  return (n_tokens + tiles - 1) / tiles;
}

// Rows of one tile side by side, four columns of each in turn; d and sx follow by group.
void interleave_tokens(const std::int8_t* const* x8, const float* const* d, const std::int32_t* const* sx, std::int64_t n,
                       std::int64_t cols, std::int64_t n_groups, std::int8_t* x8_out, float* d_out,
                       std::int32_t* sx_out) noexcept {
  for (std::int64_t t = 0; t < n; ++t) {
    std::int8_t* to = x8_out + 4 * t;
    for (std::int64_t c = 0; c < cols; c += 4, to += 4 * n) std::memcpy(to, x8[t] + c, 4);
    for (std::int64_t g = 0; g < n_groups; ++g) {
      d_out[g * n + t] = d[t][g];
      sx_out[g * n + t] = sx[t][g];
    }
  }
}

}  // namespace
