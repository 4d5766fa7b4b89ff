// fast matmul for one token, 4-bit codes, with AVX2: as avx512/linear.inl, weights are read strictly in the order in which they lie in
// memory, whatever rows they belong to.
//
// A unit is 64 codes (128 where groups are that wide). The codes of eight rows are one sequence of units: eight at a time are multiplied and
// reduced to one integer per unit and group. When the sums of a tile of eight rows are there they meet their scales, one row per lane, in
// pieces of some units between the blocks of the tile after it.

namespace {

inline constexpr std::int64_t kTileRows = 8;

// Units: of a row, where the compiler may know it; 0: any number.
template <int Slot, int Group, int Units>
struct Linear {
  static constexpr int kVectors = Group == 128 ? 2 : 1;        // of 32 bytes, in a unit
  static constexpr int kCodes = 64 * kVectors;                 // of a unit
  static constexpr int kPerUnit = kCodes / Group;              // groups of a unit
  static constexpr int kScaleBytes = Slot == 3 ? 1 : 2;        // e8m0, or 16 bits
  static constexpr int kPiece = 16 / (kPerUnit * kScaleBytes);  // units that meet their scales together: 16 bytes of those
  static_assert(kPiece % 4 == 0);

  std::int64_t n_units;
  __m256i* x;          // x8 as units want it, repeated beyond the end of a row
  std::int32_t* sums;  // two tiles, each [kPerUnit][8 rows * units]
  std::int64_t units() const noexcept { return Units != 0 ? Units : n_units; }
  std::uint64_t scale_bytes() const noexcept { return static_cast<std::uint64_t>(units() * kPerUnit * kScaleBytes); }  // of a row
  std::int64_t array() const noexcept { return kTileRows * units(); }
  std::int32_t* tile(std::int64_t i) const noexcept { return sums + (i & 1) * kPerUnit * array(); }
};

template <int Slot, int Group, int Units>
MOEFLUX_MATH Linear<Slot, Group, Units> prepare_linear(const MatMulBlock& b) noexcept {
  using L = Linear<Slot, Group, Units>;
  L l{b.w.cols / L::kCodes, reinterpret_cast<__m256i*>(b.scratch), nullptr};
  const std::int64_t n = l.units() % 8 == 0 ? l.units() : l.units() + 7;
  __m256i* to = l.x;
  for (std::int64_t u = 0, from = 0; u < n; ++u, from = from + 1 < l.units() ? from + 1 : 0)
    for (int v = 0; v < L::kVectors; ++v, to += 2) {
      const std::int8_t* x8 = b.xq.x8 + from * L::kCodes + v * 64;
      const __m256i first = load256(x8), second = load256(x8 + 32);
      to[0] = _mm256_permute2x128_si256(first, second, 0x20);  // of low nibbles
      to[1] = _mm256_permute2x128_si256(first, second, 0x31);  // of high ones
    }
  l.sums = reinterpret_cast<std::int32_t*>(to);
  return l;
}

// Eight sums of a unit: 8 * Vectors products each.
template <int Slot, int Vectors>
MOEFLUX_MATH __m256i unit_sums(const std::uint8_t* codes, const __m256i* x) noexcept {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 2
  for (int i = 0; i < Vectors; ++i) {
    __m256i v = load256(codes + 32 * i);
    asm volatile("" : "+x"(v));  // once from memory, in this order, then from its register
    __m256i low = _mm256_and_si256(v, mask), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
    if constexpr (Slot == 3) low = e2m1_bytes(low), high = e2m1_bytes(high);
    if constexpr (kByteDots) {
      sum = add_products<Slot>(add_products<Slot>(sum, low, x[2 * i]), high, x[2 * i + 1]);
    } else {
      const __m256i p = _mm256_add_epi16(_mm256_maddubs_epi16(low, x[2 * i]), _mm256_maddubs_epi16(high, x[2 * i + 1]));
      sum = i == 0 ? p : _mm256_add_epi16(sum, p);
    }
  }
  return kByteDots ? sum : _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}

// Eight units from `codes` on; sums[g * array + i]: group g of unit i. Neighbouring sums are added in pairs, from 16 to 32 bits and back
// as long as they fit: sixteen products of 15 * 127 do, eight of 24 * 127 (e2m1).
template <int Slot, int Group>
MOEFLUX_MATH void sum_block(const std::uint8_t* codes, const __m256i* x, std::int32_t* sums, std::int64_t array) noexcept {
  constexpr int kVectors = Linear<Slot, Group, 0>::kVectors;
  constexpr bool kLarge = Slot == 3 || kVectors == 2;
  const __m256i one = _mm256_set1_epi16(1);
  __m256i q[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    __m256i p[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const int u = (4 * i + 2 * j) * kVectors;
      const __m256i a = unit_sums<Slot, kVectors>(codes + 32 * u, x + 2 * u);
      const __m256i b = unit_sums<Slot, kVectors>(codes + 32 * (u + kVectors), x + 2 * (u + kVectors));
      p[j] = _mm256_madd_epi16(_mm256_packs_epi32(a, b), one);
    }
    q[i] = kLarge ? _mm256_hadd_epi32(p[0], p[1]) : _mm256_madd_epi16(_mm256_packs_epi32(p[0], p[1]), one);
  }
  const __m256i first = _mm256_permute2x128_si256(q[0], q[1], 0x20), second = _mm256_permute2x128_si256(q[0], q[1], 0x31);
  auto* to = reinterpret_cast<__m256i*>(sums);
  if constexpr (Group == 32) {
    _mm256_store_si256(to, first);
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums + array), second);
  } else {
    _mm256_store_si256(to, _mm256_add_epi32(first, second));
  }
}

