// fast matmul for one to four tokens, 4-bit codes: weights are read strictly in the order in which they lie in memory, which is
// what the hardware fetches ahead at full speed (sixteen rows side by side with prefetch instructions: two thirds of it). Codes
// are split once and meet each token in turn; who takes that long between two lines has to ask for them (kAhead), for a single
// token that depends on the processor (reads_better_ahead()).
//
// A unit is 128 codes. Rows follow each other without a gap, so the codes of sixteen rows are one sequence of units: sixteen
// at a time are multiplied and reduced to one integer per unit and group, wherever rows begin and end. When the sums of a tile
// of sixteen rows are there, they meet their scales, one row per lane, in pieces of a few units: between the blocks of the
// tile after it, so that memory is never left waiting. A task that begins or ends has one tile without that: who can go on does.

namespace {

inline constexpr int kMaxLinearTokens = 4;
inline constexpr std::int64_t kMostUnitsOfTokens = 96;
// Rows of so many units make tiles of fewer rows: with sixteen a tile's sums would have left the first-level cache when they are needed, and
// what brings them back disturbs the reading of codes (7168 columns: 15 instead of 20 GB/s of a core).
inline constexpr std::int64_t kLongRow = 32;
inline constexpr int kLongTileRows = 8;

// Rows of a tile, one per lane of its registers: sixteen, or fewer of long rows.
template <int Rows>
struct Lanes;
template <>
struct Lanes<16> {
  using I = __m512i;
  using F = __m512;
  template <class RowAt>
  MOEFLUX_MATH static I gather(const RowAt& row, int j) noexcept {  // 16 bytes of rows j, j + 4, ..
    I r = _mm512_castsi128_si512(row(j));
    r = _mm512_inserti32x4(r, row(j + 4), 1);
    r = _mm512_inserti32x4(r, row(j + 8), 2);
    return _mm512_inserti32x4(r, row(j + 12), 3);
  }
  MOEFLUX_MATH static void transpose4(const I (&r)[4], I* out) noexcept {
    const I a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const I c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    out[0] = _mm512_unpacklo_epi64(a, c), out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d), out[3] = _mm512_unpackhi_epi64(b, d);
  }
  MOEFLUX_MATH static __m512i wide(I v) noexcept { return v; }
  MOEFLUX_MATH static F narrow(__m512 v) noexcept { return v; }
  MOEFLUX_MATH static __m512 wide_f(F v) noexcept { return v; }
  MOEFLUX_MATH static F bf16_low(I v) noexcept { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
  MOEFLUX_MATH static F bf16_high(I v) noexcept { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }
  MOEFLUX_MATH static I sub(I a, std::int32_t b) noexcept { return _mm512_sub_epi32(a, _mm512_set1_epi32(b)); }
  MOEFLUX_MATH static F to_f32(I v) noexcept { return _mm512_cvtepi32_ps(v); }
  MOEFLUX_MATH static F integer(std::int32_t v) noexcept { return _mm512_cvtepi32_ps(_mm512_set1_epi32(v)); }
  MOEFLUX_MATH static F all(float v) noexcept { return _mm512_set1_ps(v); }
  MOEFLUX_MATH static F mul(F a, F b) noexcept { return _mm512_mul_ps(a, b); }
  MOEFLUX_MATH static F fma(F a, F b, F c) noexcept { return _mm512_fmadd_ps(a, b, c); }
};
template <>
struct Lanes<8> {
  using I = __m256i;
  using F = __m256;
  template <class RowAt>
  MOEFLUX_MATH static I gather(const RowAt& row, int j) noexcept {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(row(j)), row(j + 4), 1);
  }
  MOEFLUX_MATH static void transpose4(const I (&r)[4], I* out) noexcept {
    const I a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
    const I c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
    out[0] = _mm256_unpacklo_epi64(a, c), out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d), out[3] = _mm256_unpackhi_epi64(b, d);
  }
  MOEFLUX_MATH static __m512i wide(I v) noexcept { return _mm512_castsi256_si512(v); }
  MOEFLUX_MATH static F narrow(__m512 v) noexcept { return _mm512_castps512_ps256(v); }
  MOEFLUX_MATH static __m512 wide_f(F v) noexcept { return _mm512_castps256_ps512(v); }
  MOEFLUX_MATH static F bf16_low(I v) noexcept { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  MOEFLUX_MATH static F bf16_high(I v) noexcept { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }
  MOEFLUX_MATH static I sub(I a, std::int32_t b) noexcept { return _mm256_sub_epi32(a, _mm256_set1_epi32(b)); }
  MOEFLUX_MATH static F to_f32(I v) noexcept { return _mm256_cvtepi32_ps(v); }
  MOEFLUX_MATH static F integer(std::int32_t v) noexcept { return _mm256_cvtepi32_ps(_mm256_set1_epi32(v)); }
  MOEFLUX_MATH static F all(float v) noexcept { return _mm256_set1_ps(v); }
  MOEFLUX_MATH static F mul(F a, F b) noexcept { return _mm256_mul_ps(a, b); }
  MOEFLUX_MATH static F fma(F a, F b, F c) noexcept { return _mm256_fmadd_ps(a, b, c); }
};
// Units: of a row, where the compiler may know it (strides become constants: a seventh of the time for one token, a twentieth for
// more); 0: any number.
template <int Slot, int Group, int Units, int Tokens, int Rows = 16>
struct Linear {
  static constexpr int kPerUnit = kUnit<Slot> / Group;        // groups of a unit
  static constexpr int kPiece = kPerUnit == 1 ? 8 : 4;        // units that meet their scales together
  static constexpr int kPieceGroups = kPiece * kPerUnit;
  static constexpr int kScaleBytes = Slot == 3 ? 1 : 2;       // e8m0, or 16 bits
  static constexpr int kScaleWords = kPieceGroups * kScaleBytes / 16;  // per row, of 16 bytes
  static_assert(kScaleWords >= 1);

