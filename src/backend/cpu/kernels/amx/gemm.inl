// fast matmul for many tokens with AMX: a tile instruction multiplies up to 16 tokens by 16 rows of weights over 64 columns.
//
// 32 rows are brought into a panel of bytes once, [cols / 4][32 rows][4 codes], which is how the instruction wants its second operand: so
// a register of sums is one token and 16 rows, which share their scales. Tokens: [cols / 64][tokens of the tile][64]. Two tiles of
// tokens meet two tiles of rows at a time. A group's sums go to memory; the next group's are multiplied while these meet their scales. Two
// products, two fmas and a conversion for 16 sums are what bounds it: a core that uses tiles does one such instruction a cycle, not two.

namespace {

inline constexpr int kAmxTokens = 16;
inline constexpr std::int64_t kAmxColumns = 64;
// Fewer tokens are multiplied faster without tiles: a pair of tiles that is not full takes as long as one that is.
inline constexpr std::int64_t kLeastAmxTokens = 6;

// Tiles: 0 and 1 sums of the first tokens with rows 0 to 15 and 16 to 31, 2 and 3 of the second tokens, 4 and 5 the tokens, 6 and 7 the codes.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Two tiles of n0 and n1 tokens (n1 = 0: one), k columns a step.
MOEFLUX_MATH void shape_tiles(int n0, int n1, int k) noexcept {
  TileShapes s;
  const auto shape = [&](int tile, int rows, int bytes) noexcept {
    s.rows[tile] = static_cast<std::uint8_t>(rows), s.row_bytes[tile] = static_cast<std::uint16_t>(rows > 0 ? bytes : 0);
  };
  shape(0, n0, 64), shape(1, n0, 64), shape(2, n1, 64), shape(3, n1, 64);
  shape(4, n0, k), shape(5, n1, k);
  shape(6, k / 4, 64), shape(7, k / 4, 64);
  asm volatile("" : : "r"(&s) : "memory");  // g++ 12 believes that the instruction reads eight bytes of it
  _tile_loadconfig(&s);
}

// Unsigned codes, those of e2m1 (slot 3) signed.
template <int Slot>
MOEFLUX_MATH __m512i amx_low(__m512i packed) noexcept {
  const __m512i codes = low_codes<Slot>(packed);
  return Slot == 3 ? _mm512_sub_epi8(codes, _mm512_set1_epi8(kE2m1Offset)) : codes;
}
template <int Slot>
MOEFLUX_MATH __m512i amx_high(__m512i packed) noexcept {
  return amx_low<Slot>(_mm512_srli_epi16(packed, 4));
}

// One group of two bands, which go on behind it, as a panel has it.
template <bool Bf16>
MOEFLUX_MATH void unpack_group(const std::uint8_t*& band0, const std::uint8_t*& band1, std::int64_t group, std::uint8_t* codes, float* scales,
                               float* biases) noexcept {
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < group; k += 8, band0 += 64, band1 += 64, codes += 8 * kPanelRows) {
    const __m512i p0 = load512(band0), p1 = load512(band1);
    _mm512_store_si512(codes, amx_low<6>(p0)), _mm512_store_si512(codes + 64, amx_low<6>(p1));
    _mm512_store_si512(codes + 128, amx_high<6>(p0)), _mm512_store_si512(codes + 192, amx_high<6>(p1));
  }
  __m512 s0, b0, s1, b1;
  band_scales<Bf16>(band0, s0, b0);
  band_scales<Bf16>(band1, s1, b1);
  _mm512_store_ps(scales, s0), _mm512_store_ps(scales + 16, s1);
  _mm512_store_ps(biases, b0), _mm512_store_ps(biases + 16, b1);
  band0 += 64, band1 += 64;
}

// Where amx_tiles finds a group's codes and scales: in a panel ..
struct WholePanel {
  const Panel& panel;
  std::int64_t group;
  MOEFLUX_MATH void prepare(std::int64_t) noexcept {}
  MOEFLUX_MATH const std::uint8_t* codes(std::int64_t g) const noexcept { return panel.codes + g * group * kPanelRows; }
  MOEFLUX_MATH const float* scales(std::int64_t g) const noexcept { return panel.scales + g * kPanelRows; }
  MOEFLUX_MATH const float* biases(std::int64_t g) const noexcept { return panel.biases + g * kPanelRows; }
};