// quant::e8m0_half_to_f32 of the lowest byte of every lane.
MOEFLUX_MATH __m256 e8m0_scales(__m256i bytes) noexcept {
  const __m256i one = _mm256_set1_epi32(1), u = _mm256_and_si256(bytes, _mm256_set1_epi32(255));
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(u, one), 23);
  const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), u);
  return _mm256_blendv_ps(_mm256_castsi256_ps(small), _mm256_castsi256_ps(normal), _mm256_castsi256_ps(_mm256_cmpgt_epi32(u, one)));
}

// Scale i of the piece from the double words of columns4.
template <int Slot>
MOEFLUX_MATH __m256 piece_scale(const __m256i (&words)[4], int i, bool bf16) noexcept {
  if constexpr (Slot == 3) return e8m0_scales(_mm256_srl_epi32(words[i / 4], _mm_cvtsi32_si128(8 * (i % 4))));
  const __m256i pair = words[i / 2];
  if (bf16)
    return _mm256_castsi256_ps(i % 2 != 0 ? _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000u))) : _mm256_slli_epi32(pair, 16));
  const __m256i half = i % 2 != 0 ? _mm256_srli_epi32(pair, 16) : _mm256_and_si256(pair, _mm256_set1_epi32(0xffff));
  return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08)));
}

// The units [at, at + kPiece) of a tile of rows meet their scales; the first `done` of them have before.
template <int Slot, int Group, int Units>
MOEFLUX_MATH __m256 add_piece(const Linear<Slot, Group, Units>& l, const MatMulBlock& b, std::int64_t row, const std::int32_t* sums,
                              std::int64_t at, int done, bool bf16, __m256 acc) noexcept {
  using L = Linear<Slot, Group, Units>;
  const std::uint64_t from = static_cast<std::uint64_t>(row) * l.scale_bytes() + static_cast<std::uint64_t>(at * L::kPerUnit * L::kScaleBytes);
  __m256i scales[4], biases[4];
  columns4(b.w.scales + from, l.scale_bytes(), scales);
  if constexpr (Slot != 3) columns4(b.w.biases + from, l.scale_bytes(), biases);
  const float* d = b.xq.d + at * L::kPerUnit;
  const std::int32_t* sx = b.xq.sx + at * L::kPerUnit;
#pragma GCC unroll 2
  for (int u = 0; u < L::kPiece; u += 4) {
    __m256i idot[L::kPerUnit][4];
#pragma GCC unroll 2
    for (int g = 0; g < L::kPerUnit; ++g)
      columns4(reinterpret_cast<const std::byte*>(sums + g * l.array() + at + u), static_cast<std::uint64_t>(l.units()) * 4, idot[g]);
#pragma GCC unroll 8
    for (int k = 0; k < 4 * L::kPerUnit; ++k) {
      const int i = u * L::kPerUnit + k;
      if (i < done * L::kPerUnit) continue;
      __m256i dot = idot[k % L::kPerUnit][k / L::kPerUnit];
      const __m256 dv = _mm256_broadcast_ss(d + i);
      if constexpr (Slot == 3) dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(kShift<Slot> * sx[i]));
      acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(piece_scale<Slot>(scales, i, bf16), dv), acc);
      if constexpr (Slot != 3)
        acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_set1_epi32(sx[i])), _mm256_mul_ps(piece_scale<Slot>(biases, i, bf16), dv), acc);
    }
  }
  return acc;
}