  std::int64_t n_units;
  std::uint64_t n_scale_bytes;   // of a row
  std::int64_t n_x;              // registers of x8 a token
  __m512i* x;                    // of each token: x8 as units want it, two each, repeated beyond the end of a row
  std::int32_t* sums;            // of each token: two tiles, each [kPerUnit][16 rows * units]
  std::int64_t units() const noexcept { return Units != 0 ? Units : n_units; }
  std::uint64_t scale_bytes() const noexcept {
    return Units != 0 ? static_cast<std::uint64_t>(Units * kPerUnit * kScaleBytes) : n_scale_bytes;
  }
  std::int64_t array() const noexcept { return Rows * units(); }
  std::int32_t* tile(std::int64_t i) const noexcept { return sums + (i & 1) * kPerUnit * array(); }
  std::int64_t token() const noexcept { return 2 * kPerUnit * array(); }  // from one token's sums to the next one's
};

template <int Slot, int Group, int Units, int Tokens, int Rows>
MOEFLUX_MATH Linear<Slot, Group, Units, Tokens, Rows> prepare_linear(const MatMulBlock& b) noexcept {
  Linear<Slot, Group, Units, Tokens, Rows> l{b.w.cols / kUnit<Slot>, b.w.scale_row_bytes(), 0, reinterpret_cast<__m512i*>(b.scratch), nullptr};
  l.n_x = 2 * (l.units() % 16 == 0 ? l.units() : l.units() + 15);
  for (int t = 0; t < Tokens; ++t) {
    __m512i* x = l.x + t * l.n_x;
    for (std::int64_t u = 0, from = 0; 2 * u < l.n_x; ++u, from = from + 1 < l.units() ? from + 1 : 0)
      load_x<Slot, true>(b.xq.x8 + t * b.w.cols + from * kUnit<Slot>, kUnit<Slot>, x[2 * u], x[2 * u + 1]);
  }
  l.sums = reinterpret_cast<std::int32_t*>(l.x + Tokens * l.n_x);
  return l;
}