// .. or, where tokens are so few that all of them pass at once, unpacked from bands shortly before: they never leave the first-level cache.
template <bool Bf16>
struct GroupsOfBands {
  const std::uint8_t *band0, *band1;
  const Panel& panel;  // of a few groups
  std::int64_t group;
  static constexpr std::int64_t kGroups = 4;
  MOEFLUX_MATH void prepare(std::int64_t g) noexcept {
    unpack_group<Bf16>(band0, band1, group, panel.codes + g % kGroups * group * kPanelRows, panel.scales + g % kGroups * kPanelRows,
                       panel.biases + g % kGroups * kPanelRows);
  }
  MOEFLUX_MATH const std::uint8_t* codes(std::int64_t g) const noexcept { return panel.codes + g % kGroups * group * kPanelRows; }
  MOEFLUX_MATH const float* scales(std::int64_t g) const noexcept { return panel.scales + g % kGroups * kPanelRows; }
  MOEFLUX_MATH const float* biases(std::int64_t g) const noexcept { return panel.biases + g % kGroups * kPanelRows; }
};

// 32 rows from r on, or what is left of them.
template <int Slot>
void fill_bytes(const MatrixView& w, std::int64_t r, std::int64_t row_end, const Panel& panel) noexcept {
  if constexpr (Slot == 6)
    if (w.order == quant::Order::Bands) {
      const std::uint8_t *band0 = band_at(w, r), *band1 = row_end - r > kTileRows ? band_at(w, r + kTileRows) : band0;
      const std::int64_t group = w.format.group;
      for (std::int64_t g = 0; g < w.cols / group; ++g) {
        std::uint8_t* codes = panel.codes + g * group * kPanelRows;
        float *scales = panel.scales + g * kPanelRows, *biases = panel.biases + g * kPanelRows;
        w.format.scale_dtype == DType::BF16 ? unpack_group<true>(band0, band1, group, codes, scales, biases)
                                            : unpack_group<false>(band0, band1, group, codes, scales, biases);
      }
      return;
    }
  fill_panel<Slot>(w, r, row_end, panel);
  if constexpr (kNibbles<Slot>)  // from the end: two lines of bytes lie where one of nibbles did or behind it
    for (std::int64_t i = w.cols / 8; i-- > 0;) {
      const __m512i p0 = _mm512_load_si512(panel.codes + i * 4 * kPanelRows), p1 = _mm512_load_si512(panel.codes + i * 4 * kPanelRows + 64);
      std::uint8_t* to = panel.codes + i * 8 * kPanelRows;
      _mm512_store_si512(to, amx_low<Slot>(p0)), _mm512_store_si512(to + 64, amx_low<Slot>(p1));
      _mm512_store_si512(to + 128, amx_high<Slot>(p0)), _mm512_store_si512(to + 192, amx_high<Slot>(p1));
    }
}

// One tile of tokens: n of them side by side, x8 in chunks of 64 columns, d and sx by group.
struct AmxTokens {
  const std::int8_t* x8;
  const float* d;
  const std::int32_t* sx;
  int n;
};

// Where the x8 of a tile have column c, and the distance from token to token: the last chunk may be narrower.
MOEFLUX_MATH const std::int8_t* chunk_at(const AmxTokens& t, std::int64_t cols, std::int64_t c, std::int64_t& stride) noexcept {
  const std::int64_t first = c & -kAmxColumns;
  stride = cols - first < kAmxColumns ? cols - first : kAmxColumns;
  return t.x8 + first * t.n + (c - first);
}

// The sums of the group in columns [c0, c1): [4 tiles][16][16].
template <bool Signed, bool Two>
MOEFLUX_MATH void multiply_group(const std::uint8_t* codes, std::int64_t cols, std::int64_t c0, std::int64_t c1, int k, const AmxTokens& t0,
                                 const AmxTokens& t1, std::int32_t* sums) noexcept {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t c = c0; c < c1; c += k, codes += k * kPanelRows) {
    std::int64_t stride;
    const std::int8_t* x = chunk_at(t0, cols, c, stride);
    _tile_loadd(4, x, static_cast<std::size_t>(stride));
    _tile_loadd(6, codes, std::size_t{128});
    _tile_loadd(7, codes + 64, std::size_t{128});
    if constexpr (Signed) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    } else {
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
    }
    if constexpr (Two) {
      x = chunk_at(t1, cols, c, stride);
      _tile_loadd(5, x, static_cast<std::size_t>(stride));
      if constexpr (Signed) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      } else {
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
  }
  _tile_stored(0, sums, std::size_t{64});
  _tile_stored(1, sums + 256, std::size_t{64});
  if constexpr (Two) {
    _tile_stored(2, sums + 512, std::size_t{64});
    _tile_stored(3, sums + 768, std::size_t{64});
  }
}

