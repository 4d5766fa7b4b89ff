// fast matmul for instruction sets with products of bytes: sixteen rows at a time, one row per lane.
//
// x8 order of these tables: in every 32 values the even ones, then the odd ones, as a packed nibble format gives them. Sums
// inside a group are exact integers: their order is free. Codes are kept as bytes that the instruction set can multiply,
// shifted by kShift<Slot>; kShift * sx is taken off again.
//
// The instruction set supplies: I16 (sixteen sums) with izero, isub, to_f32; Partial (sums of one row) with row_dot,
// reduce8; order32, unpack_ordered32 (codes of 2, 3, 5 and 6 bits), transpose32, transpose_nibbles32, transpose_bf16; kShift; Part (what it adds up of
// kColumns<Slot> columns of sixteen rows, a divisor of 32) with begin_part, add_columns4, end_part.

namespace {

inline constexpr int kRows = 16;
inline constexpr int kMostTokens = 6;  // of sixteen sums each: what sixteen registers of sixteen 16-bit lanes hold beside the codes

template <int Slot>
inline constexpr bool kNibbles = Slot == 3 || Slot == 6;

struct PanelScratch {
  std::uint8_t* codes;  // [cols / 4][16][4], or [16][cols] for one token
  float* scales;        // [groups][16]
  float* biases;
};

MOEFLUX_MATH PanelScratch split_panel(std::byte* scratch, std::int64_t cols, std::int64_t n_groups) noexcept {
  auto* codes = reinterpret_cast<std::uint8_t*>(scratch);
  auto* scales = reinterpret_cast<float*>(scratch + cols * kRows);
  return {codes, scales, scales + n_groups * kRows};
}

MOEFLUX_MATH float load_scale(const std::byte* p, DType dtype, std::int64_t i) noexcept {
  return dtype == DType::BF16  ? quant::load_scalar<DType::BF16>(p, i)
         : dtype == DType::F16 ? quant::load_scalar<DType::F16>(p, i)
                               : quant::load_scalar<DType::F32>(p, i);
}

// Rows past the end repeat the last one and are not stored.
MOEFLUX_MATH std::uint64_t row_or_last(std::int64_t row, std::int64_t end) noexcept {
  return static_cast<std::uint64_t>(row < end ? row : end - 1);
}

template <int Slot>
void load_panel_scales(const MatrixView& w, std::int64_t row, std::int64_t end, const PanelScratch& s) noexcept {
  const std::int64_t n_groups = w.cols / w.format.group;
  const DType dtype = w.format.scale_dtype;
  if (Slot != 3 && dtype == DType::BF16 && row + kRows <= end && n_groups % 8 == 0) {
    const std::uint64_t at = static_cast<std::uint64_t>(row) * w.scale_row_bytes();
    for (std::int64_t g = 0; g < n_groups; g += 8) {
      transpose_bf16(w.scales + at + 2 * g, w.scale_row_bytes(), s.scales + g * kRows);
      transpose_bf16(w.biases + at + 2 * g, w.scale_row_bytes(), s.biases + g * kRows);
    }
    return;
  }
  for (int i = 0; i < kRows; ++i) {
    const std::uint64_t at = row_or_last(row + i, end) * w.scale_row_bytes();
    if constexpr (Slot == 3) {
      const auto* e = reinterpret_cast<const std::uint8_t*>(w.scales) + at;
      for (std::int64_t g = 0; g < n_groups; ++g) s.scales[g * kRows + i] = quant::e8m0_half_to_f32(e[g]);
    } else if (dtype == DType::BF16) {
      for (std::int64_t g = 0; g < n_groups; ++g) {
        s.scales[g * kRows + i] = quant::load_scalar<DType::BF16>(w.scales + at, g);
        s.biases[g * kRows + i] = quant::load_scalar<DType::BF16>(w.biases + at, g);
      }
    } else {
      for (std::int64_t g = 0; g < n_groups; ++g) {
        s.scales[g * kRows + i] = load_scale(w.scales + at, dtype, g);
        s.biases[g * kRows + i] = load_scale(w.biases + at, dtype, g);
      }
    }
  }
}

// The codes of a row as bytes in x8 order, for formats whose packed codes are not in it.
template <int Slot>
MOEFLUX_MATH void unpack_ordered(const std::uint8_t* packed, std::int64_t cols, std::uint8_t* out) noexcept {
  if constexpr (kBits<Slot> != 8) {
    static_assert(kShift<Slot> == 0);
    for (std::int64_t c = 0; c < cols; c += 32) unpack_ordered32<kBits<Slot>>(packed + c / 8 * kBits<Slot>, out + c);
  } else {
    alignas(64) std::uint8_t u[32];
    for (std::int64_t c = 0; c < cols; c += 32) {
      std::memcpy(u, packed + c, 32);
      if constexpr (kShift<Slot> != 0)
        for (std::uint8_t& code : u) code = static_cast<std::uint8_t>(code + kShift<Slot>);
      order32(u, out + c);
    }
  }
}

MOEFLUX_MATH const std::uint8_t* codes_of(const MatrixView& w, std::uint64_t row) noexcept {
  return reinterpret_cast<const std::uint8_t*>(w.data) + row * w.row_bytes();
}

// The two fmas of a group.
template <int Slot>
MOEFLUX_MATH V16 add_group(V16 acc, I16 idot, const float* scales, const float* biases, float d, std::int32_t sx) noexcept {
  if constexpr (kShift<Slot> != 0) idot = isub(idot, kShift<Slot> * sx);
  const V16 dv = set1(d);
  acc = fma(to_f32(idot), mul(load(scales), dv), acc);
  if constexpr (Slot != 3) acc = fma(set1(static_cast<float>(sx)), mul(load(biases), dv), acc);
  return acc;
}

MOEFLUX_MATH void store_panel_rows(const MatMulBlock& b, std::int64_t t, std::int64_t row, std::int64_t n, V16 acc) noexcept {
  float* y = y_row(b, t) + row;
  if (n >= kRows) {
    store(y, b.bias != nullptr ? add(acc, load(b.bias + row)) : acc);
  } else {
    store_n(y, b.bias != nullptr ? add(acc, load_n(b.bias + row, n)) : acc, n);
  }
}

// Sixteen rows are too many streams for the hardware to run ahead of: codes are asked for a tile ahead, at least 16 KiB, in
// order, scales two tiles.
MOEFLUX_MATH const char* fetch_lines(const char* p, int bytes) noexcept {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
  return p + bytes;
}
MOEFLUX_MATH const char* codes_ahead(const MatrixView& w, std::int64_t row) noexcept {
  const std::uint64_t tile = kRows * w.row_bytes(), distance = tile > (16 << 10) ? tile : 16 << 10;
  return reinterpret_cast<const char*>(codes_of(w, static_cast<std::uint64_t>(row))) + distance;
}
template <int Slot>
MOEFLUX_MATH void fetch_scales(const MatrixView& w, std::int64_t row) noexcept {
  const std::uint64_t next = (static_cast<std::uint64_t>(row) + 2 * kRows) * w.scale_row_bytes();
  fetch_lines(reinterpret_cast<const char*>(w.scales) + next, static_cast<int>(kRows * w.scale_row_bytes()));
  if constexpr (Slot != 3) fetch_lines(reinterpret_cast<const char*>(w.biases) + next, static_cast<int>(kRows * w.scale_row_bytes()));
}

// One token: each row's codes meet x8 where they lie, or unpacked a row at a time.
template <int Slot>
void matvec_panels(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const MatrixView& w = b.w;
  const int group = w.format.group;
  const std::int64_t n_groups = w.cols / group;
  const PanelScratch s = split_panel(b.scratch, w.cols, n_groups);
  for (std::int64_t r = row_begin; r < row_end; r += kRows) {
    load_panel_scales<Slot>(w, r, row_end, s);
    const char* ahead = codes_ahead(w, r);
    fetch_scales<Slot>(w, r);
    const std::uint8_t* rows[kRows];
    for (int i = 0; i < kRows; ++i) {
      rows[i] = codes_of(w, row_or_last(r + i, row_end));
      if constexpr (!kNibbles<Slot>) {
        ahead = fetch_lines(ahead, static_cast<int>(w.row_bytes()));
        unpack_ordered<Slot>(rows[i], w.cols, s.codes + i * w.cols);
        rows[i] = s.codes + i * w.cols;
      }
    }
    const int group_bytes = kNibbles<Slot> ? group / 2 : group;
    for (std::int64_t t = 0; t < b.n_tokens; ++t) {
      V16 acc = zero();
      for (std::int64_t g = 0; g < n_groups; ++g) {
        const std::int8_t* x8 = b.xq.x8 + t * w.cols + g * group;
        alignas(64) std::int32_t sums[kRows];
        if constexpr (kNibbles<Slot>) ahead = fetch_lines(ahead, kRows * group_bytes);
        for (int half = 0; half < kRows; half += 8) {
          Partial p[8];
#pragma GCC unroll 8
          for (int i = 0; i < 8; ++i) p[i] = row_dot<Slot>(rows[half + i] + g * group_bytes, x8, group);
          reduce8(p, sums + half);
        }
        acc = add_group<Slot>(acc, iload(sums), s.scales + g * kRows, s.biases + g * kRows, b.xq.d[t * n_groups + g],
                              b.xq.sx[t * n_groups + g]);
      }
      store_panel_rows(b, t, r, row_end - r, acc);
    }
  }
}

template <int Slot>
void fill_codes(const MatrixView& w, std::int64_t row, std::int64_t end, const PanelScratch& s) noexcept {
  constexpr int kBlockBytes = kNibbles<Slot> ? 16 : 4 * kBits<Slot>;  // of 32 codes
  [[maybe_unused]] alignas(64) std::uint8_t block[kRows][32];
  const std::uint8_t* rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = codes_of(w, row_or_last(row + i, end));
  std::uint8_t* to = s.codes;
  for (std::int64_t c = 0; c < w.cols; c += 32, to += 32 * kRows) {
    if constexpr (kNibbles<Slot>) {
      transpose_nibbles32<Slot == 3>(rows, to);
    } else {
      for (int i = 0; i < kRows; ++i) unpack_ordered<Slot>(rows[i], 32, block[i]);
      transpose32(block, to);
    }
    for (const std::uint8_t*& row_codes : rows) row_codes += kBlockBytes;
  }
}

// NT tokens against a panel. The sums are named variables: compilers keep arrays that live across a loop in memory.
#define MOEFLUX_EACH_TOKEN(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define MOEFLUX_CLEAR(t) I16 a##t = izero();
#define MOEFLUX_BEGIN(t) Part p##t = begin_part<Slot>(a##t);
#define MOEFLUX_STEP(t) \
  if constexpr (NT > t) add_columns4<Slot>(p##t, codes, x + 4 * t);
#define MOEFLUX_END(t) \
  if constexpr (NT > t) end_part<Slot>(a##t, p##t);
#define MOEFLUX_FINISH(t) \
  if constexpr (NT > t) store(out + kRows * t, add_group<Slot>(load(out + kRows * t), a##t, scales, biases, d[t], sx[t]));

template <int Slot, int NT>
void panel_tile(const PanelScratch& s, std::int64_t n_groups, std::int64_t group, const std::int8_t* x, const float* d,
                const std::int32_t* sx, float* out, PanelAhead& ahead) noexcept {
  for (int t = 0; t < NT; ++t) store(out + kRows * t, zero());
  const std::uint8_t* codes = s.codes;
  const float *scales = s.scales, *biases = s.biases;
  for (std::int64_t g = 0; g < n_groups; ++g, d += NT, sx += NT, scales += kRows, biases += kRows) {
    MOEFLUX_EACH_TOKEN(MOEFLUX_CLEAR)
    for (std::int64_t c = 0; c < group; c += kColumns<Slot>) {
      ahead.ask();
      MOEFLUX_EACH_TOKEN(MOEFLUX_BEGIN)
#pragma GCC unroll 8
      for (int k = 0; k < kColumns<Slot>; k += 4, codes += 4 * kRows, x += 4 * NT) {
        MOEFLUX_EACH_TOKEN(MOEFLUX_STEP)
      }
      MOEFLUX_EACH_TOKEN(MOEFLUX_END)
    }
    MOEFLUX_EACH_TOKEN(MOEFLUX_FINISH)
    asm volatile("" : : : "memory");  // keeps `out` in memory: in registers it would push the sums out of them
  }
}

#undef MOEFLUX_EACH_TOKEN
#undef MOEFLUX_CLEAR
#undef MOEFLUX_BEGIN
#undef MOEFLUX_STEP
#undef MOEFLUX_END
#undef MOEFLUX_FINISH

template <int Slot>
void gemm_panels(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const MatrixView& w = b.w;
  const std::int64_t group = w.format.group, n_groups = w.cols / group, tile = b.xq.tile;
  const PanelScratch s = split_panel(b.scratch, w.cols, n_groups);
  alignas(64) float out[kMostTokens * kRows];
  const std::int64_t n_tiles = (b.n_tokens + tile - 1) / tile;
  for (std::int64_t r = row_begin; r < row_end; r += kRows) {
    load_panel_scales<Slot>(w, r, row_end, s);
    fill_codes<Slot>(w, r, row_end, s);
    PanelAhead ahead(r + kRows < row_end ? RowsToCome{&w, r + kRows} : b.then, kRows, n_tiles * (w.cols / kColumns<Slot>));
    for (std::int64_t t = 0; t < b.n_tokens; t += tile) {
      const std::int64_t n = b.n_tokens - t < tile ? b.n_tokens - t : tile;
      const std::int8_t* x = b.xq.x8 + t * w.cols;
      const float* d = b.xq.d + t * n_groups;
      const std::int32_t* sx = b.xq.sx + t * n_groups;
      for (std::int64_t i = 0; i < n; ++i) ask_for_results(b, t + i, r, kRows);
      switch (n) {
        case 1: panel_tile<Slot, 1>(s, n_groups, group, x, d, sx, out, ahead); break;
        case 2: panel_tile<Slot, 2>(s, n_groups, group, x, d, sx, out, ahead); break;
        case 3: panel_tile<Slot, 3>(s, n_groups, group, x, d, sx, out, ahead); break;
        case 4: panel_tile<Slot, 4>(s, n_groups, group, x, d, sx, out, ahead); break;
        case 5: panel_tile<Slot, 5>(s, n_groups, group, x, d, sx, out, ahead); break;
        default: panel_tile<Slot, 6>(s, n_groups, group, x, d, sx, out, ahead); break;
      }
      for (std::int64_t i = 0; i < n; ++i) store_panel_rows(b, t + i, r, row_end - r, load(out + i * kRows));
    }
  }
}

template <int Slot>
void matmul_panels(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if (b.xq.tile > 1)
    gemm_panels<Slot>(b, row_begin, row_end);
  else
    matvec_panels<Slot>(b, row_begin, row_end);
}

std::int64_t panel_token_tile(const MatrixView&, std::int64_t n_tokens) noexcept {
  if (n_tokens < 2) return 1;
  const std::int64_t tiles = (n_tokens + kMostTokens - 1) / kMostTokens;
  return (n_tokens + tiles - 1) / tiles;
}

void quantize_row_panels(const float* x, std::int64_t cols, std::int64_t group, std::int8_t* x8, float* d, std::int32_t* sx) noexcept {
  quantize_row(x, cols, group, x8, d, sx);
  alignas(64) std::uint8_t t[32];
  for (std::int64_t c = 0; c < cols; c += 32) {
    std::memcpy(t, x8 + c, 32);
    order32(t, reinterpret_cast<std::uint8_t*>(x8 + c));
  }
}

void interleave_panels(const std::int8_t* const* x8, const float* const* d, const std::int32_t* const* sx, std::int64_t n,
                       std::int64_t /*tile*/, std::int64_t cols, std::int64_t n_groups, std::int8_t* x8_out, float* d_out, std::int32_t* sx_out) noexcept {
  for (std::int64_t t = 0; t < n; ++t) {
    std::int8_t* to = x8_out + 4 * t;
    for (std::int64_t c = 0; c < cols; c += 4, to += 4 * n) std::memcpy(to, x8[t] + c, 4);
    for (std::int64_t g = 0; g < n_groups; ++g) {
      d_out[g * n + t] = d[t][g];
      sx_out[g * n + t] = sx[t][g];
    }
  }
}

constexpr KernelTable panel_table() {
  KernelTable t = kTable;
  const MatMulFn fast[] = {matmul_panels<3>, matmul_panels<4>, matmul_panels<5>, matmul_panels<6>,
                           matmul_panels<7>, matmul_panels<8>, matmul_panels<9>};
  for (int i = 0; i < 7; ++i) t.fast[3 + i] = fast[i];
  t.quantize_row = quantize_row_panels;
  t.token_tile = panel_token_tile;
  t.interleave = interleave_panels;
  t.attention_heads = attention_heads;
  t.delta_columns = delta_columns_tiles;
  return t;
}
constexpr KernelTable kPanelTable = panel_table();

}  // namespace