// Sixteen units from `codes` on; sums[g * array + i]: group g of unit i, for each token. With one token `ahead` bytes further on are asked for meanwhile,
// unless that is 0.
template <int Slot, int Group, int Units, int Tokens, int Rows>
MOEFLUX_MATH void sum_block(const Linear<Slot, Group, Units, Tokens, Rows>& l, const std::uint8_t* codes, const __m512i* x, std::int32_t* sums,
                            [[maybe_unused]] std::ptrdiff_t ahead) noexcept {
  __m512i q[Tokens][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i low[4], high[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      __m512i v = load512(codes + 64 * (4 * i + k));
      asm volatile("" : "+v"(v));  // once from memory, in this order, then from its register
      if constexpr (Tokens == 1)
        if (ahead != 0) __builtin_prefetch(codes + 64 * (4 * i + k) + ahead, 0, 2);
      if constexpr (Tokens > 1) _mm_prefetch(reinterpret_cast<const char*>(codes) + kAhead + 64 * (4 * i + k), _MM_HINT_T1);
      low[k] = low_codes<Slot>(v), high[k] = high_codes<Slot>(v);
    }
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
      const __m512i* xt = x + t * l.n_x + 8 * i;
      __m512i p[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k)
        p[k] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), low[k], xt[2 * k]), high[k], xt[2 * k + 1]);
      q[t][i] = Slot == 3 ? add_across4(p[0], p[1], p[2], p[3]) : add_across4_small(p[0], p[1], p[2], p[3]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < Tokens; ++t) {
    __m512i out[4];
    gather_groups<Group / 8>(q[t], out);
#pragma GCC unroll 4
    for (int g = 0; g < kUnit<Slot> / Group; ++g) _mm512_store_si512(sums + t * l.token() + g * l.array(), out[g]);
  }
}

// 16 bytes of each row -> four registers of double words, one row per lane. Where the distance of rows is no constant one address
// walks: sixteen would not fit into registers.
template <int Rows, bool Constant>
MOEFLUX_MATH void columns4(const std::byte* p, std::uint64_t row_bytes, typename Lanes<Rows>::I* out) noexcept {
  const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + static_cast<std::uint64_t>(i) * row_bytes)); };
  typename Lanes<Rows>::I r[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j, p += row_bytes) {
    if constexpr (!Constant) asm("" : "+r"(p));
    r[j] = Lanes<Rows>::gather(row, 0);
  }
  Lanes<Rows>::transpose4(r, out);
}

// Scale i of the piece from the double words of columns4.
template <int Slot, int Rows>
MOEFLUX_MATH typename Lanes<Rows>::F scale_of(const typename Lanes<Rows>::I (&words)[8], int i, bool bf16) noexcept {
  using V = Lanes<Rows>;
  if constexpr (Slot == 3) return V::narrow(e8m0_scales(_mm512_srl_epi32(V::wide(words[i / 4]), _mm_cvtsi32_si128(8 * (i % 4)))));
  const auto pair = words[i / 2];
  if (bf16) return i % 2 != 0 ? V::bf16_high(pair) : V::bf16_low(pair);
  const __m512i half = i % 2 != 0 ? _mm512_srli_epi32(V::wide(pair), 16) : V::wide(pair);
  return V::narrow(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)));
}

// The units [at, at + kPiece) of a tile of rows meet their scales; the first `done` of them have before.
template <int Slot, int Group, int Units, int Tokens, int Rows>
MOEFLUX_MATH void add_piece(const Linear<Slot, Group, Units, Tokens, Rows>& l, const MatMulBlock& b, std::int64_t row, const std::int32_t* sums,
                            std::int64_t at, int done, bool bf16, typename Lanes<Rows>::F (&acc)[Tokens]) noexcept {
  using L = Linear<Slot, Group, Units, Tokens, Rows>;
  using V = Lanes<Rows>;
  const std::uint64_t from = static_cast<std::uint64_t>(row) * l.scale_bytes() + static_cast<std::uint64_t>(at * L::kPerUnit * L::kScaleBytes);
  typename V::I scales[8], biases[8];
#pragma GCC unroll 2
  for (int i = 0; i < L::kScaleWords; ++i) {
    columns4<Rows, Units != 0>(b.w.scales + from + static_cast<std::uint64_t>(16 * i), l.scale_bytes(), scales + 4 * i);
    if constexpr (Slot != 3) columns4<Rows, Units != 0>(b.w.biases + from + static_cast<std::uint64_t>(16 * i), l.scale_bytes(), biases + 4 * i);
  }
#pragma GCC unroll 4
  for (int t = 0; t < Tokens; ++t) {
    typename V::I idot[L::kPieceGroups];
#pragma GCC unroll 4
    for (int g = 0; g < L::kPerUnit; ++g)
#pragma GCC unroll 2
      for (int u = 0; u < L::kPiece; u += 4) {
        typename V::I c[4];
        columns4<Rows, Units != 0>(reinterpret_cast<const std::byte*>(sums + t * l.token() + g * l.array() + at + u), static_cast<std::uint64_t>(l.units()) * 4, c);
        for (int k = 0; k < 4; ++k) idot[(u + k) * L::kPerUnit + g] = c[k];
      }
    const std::int64_t first = (t * l.units() + at) * L::kPerUnit;
    const float* d = b.xq.d + first;
    const std::int32_t* sx = b.xq.sx + first;
#pragma GCC unroll 16
    for (int i = 0; i < L::kPieceGroups; ++i) {
      if (i < done * L::kPerUnit) continue;
      const auto dv = V::all(d[i]);
      if constexpr (Slot == 3) idot[i] = V::sub(idot[i], kE2m1Offset * sx[i]);
      acc[t] = V::fma(V::to_f32(idot[i]), V::mul(scale_of<Slot, Rows>(scales, i, bf16), dv), acc[t]);
      if constexpr (Slot != 3) acc[t] = V::fma(V::integer(sx[i]), V::mul(scale_of<Slot, Rows>(biases, i, bf16), dv), acc[t]);
    }
  }
}

