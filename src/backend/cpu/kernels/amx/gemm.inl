// fast matmul for many tokens with AMX: a tile instruction multiplies 16 rows of weights by up to 16 tokens over 64 columns.
//
// Weights are unpacked to bytes row by row in the x8 order of avx512/tiles.inl: [32 rows][cols]. Tokens lie side by side as
// avx512/gemm.inl has them, [cols / 4][tokens][4], which is what the instruction wants. A group's sums come out as
// [row][token], so a register holds one row and up to 16 tokens.

namespace {

inline constexpr int kAmxTokens = 16;

// Tiles: 0 and 1 sums of 16 rows each, 2 and 3 their codes, 4 the tokens.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// n tokens, k columns a step.
MOEFLUX_MATH void shape_tiles(int n, int k) noexcept {
  TileShapes s;
  for (const int i : {0, 1}) s.rows[i] = 16, s.row_bytes[i] = static_cast<std::uint16_t>(4 * n);
  for (const int i : {2, 3}) s.rows[i] = 16, s.row_bytes[i] = static_cast<std::uint16_t>(k);
  s.rows[4] = static_cast<std::uint8_t>(k / 4), s.row_bytes[4] = static_cast<std::uint16_t>(4 * n);
  _tile_loadconfig(&s);
}

// 64 codes of a row (n < 64: the first n, a multiple of 32) as bytes in x8 order.
template <int Slot>
MOEFLUX_MATH void unpack_row64(const std::uint8_t* p, int n, std::uint8_t* out) noexcept {
  const __mmask64 wanted = n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1;
  if constexpr (kNibbles<Slot>) {
    // Low nibbles of four bytes, then their high nibbles: a double word becomes a quad word.
    const __m256i packed = _mm256_maskz_loadu_epi8(n >= 64 ? ~std::uint32_t{0} : (std::uint32_t{1} << (n / 2)) - 1, p);
    const __m512i wide = _mm512_cvtepu32_epi64(packed);
    _mm512_mask_storeu_epi8(out, wanted, low_codes<Slot>(_mm512_or_si512(wide, _mm512_slli_epi64(wide, 28))));
  } else {
    _mm512_mask_storeu_epi8(out, wanted, unpack64<kBits<Slot>>(p, n));
  }
}

template <int Slot>
void fill_rows(const MatrixView& w, std::int64_t row, std::int64_t row_end, const Panel& panel) noexcept {
  constexpr int kCodeBits = kNibbles<Slot> ? 4 : kBits<Slot>;
  const std::int64_t n_groups = w.cols / w.format.group;
  for (int half = 0; half < 2; ++half) {
    const TileRows rows = tile_rows(row + half * kTileRows < row_end ? row + half * kTileRows : row_end - 1, row_end);
    for (int i = 0; i < kTileRows; ++i) {
      const auto* p = reinterpret_cast<const std::uint8_t*>(w.data) + rows.offset[i] * w.row_bytes();
      std::uint8_t* out = panel.codes + (half * kTileRows + i) * w.cols;
      for (std::int64_t c = 0; c < w.cols; c += 64)
        unpack_row64<Slot>(p + c / 8 * kCodeBits, static_cast<int>(w.cols - c < 64 ? w.cols - c : 64), out + c);
    }
    for (std::int64_t g = 0; g < n_groups; g += kChunkGroups) {
      const int n = static_cast<int>(n_groups - g < kChunkGroups ? n_groups - g : kChunkGroups);
      const std::int64_t at = g * kPanelRows + half * kTileRows;
      load_scales<Slot>(w, rows, g, n, panel.scales + at, panel.biases + at, kPanelRows);
    }
  }
}

// The two fmas of a group for 32 rows: sums and acc are [32][16].
template <bool Signed>
MOEFLUX_MATH void add_group_rows(const std::int32_t* sums, const float* scales, const float* biases, __m512 d, __m512i sx,
                                 float* acc) noexcept {
  const __m512 sv = _mm512_cvtepi32_ps(sx);
  const __m512i shift = _mm512_mullo_epi32(sx, _mm512_set1_epi32(kE2m1Offset));
  for (int i = 0; i < kPanelRows; ++i) {
    __m512i idot = _mm512_load_si512(sums + 16 * i);
    if constexpr (Signed) idot = _mm512_sub_epi32(idot, shift);
    __m512 a = _mm512_load_ps(acc + 16 * i);
    a = _mm512_fmadd_ps(_mm512_cvtepi32_ps(idot), _mm512_mul_ps(_mm512_set1_ps(scales[i]), d), a);
    if constexpr (!Signed) a = _mm512_fmadd_ps(sv, _mm512_mul_ps(_mm512_set1_ps(biases[i]), d), a);
    _mm512_store_ps(acc + 16 * i, a);
  }
}

// n tokens against 32 rows; k columns a step, the shapes are set.
template <bool Signed>
void amx_tile(const Panel& panel, std::int64_t cols, int group, int k, int n, const std::int8_t* x, const float* d,
              const std::int32_t* sx, float* acc) noexcept {
  alignas(64) std::int32_t sums[kPanelRows * 16];
  const __mmask16 tokens = n >= 16 ? static_cast<__mmask16>(0xffff) : first(n);
  for (std::int64_t g = 0; g * group < cols; ++g) {
    _tile_zero(0);
    _tile_zero(1);
    for (std::int64_t c = g * group; c < (g + 1) * group; c += k) {
      _tile_loadd(4, x + c * n, static_cast<std::size_t>(4 * n));
      _tile_loadd(2, panel.codes + c, static_cast<std::size_t>(cols));
      _tile_loadd(3, panel.codes + kTileRows * cols + c, static_cast<std::size_t>(cols));
      _tile_dpbusd(0, 2, 4);
      _tile_dpbusd(1, 3, 4);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileRows * 16, 64);
    asm volatile("" : : : "memory");
    add_group_rows<Signed>(sums, panel.scales + g * kPanelRows, panel.biases + g * kPanelRows,
                           _mm512_maskz_loadu_ps(tokens, d + g * n), _mm512_maskz_loadu_epi32(tokens, sx + g * n), acc);
  }
}

// acc [16 rows][16 tokens] of rows from r on to the tokens' own rows of y.
void store_tokens(const MatMulBlock& b, std::int64_t t, int n, std::int64_t r, std::int64_t row_end, const float* acc) noexcept {
  __m512i v[16];
  for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(acc + 16 * i);
  transpose16(v);
  for (int i = 0; i < n; ++i) store_rows(b, t + i, r, row_end - r, _mm512_castsi512_ps(v[i]));
}

template <int Slot>
void gemm_amx(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const MatrixView& w = b.w;
  const int group = w.format.group, k = group < 64 ? group : 64;
  const std::int64_t n_groups = w.cols / group, tile = b.xq.tile;
  const Panel panel = split_panel(b.scratch, w.cols, n_groups);
  alignas(64) float acc[kPanelRows * 16];
  int shaped = 0;
  for (std::int64_t r = row_begin; r < row_end; r += kPanelRows) {
    fill_rows<Slot>(w, r, row_end, panel);
    for (std::int64_t t = 0; t < b.n_tokens; t += tile) {
      const int n = static_cast<int>(b.n_tokens - t < tile ? b.n_tokens - t : tile);
      if (n != shaped) shape_tiles(n, k), shaped = n;
      for (int i = 0; i < kPanelRows; ++i) _mm512_store_ps(acc + 16 * i, _mm512_setzero_ps());
      amx_tile<Slot == 3>(panel, w.cols, group, k, n, b.xq.x8 + t * w.cols, b.xq.d + t * n_groups, b.xq.sx + t * n_groups, acc);
      store_tokens(b, t, n, r, row_end, acc);
      if (row_end - r > kTileRows) store_tokens(b, t, n, r + kTileRows, row_end, acc + kTileRows * 16);
    }
  }
  _tile_release();
}

// A tile of few tokens leaves most of the multipliers idle and still unpacks all rows.
inline constexpr std::int64_t kLeastAmxTokens = 6;

template <int Slot>
void matmul_fast_amx(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if (b.xq.tile >= kLeastAmxTokens)
    gemm_amx<Slot>(b, row_begin, row_end);
  else
    avx512vnni_table()->fast[Slot](b, row_begin, row_end);
}

std::int64_t amx_token_tile(const MatrixView& w, std::int64_t n_tokens) noexcept {
  if (n_tokens < kLeastAmxTokens) return token_tile(w, n_tokens);
  const std::int64_t tiles = (n_tokens + kAmxTokens - 1) / kAmxTokens;
  return (n_tokens + tiles - 1) / tiles;
}

}  // namespace
