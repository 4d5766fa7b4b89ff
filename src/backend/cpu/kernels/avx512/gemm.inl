// fast matmul for many tokens: codes of 32 rows are brought into a panel once, then every tile of tokens
// passes. Matrices in bands are panels as they are.
//
// Panel: [cols / 4][32 rows][4 codes] in bytes, or [cols / 8][32 rows][8 codes] in nibbles, which are split when
// they are multiplied: by units that are idle then, and a panel is written and read in half the bytes. Tokens:
// [cols / 4][tokens of the tile][4 values]. A step multiplies four columns of 32 rows by one token's four
// values, broadcast: sums of a group stay in registers, one per (row, token).

namespace {

inline constexpr int kPanelRows = 32;
// 12 tokens x 2 registers of rows are 24 sums, which leaves room for codes and the broadcast.
inline constexpr int kMaxTileTokens = 12;

struct Panel {
  std::uint8_t* codes;  // nibbles: four bytes of 32 rows in turn; others: four codes
  float* scales;        // [groups][32]
  float* biases;
};

MOEFLUX_MATH Panel split_panel(std::byte* scratch, std::int64_t cols, std::int64_t n_groups) noexcept {
  auto* scales = reinterpret_cast<float*>(scratch + cols * kPanelRows);
  return {reinterpret_cast<std::uint8_t*>(scratch), scales, scales + n_groups * kPanelRows};
}

// `n` codes of 16 rows from column c on into their half of the panel.
template <int Slot>
MOEFLUX_MATH void fill_unit(const std::uint8_t* base, std::uint64_t row_bytes, const TileRows& rows, std::int64_t c, int n, std::uint8_t* out) noexcept {
  constexpr int kCodes = kNibbles<Slot> ? 2 : 1;  // of a byte of the panel
  __m512i r[16];
  for (int i = 0; i < kTileRows; ++i) {
    const std::uint8_t* p = base + rows.offset[i] * row_bytes;
    if constexpr (kNibbles<Slot>)
      r[i] = n == 128 ? load512(p + c / 2) : _mm512_maskz_loadu_epi8((std::uint64_t{1} << (n / 2)) - 1, p + c / 2);
    else
      r[i] = unpack64<kBits<Slot>>(p + c / 8 * kBits<Slot>, n);
  }
  transpose16(r);
  std::uint8_t* to = out + c / kCodes * kPanelRows;
  for (int i = 0; i < n / (4 * kCodes); ++i) _mm512_store_si512(to + i * 4 * kPanelRows, r[i]);
}

// 16 rows into their half of the panel.
template <int Slot>
MOEFLUX_MATH void fill_half(const MatrixView& w, const TileRows& rows, std::uint8_t* out) noexcept {
  constexpr int kWidth = kUnit<Slot>;
  const auto* base = reinterpret_cast<const std::uint8_t*>(w.data);
  std::int64_t c = 0;
  for (; c + kWidth <= w.cols; c += kWidth) fill_unit<Slot>(base, w.row_bytes(), rows, c, kWidth, out);
  if (c < w.cols) fill_unit<Slot>(base, w.row_bytes(), rows, c, static_cast<int>(w.cols - c), out);
}

template <int Slot>
void fill_panel(const MatrixView& w, std::int64_t row, std::int64_t row_end, const Panel& panel) noexcept {
  const std::int64_t n_groups = w.cols / w.format.group;
  for (int half = 0; half < 2; ++half) {
    const TileRows rows =
        tile_rows(row + half * kTileRows < row_end ? row + half * kTileRows : row_end - 1, row_end);
    fill_half<Slot>(w, rows, panel.codes + half * 64);
    for (std::int64_t g = 0; g < n_groups; g += kChunkGroups) {
      const int n = static_cast<int>(n_groups - g < kChunkGroups ? n_groups - g : kChunkGroups);
      const std::int64_t at = g * kPanelRows + half * kTileRows;
      load_scales<Slot>(w, rows, g, n, panel.scales + at, panel.biases + at, kPanelRows);
    }
  }
}

// The two fmas of a group for one token: sums a and b of 16 rows each, y[32] in memory.
template <bool Signed>
MOEFLUX_MATH void add_group32(__m512i a, __m512i b, const float* scales, const float* biases, float d,
                              std::int32_t sx, float* y) noexcept {
  const __m512 dv = _mm512_set1_ps(d);
  if constexpr (Signed) {
    const __m512i shift = _mm512_set1_epi32(kE2m1Offset * sx);
    a = _mm512_sub_epi32(a, shift);
    b = _mm512_sub_epi32(b, shift);
  }
  __m512 y0 =
      _mm512_fmadd_ps(_mm512_cvtepi32_ps(a), _mm512_mul_ps(_mm512_load_ps(scales), dv), _mm512_load_ps(y));
  __m512 y1 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(b), _mm512_mul_ps(_mm512_load_ps(scales + 16), dv),
                              _mm512_load_ps(y + 16));
  if constexpr (!Signed) {
    const __m512 sv = _mm512_cvtepi32_ps(_mm512_set1_epi32(sx));
    y0 = _mm512_fmadd_ps(sv, _mm512_mul_ps(_mm512_load_ps(biases), dv), y0);
    y1 = _mm512_fmadd_ps(sv, _mm512_mul_ps(_mm512_load_ps(biases + 16), dv), y1);
  }
  _mm512_store_ps(y, y0);
  _mm512_store_ps(y + 16, y1);
}