// What the next sixteen units need to meet their scales, a row at a time: scales come from memory, and of the sums those of long
// rows have left the first-level cache by then. `block` counts blocks of the tile `now`, whose first row is `row`.
template <int Slot, int Group, int Units, int Tokens, int Rows>
MOEFLUX_MATH void fetch_ahead(const Linear<Slot, Group, Units, Tokens, Rows>& l, const MatMulBlock& b, std::int64_t row, std::int64_t block,
                              const std::int32_t* now, const std::int32_t* before) noexcept {
  using L = Linear<Slot, Group, Units, Tokens, Rows>;
  std::int64_t unit = (block / Rows + 1) * 16;
  row += block % Rows - Rows;
  if (unit >= l.units()) unit = 0, row += Rows, before = now;
  const std::int64_t line = row * static_cast<std::int64_t>(l.scale_bytes()) + unit * L::kPerUnit * L::kScaleBytes;
  _mm_prefetch(reinterpret_cast<const char*>(b.w.scales + line), _MM_HINT_T0);
  if constexpr (Slot != 3) _mm_prefetch(reinterpret_cast<const char*>(b.w.biases + line), _MM_HINT_T0);
    for (int t = 0; t < Tokens; ++t)
    for (int g = 0; g < L::kPerUnit; ++g)
      _mm_prefetch(reinterpret_cast<const char*>(before + t * l.token() + g * l.array() + block % Rows * l.units() + unit), _MM_HINT_T0);
}

// Rows < 16: whole pieces only.
template <int Slot, int Group, int Units, int Tokens, int Rows = 16>
MOEFLUX_MATH void matvec_linear_tiles(const MatMulBlock& b, std::int64_t row_begin, std::int64_t& row_end, bool bf16) noexcept {
  using L = Linear<Slot, Group, Units, Tokens, Rows>;
  using V = Lanes<Rows>;
  const L l = prepare_linear<Slot, Group, Units, Tokens, Rows>(b);
  const auto* codes = reinterpret_cast<const std::uint8_t*>(b.w.data) + static_cast<std::uint64_t>(row_begin) * b.w.row_bytes();
  RowsToCome then;
  const std::ptrdiff_t ahead = reads_better_ahead() ? kBytesAhead : 0;
  std::int64_t n_tiles = (row_end - row_begin) / Rows;
  for (std::int64_t i = 0; i <= n_tiles; ++i) {
    if (i == n_tiles && b.more != nullptr && b.more->next(row_end, then)) n_tiles = (row_end - row_begin) / Rows;
    const std::int64_t row = row_begin + (i - 1) * Rows;
    std::int32_t* now = l.tile(i);
    const std::int32_t* before = l.tile(i + 1);
    typename V::F acc[Tokens];
    for (int t = 0; t < Tokens; ++t) acc[t] = V::all(0.0f);
    std::int64_t x_at = 0;
    for (std::int64_t u = 0; u < l.units(); u += L::kPiece) {
      const std::int64_t end = u + L::kPiece < l.units() ? u + L::kPiece : l.units();
      if (i < n_tiles)
        for (std::int64_t block = u * Rows / 16; block < end * Rows / 16; ++block, codes += 16 * 64) {
          if (l.units() >= 16) fetch_ahead(l, b, row + Rows, block, now, before);
          sum_block(l, codes, l.x + 2 * x_at, now + 16 * block, ahead);
          for (x_at += 16; x_at >= l.units();) x_at -= l.units();
        }
      if (i == 0) continue;
      if (u + L::kPiece <= l.units())
        add_piece(l, b, row, before, u, 0, bf16, acc);
      else  // the last ones, read together with some before them
        add_piece(l, b, row, before, l.units() - L::kPiece, static_cast<int>(u + L::kPiece - l.units()), bf16, acc);
    }
    if (i > 0)
      for (int t = 0; t < Tokens; ++t) store_rows(b, t, row, Rows, V::wide_f(acc[t]));
  }
}