// The two fmas of a group for n tokens and 32 rows: sums [2][16][16], acc [16][32]. Meanwhile what a later group is made of is brought to the
// first-level cache, half of its codes and these tokens.
template <bool Signed>
MOEFLUX_MATH void add_group_tokens(const std::int32_t* sums, const float* scales, const float* biases, const float* d, const std::int32_t* sx,
                                   int n, float* acc, const std::uint8_t* next_codes, const std::int8_t* next_x) noexcept {
  const __m512 s0 = _mm512_load_ps(scales), s1 = _mm512_load_ps(scales + 16);
  const __m512 b0 = Signed ? s0 : _mm512_load_ps(biases), b1 = Signed ? s1 : _mm512_load_ps(biases + 16);
  alignas(64) float sxf[kAmxTokens];
  if constexpr (!Signed) _mm512_store_ps(sxf, _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(first(n), sx)));
#pragma GCC unroll 2
  for (int i = 0; i < n; ++i) {
    _mm_prefetch(reinterpret_cast<const char*>(next_codes + 64 * i), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(next_x + 64 * i), _MM_HINT_T0);
    const __m512 dv = _mm512_set1_ps(d[i]);
    __m512 a0 = _mm512_load_ps(acc + kPanelRows * i), a1 = _mm512_load_ps(acc + kPanelRows * i + 16);
    a0 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + 16 * i)), _mm512_mul_ps(s0, dv), a0);
    a1 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + 256 + 16 * i)), _mm512_mul_ps(s1, dv), a1);
    if constexpr (!Signed) {
      const __m512 sv = _mm512_set1_ps(sxf[i]);
      a0 = _mm512_fmadd_ps(sv, _mm512_mul_ps(b0, dv), a0);
      a1 = _mm512_fmadd_ps(sv, _mm512_mul_ps(b1, dv), a1);
    }
    _mm512_store_ps(acc + kPanelRows * i, a0);
    _mm512_store_ps(acc + kPanelRows * i + 16, a1);
  }
}

// One or two tiles of tokens against 32 rows: acc [2][16 tokens][32 rows]. The shapes are set.
template <bool Signed, bool Two, class Source>
void amx_tiles(Source from, std::int64_t cols, std::int64_t group, int k, const AmxTokens& t0, const AmxTokens& t1, float* acc, PanelAhead& ahead) noexcept {
  alignas(64) std::int32_t sums[2][4 * 256];
  for (int t = 0; t < (Two ? 2 : 1); ++t)
    for (int i = 0; i < 2 * (t == 0 ? t0 : t1).n; ++i) _mm512_store_ps(acc + t * kAmxTokens * kPanelRows + 16 * i, _mm512_setzero_ps());
  const std::int64_t n_groups = cols / group;
  const auto multiply = [&](std::int64_t g) noexcept {
    multiply_group<Signed, Two>(from.codes(g), cols, g * group, (g + 1) * group, k, t0, t1, sums[g % 2]);
  };
  from.prepare(0);
  if (n_groups > 1) from.prepare(1);
  multiply(0);
  for (std::int64_t g = 0; g < n_groups; ++g) {
    if (g + 1 < n_groups) multiply(g + 1);
    asm volatile("" : : : "memory");  // compilers do not know what a tile's store writes
    ahead.ask();
    const std::int64_t later = g + 2 < n_groups ? g + 2 : n_groups - 1;
    if (g + 2 < n_groups) from.prepare(later);
    const std::uint8_t* codes = from.codes(later);
    const float *scales = from.scales(g), *biases = from.biases(g);
    const std::int32_t* s = sums[g % 2];
    add_group_tokens<Signed>(s, scales, biases, t0.d + g * t0.n, t0.sx + g * t0.n, t0.n, acc, codes, t0.x8 + later * group * t0.n);
    if constexpr (Two)
      add_group_tokens<Signed>(s + 512, scales, biases, t1.d + g * t1.n, t1.sx + g * t1.n, t1.n, acc + kAmxTokens * kPanelRows, codes + 64 * kAmxTokens,
                               t1.x8 + later * group * t1.n);
  }
}