// _mm512_dpbusd_epi32(sum, codes, x). g++ 12 copies the sums of the intrinsic from register to register and
// to the stack, which halves the speed of a tile.
MOEFLUX_MATH void add_products(__m512i& sum, __m512i codes, __m512i x) noexcept {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
}

// Where gemm_tile's codes and scales come from: lines() gives four bytes of each of 32 rows and goes on, next_group() the group's scales.
struct PanelSource {
  const std::uint8_t* codes;
  const float *scales, *biases;
  MOEFLUX_MATH explicit PanelSource(const Panel& p) noexcept : codes(p.codes), scales(p.scales - kPanelRows), biases(p.biases - kPanelRows) {}
  MOEFLUX_MATH void lines(__m512i& p0, __m512i& p1) noexcept {
    p0 = _mm512_load_si512(codes), p1 = _mm512_load_si512(codes + 64);
    codes += 4 * kPanelRows;
  }
  MOEFLUX_MATH void next_group() noexcept { scales += kPanelRows, biases += kPanelRows; }
};

template <bool Bf16>
struct BandSource {
  const std::uint8_t *band0, *band1;
  alignas(64) float scales[kPanelRows];
  alignas(64) float biases[kPanelRows];
  MOEFLUX_MATH BandSource(const std::uint8_t* first, const std::uint8_t* second) noexcept : band0(first), band1(second) {}
  MOEFLUX_MATH void lines(__m512i& p0, __m512i& p1) noexcept {
    p0 = load512(band0), p1 = load512(band1);
    band0 += 64, band1 += 64;
  }
  MOEFLUX_MATH void next_group() noexcept {
    __m512 s0, b0, s1, b1;
    band_scales<Bf16>(band0, s0, b0);
    band_scales<Bf16>(band1, s1, b1);
    _mm512_store_ps(scales, s0), _mm512_store_ps(scales + 16, s1);
    _mm512_store_ps(biases, b0), _mm512_store_ps(biases + 16, b1);
    band0 += 64, band1 += 64;
  }
};