template <int Slot, int Group, int Tokens>
void matvec_linear_tokens(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const bool bf16 = Slot == 3 || b.w.format.scale_dtype == DType::BF16;
  const std::int64_t units = b.w.cols / kUnit<Slot>;
  std::int64_t rows = kTileRows;
  const auto run = [&]() noexcept {
    if constexpr (Tokens == 1) {
      if (units >= kLongRow && units % Linear<Slot, Group, 0, Tokens>::kPiece == 0) {
        rows = kLongTileRows;
        if constexpr (Slot == 6 && Group == 64)
          if (bf16 && units == 32) return matvec_linear_tiles<Slot, Group, 32, Tokens, kLongTileRows>(b, row_begin, row_end, true);
        return matvec_linear_tiles<Slot, Group, 0, Tokens, kLongTileRows>(b, row_begin, row_end, bf16);
      }
      if constexpr (Slot == 6 && Group == 64) {
        if (bf16 && units == 4) return matvec_linear_tiles<Slot, Group, 4, Tokens>(b, row_begin, row_end, true);
        if (bf16 && units == 16) return matvec_linear_tiles<Slot, Group, 16, Tokens>(b, row_begin, row_end, true);
      }
    }
    matvec_linear_tiles<Slot, Group, 0, Tokens>(b, row_begin, row_end, bf16);
  };
  run();
  const std::int64_t end = row_begin + (row_end - row_begin) / rows * rows;
  if (end < row_end) matvec_rows<Slot, Group>(b, end, row_end);
}

template <int Slot, int Group>
void matvec_linear(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  switch (b.n_tokens) {
    case 1:
      return matvec_linear_tokens<Slot, Group, 1>(b, row_begin, row_end);
    case 2:
      return matvec_linear_tokens<Slot, Group, 2>(b, row_begin, row_end);
    case 3:
      return matvec_linear_tokens<Slot, Group, 3>(b, row_begin, row_end);
    default:
      return matvec_linear_tokens<Slot, Group, 4>(b, row_begin, row_end);
  }
}

// Whole units, at least a piece of them in a row, 16-bit scales or e8m0; and the sums of three tokens or more stay in the first-level cache.
template <int Slot, int Group>
MOEFLUX_MATH bool is_linear(const MatrixView& w, std::int64_t n_tokens) noexcept {
  const std::int64_t units = w.cols / kUnit<Slot>;
  return n_tokens <= kMaxLinearTokens && (n_tokens <= 2 || n_tokens * units <= kMostUnitsOfTokens) && w.cols % kUnit<Slot> == 0 &&
         units >= Linear<Slot, Group, 0, 1>::kPiece && w.row_bytes() == static_cast<std::uint64_t>(units) * 64 && (Slot == 3 || w.format.scale_dtype != DType::F32);
}

template <int Slot, int Group>
void matvec_group(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if constexpr (Slot == 6 || (Slot == 3 && Group == 32)) {
    if (is_linear<Slot, Group>(b.w, b.n_tokens)) return matvec_linear<Slot, Group>(b, row_begin, row_end);
  }
  matvec_rows<Slot, Group>(b, row_begin, row_end);
}

bool is_linear(const MatrixView& w, std::int64_t n_tokens) noexcept {
  const int slot = format_slot(w.format);
  if (slot == 3) return w.format.group == 32 && is_linear<3, 32>(w, n_tokens);
  if (slot != 6) return false;
  return w.format.group == 32 ? is_linear<6, 32>(w, n_tokens) : w.format.group == 64 ? is_linear<6, 64>(w, n_tokens) : is_linear<6, 128>(w, n_tokens);
}

template <int Slot>
void matvec_fast(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  switch (b.w.format.group) {
    case 32:
      return matvec_group<Slot, 32>(b, row_begin, row_end);
    case 64:
      return matvec_group<Slot, 64>(b, row_begin, row_end);
    default:
      return matvec_group<Slot, 128>(b, row_begin, row_end);
  }
}

}  // namespace