template <int Slot>
void gemm_amx(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  constexpr bool kSigned = Slot == 3;
  const MatrixView& w = b.w;
  const int group = w.format.group, k = group < kAmxColumns ? group : static_cast<int>(kAmxColumns);
  const std::int64_t n_groups = w.cols / group, tile = b.xq.tile, n_pairs = (b.n_tokens + 2 * tile - 1) / (2 * tile);
  const Panel panel = split_panel(b.scratch, w.cols, n_groups);
  const bool by_groups = w.order == quant::Order::Bands && n_pairs == 1;
  alignas(64) float acc[2 * kAmxTokens * kPanelRows];
  int shaped0 = 0, shaped1 = 0;
  for (std::int64_t r = row_begin; r < row_end; r += kPanelRows) {
    if (!by_groups) fill_bytes<Slot>(w, r, row_end, panel);
    PanelAhead ahead(r + kPanelRows < row_end ? RowsToCome{&w, r + kPanelRows} : b.then, kPanelRows, n_pairs * n_groups);
    for (std::int64_t t = 0; t < b.n_tokens; t += 2 * tile) {
      const auto tokens_at = [&](std::int64_t at) noexcept {
        const std::int64_t left = b.n_tokens - at;
        return AmxTokens{b.xq.x8 + at * w.cols, b.xq.d + at * n_groups, b.xq.sx + at * n_groups, static_cast<int>(left < tile ? left : tile)};
      };
      const bool two = t + tile < b.n_tokens;
      const AmxTokens t0 = tokens_at(t), t1 = two ? tokens_at(t + tile) : AmxTokens{nullptr, nullptr, nullptr, 0};
      if (t0.n != shaped0 || (two && t1.n != shaped1)) shape_tiles(t0.n, t1.n, k), shaped0 = t0.n, shaped1 = t1.n;
      const std::int64_t n = t0.n + t1.n;
      for (std::int64_t i = 0; i < n; ++i) ask_for_results(b, t + i, r, kPanelRows);
      const auto multiply = [&](const auto& from) noexcept {
        two ? amx_tiles<kSigned, true>(from, w.cols, group, k, t0, t1, acc, ahead) : amx_tiles<kSigned, false>(from, w.cols, group, k, t0, t1, acc, ahead);
      };
      if constexpr (Slot == 6)
        if (by_groups) {
          const std::uint8_t *band0 = band_at(w, r), *band1 = row_end - r > kTileRows ? band_at(w, r + kTileRows) : band0;
          w.format.scale_dtype == DType::BF16 ? multiply(GroupsOfBands<true>{band0, band1, panel, group})
                                              : multiply(GroupsOfBands<false>{band0, band1, panel, group});
        }
      if (!by_groups) multiply(WholePanel{panel, group});
      for (std::int64_t i = 0; i < n; ++i) {
        const float* a = acc + (i < t0.n ? i : kAmxTokens + i - t0.n) * kPanelRows;
        store_rows(b, t + i, r, row_end - r, _mm512_load_ps(a));
        if (row_end - r > kTileRows) store_rows(b, t + i, r + kTileRows, row_end - r - kTileRows, _mm512_load_ps(a + kTileRows));
      }
    }
  }
  _tile_release();
}

template <int Slot>
void matmul_fast_amx(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  b.xq.tile > kMaxTileTokens ? gemm_amx<Slot>(b, row_begin, row_end) : avx512vbmi_table()->fast[Slot](b, row_begin, row_end);
}

std::int64_t amx_token_tile(const MatrixView& w, std::int64_t n_tokens) noexcept {
  if (n_tokens < kLeastAmxTokens) return token_tile(w, n_tokens);
  const std::int64_t tiles = (n_tokens + kAmxTokens - 1) / kAmxTokens, tile = (n_tokens + tiles - 1) / tiles;
  return tile > kMaxTileTokens ? tile : kMaxTileTokens + 1;  // the size tells the kernel, and interleave, that it is one for AMX
}

// Rows of one tile side by side; those for AMX 64 columns of each in turn; d and sx follow by group.
void interleave_amx(const std::int8_t* const* x8, const float* const* d, const std::int32_t* const* sx, std::int64_t n, std::int64_t tile,
                    std::int64_t cols, std::int64_t n_groups, std::int8_t* x8_out, float* d_out, std::int32_t* sx_out) noexcept {
  if (tile <= kMaxTileTokens) return interleave_tokens(x8, d, sx, n, tile, cols, n_groups, x8_out, d_out, sx_out);
  for (std::int64_t c = 0; c < cols; c += kAmxColumns) {
    const std::int64_t width = cols - c < kAmxColumns ? cols - c : kAmxColumns;
    for (std::int64_t t = 0; t < n; ++t, x8_out += width) std::memcpy(x8_out, x8[t] + c, static_cast<std::size_t>(width));
  }
  for (std::int64_t t = 0; t < n; ++t)
    for (std::int64_t g = 0; g < n_groups; ++g) {
      d_out[g * n + t] = d[t][g];
      sx_out[g * n + t] = sx[t][g];
    }
}

}  // namespace