// NT tokens against a panel: y[t][0..31] into out. The sums are named variables: compilers keep arrays and
// structs that live across a loop in memory.
#define MOEFLUX_EACH_TOKEN(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define MOEFLUX_CLEAR(t) __m512i a##t = _mm512_setzero_si512(), b##t = a##t;
#define MOEFLUX_STEP(t)                      \
  if constexpr (NT > t) {                    \
    const __m512i v = broadcast4(x + 4 * t); \
    add_products(a##t, w0, v);               \
    add_products(b##t, w1, v);               \
  }
#define MOEFLUX_FINISH(t) \
  if constexpr (NT > t) add_group32<Signed>(a##t, b##t, from.scales, from.biases, d[t], sx[t], out + 32 * t);

// Slot: 3 and 6 for nibbles of those formats, 9 for bytes. What the next panel is made of is asked for meanwhile.
template <int NT, int Slot, class Source>
void gemm_tile(Source from, std::int64_t n_groups, std::int64_t group, const std::int8_t* x,
               const float* d, const std::int32_t* sx, float* out, PanelAhead& ahead) noexcept {
  constexpr bool Signed = Slot == 3;
  for (int t = 0; t < 2 * NT; ++t) _mm512_store_ps(out + t * 16, _mm512_setzero_ps());
  for (std::int64_t g = 0; g < n_groups; ++g, d += NT, sx += NT) {
    MOEFLUX_EACH_TOKEN(MOEFLUX_CLEAR)
    for (std::int64_t k = 0; k < group; k += kNibbles<Slot> ? 8 : 4, x += 4 * NT) {
      ahead.ask();
      __m512i p0, p1;
      from.lines(p0, p1);
      if constexpr (kNibbles<Slot>) {
        {
          const __m512i w0 = low_codes<Slot>(p0), w1 = low_codes<Slot>(p1);
          MOEFLUX_EACH_TOKEN(MOEFLUX_STEP)
        }
        x += 4 * NT;
        const __m512i w0 = high_codes<Slot>(p0), w1 = high_codes<Slot>(p1);
        MOEFLUX_EACH_TOKEN(MOEFLUX_STEP)
      } else {
        const __m512i w0 = p0, w1 = p1;
        MOEFLUX_EACH_TOKEN(MOEFLUX_STEP)
      }
    }
    from.next_group();
    MOEFLUX_EACH_TOKEN(MOEFLUX_FINISH)
    // Keeps `out` in memory: held in registers across groups it would push the sums out of them.
    asm volatile("" : : : "memory");
  }
}

#undef MOEFLUX_EACH_TOKEN
#undef MOEFLUX_CLEAR
#undef MOEFLUX_STEP
#undef MOEFLUX_FINISH

template <class Source>
using GemmTileFn = void (*)(Source, std::int64_t, std::int64_t, const std::int8_t*, const float*,
                            const std::int32_t*, float*, PanelAhead&) noexcept;
template <int Slot, class Source>
inline constexpr GemmTileFn<Source> kGemmTiles[kMaxTileTokens] = {
    gemm_tile<1, Slot, Source>, gemm_tile<2, Slot, Source>, gemm_tile<3, Slot, Source>, gemm_tile<4, Slot, Source>,
    gemm_tile<5, Slot, Source>, gemm_tile<6, Slot, Source>, gemm_tile<7, Slot, Source>, gemm_tile<8, Slot, Source>,
    gemm_tile<9, Slot, Source>, gemm_tile<10, Slot, Source>, gemm_tile<11, Slot, Source>, gemm_tile<12, Slot, Source>};

// All tokens of the block against the 32 rows from r on (or what is left of them).
template <int Slot, class Source>
MOEFLUX_MATH void gemm_panel(const MatMulBlock& b, std::int64_t r, std::int64_t row_end, const Source& from) noexcept {
  const MatrixView& w = b.w;
  const std::int64_t n_groups = w.cols / w.format.group, tile = b.xq.tile, n_tiles = (b.n_tokens + tile - 1) / tile;
  alignas(64) float out[kMaxTileTokens * kPanelRows];
  PanelAhead ahead(r + kPanelRows < row_end ? RowsToCome{&w, r + kPanelRows} : b.then, kPanelRows, n_tiles * (w.cols / (kNibbles<Slot> ? 8 : 4)));
  for (std::int64_t t = 0; t < b.n_tokens; t += tile) {
    const std::int64_t n = b.n_tokens - t < tile ? b.n_tokens - t : tile;
    for (std::int64_t i = 0; i < n; ++i) ask_for_results(b, t + i, r, kPanelRows);
    kGemmTiles<Slot, Source>[n - 1](from, n_groups, w.format.group, b.xq.x8 + t * w.cols, b.xq.d + t * n_groups, b.xq.sx + t * n_groups, out, ahead);
    for (std::int64_t i = 0; i < n; ++i) {
      store_rows(b, t + i, r, row_end - r, _mm512_load_ps(out + i * kPanelRows));
      if (row_end - r > 16) store_rows(b, t + i, r + 16, row_end - r - 16, _mm512_load_ps(out + i * kPanelRows + 16));
    }
  }
}

template <int Slot>
void gemm_rows(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const Panel panel = split_panel(b.scratch, b.w.cols, b.w.cols / b.w.format.group);
  for (std::int64_t r = row_begin; r < row_end; r += kPanelRows) {
    fill_panel<Slot>(b.w, r, row_end, panel);
    gemm_panel<kNibbles<Slot> ? Slot : 9>(b, r, row_end, PanelSource(panel));
  }
}

[[maybe_unused]] void gemm_bands(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  for (std::int64_t r = row_begin; r < row_end; r += kPanelRows) {
    const std::uint8_t* first = band_at(b.w, r);
    const std::uint8_t* second = row_end - r > kTileRows ? band_at(b.w, r + kTileRows) : first;
    b.w.format.scale_dtype == DType::BF16 ? gemm_panel<6>(b, r, row_end, BandSource<true>(first, second))
                                          : gemm_panel<6>(b, r, row_end, BandSource<false>(first, second));
  }
}

template <int Slot>
void matmul_fast_tiles(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if constexpr (Slot == 6)
    if (b.w.order == quant::Order::Bands) return b.xq.tile > 1 ? gemm_bands(b, row_begin, row_end) : matvec_bands(b, row_begin, row_end);
  if (b.xq.tile > 1)
    gemm_rows<Slot>(b, row_begin, row_end);
  else
    matvec_fast<Slot>(b, row_begin, row_end);
}

// Below three tokens unpacking a panel costs more than reading the codes again from the first-level cache.
std::int64_t token_tile(const MatrixView& w, std::int64_t n_tokens) noexcept {
  if (w.order == quant::Order::Bands ? n_tokens <= kMaxBandTokens : n_tokens < 3 || is_linear(w, n_tokens)) return 1;
  const std::int64_t tiles = (n_tokens + kMaxTileTokens - 1) / kMaxTileTokens;
  return (n_tokens + tiles - 1) / tiles;
}

// Rows of one tile side by side, four columns of each in turn; d and sx follow by group.
void interleave_tokens(const std::int8_t* const* x8, const float* const* d, const std::int32_t* const* sx,
                       std::int64_t n, std::int64_t /*tile*/, std::int64_t cols, std::int64_t n_groups, std::int8_t* x8_out,
                       float* d_out, std::int32_t* sx_out) noexcept {
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