template <int Slot, int Group, int Units>
MOEFLUX_MATH void matvec_linear_tiles(const MatMulBlock& b, std::int64_t row_begin, std::int64_t& row_end, bool bf16) noexcept {
  using L = Linear<Slot, Group, Units>;
  const L l = prepare_linear<Slot, Group, Units>(b);
  const auto* codes = codes_of(b.w, static_cast<std::uint64_t>(row_begin));
  RowsToCome then;
  const bool ahead = reads_better_ahead();
  std::int64_t n_tiles = (row_end - row_begin) / kTileRows;
  for (std::int64_t i = 0; i <= n_tiles; ++i) {
    if (i == n_tiles && b.more != nullptr && b.more->next(row_end, then)) n_tiles = (row_end - row_begin) / kTileRows;
    const std::int64_t row = row_begin + (i - 1) * kTileRows;
    // What this tile's sums will meet during the next one comes from memory, too.
    const std::uint64_t next = static_cast<std::uint64_t>(row + kTileRows) * l.scale_bytes();
    const char* scales = reinterpret_cast<const char*>(b.w.scales) + next;
    [[maybe_unused]] const char* biases = nullptr;
    if constexpr (Slot != 3) biases = reinterpret_cast<const char*>(b.w.biases) + next;
    std::int32_t* now = l.tile(i);
    const std::int32_t* before = l.tile(i + 1);
    __m256 acc = _mm256_setzero_ps();
    std::int64_t x_at = 0;
    for (std::int64_t u = 0; u < l.units(); u += L::kPiece) {
      const std::int64_t end = u + L::kPiece < l.units() ? u + L::kPiece : l.units();
      if (i < n_tiles)
        for (std::int64_t block = u; block < end; ++block, codes += 8 * 32 * L::kVectors) {
          _mm_prefetch(scales + block * (8 * L::kPerUnit * L::kScaleBytes), _MM_HINT_T0);
          if constexpr (Slot != 3) _mm_prefetch(biases + block * (8 * L::kPerUnit * L::kScaleBytes), _MM_HINT_T0);
          if (ahead) ask_for_lines<4 * L::kVectors>(codes + kBytesAhead);
          sum_block<Slot, Group>(codes, l.x + 2 * L::kVectors * x_at, now + 8 * block, l.array());
          for (x_at += 8; x_at >= l.units();) x_at -= l.units();
        }
      if (i == 0) continue;
      if (u + L::kPiece <= l.units())
        acc = add_piece<Slot, Group, Units>(l, b, row, before, u, 0, bf16, acc);
      else  // the last ones, read together with some before them
        acc = add_piece<Slot, Group, Units>(l, b, row, before, l.units() - L::kPiece, static_cast<int>(u + L::kPiece - l.units()), bf16, acc);
    }
    if (i == 0) continue;
    float* y = y_row(b, 0) + row;
    _mm256_storeu_ps(y, b.bias != nullptr ? _mm256_add_ps(acc, _mm256_loadu_ps(b.bias + row)) : acc);
  }
}

template <int Slot, int Group>
void matvec_linear(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const std::int64_t units = b.w.cols / Linear<Slot, Group, 0>::kCodes;
  if constexpr (Slot == 3) {
    matvec_linear_tiles<Slot, Group, 0>(b, row_begin, row_end, true);
  } else if (b.w.format.scale_dtype != DType::BF16) {
    matvec_linear_tiles<Slot, Group, 0>(b, row_begin, row_end, false);
  } else if (Group == 64 && units == 8) {
    matvec_linear_tiles<Slot, Group, 8>(b, row_begin, row_end, true);
  } else if (Group == 64 && units == 32) {
    matvec_linear_tiles<Slot, Group, 32>(b, row_begin, row_end, true);
  } else if (Group == 64 && units == 64) {
    matvec_linear_tiles<Slot, Group, 64>(b, row_begin, row_end, true);
  } else {
    matvec_linear_tiles<Slot, Group, 0>(b, row_begin, row_end, true);
  }
  const std::int64_t end = row_begin + (row_end - row_begin) / kTileRows * kTileRows;
  if (end < row_end) matvec_panels<Slot>(b, end, row_end);
}

// Whole units, at least a piece of them in a row, 16-bit scales or e8m0.
template <int Slot, int Group>
MOEFLUX_MATH bool is_linear(const MatMulBlock& b) noexcept {
  using L = Linear<Slot, Group, 0>;
  const MatrixView& w = b.w;
  return w.cols % L::kCodes == 0 && w.cols / L::kCodes >= L::kPiece && w.row_bytes() == static_cast<std::uint64_t>(w.cols / 2) &&
         (Slot == 3 || w.format.scale_dtype != DType::F32);
}

template <int Slot>
void matmul_nibbles(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if (b.n_tokens == 1 && b.xq.tile == 1) {
    if (b.w.format.group == 32 && is_linear<Slot, 32>(b)) return matvec_linear<Slot, 32>(b, row_begin, row_end);
    if constexpr (Slot == 6) {
      if (b.w.format.group == 64 && is_linear<Slot, 64>(b)) return matvec_linear<Slot, 64>(b, row_begin, row_end);
      if (b.w.format.group == 128 && is_linear<Slot, 128>(b)) return matvec_linear<Slot, 128>(b, row_begin, row_end);
    }
  }
  matmul_panels<Slot>(b, row_begin, row_end);
}

}  // namespace
