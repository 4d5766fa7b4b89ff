// fast matmul for one or two tokens, any format: 16 rows at a time, all of a group's products summed to one integer per row and
// lane.

namespace {

// Sixteen rows are too many streams for the hardware to run ahead of; the tiles of a matrix follow each other
// in memory, so the kernel asks for its bytes this far ahead, into the second-level cache: the first has too
// few requests in flight. (9 GB/s a core into the first level, 17 into the second; 4 KiB ahead 11, 16 or 64
// KiB 17.) Never less than a tile: its last row is needed when its first one is.
inline constexpr std::uint64_t kAhead = 16 << 10;

// Four registers of partial sums -> per 128-bit quarter the four sums of that quarter, in row order.
MOEFLUX_MATH __m512i add_across4(__m512i a, __m512i b, __m512i c, __m512i d) noexcept {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// The same for sums of eight products of 4-bit codes: two of them fit into 16 bits (2 * 8 * 15 * 127 < 32768), so packing and
// adding neighbours does it in six instructions.
MOEFLUX_MATH __m512i add_across4_small(__m512i a, __m512i b, __m512i c, __m512i d) noexcept {
  const __m512i one = _mm512_set1_epi16(1);
  const __m512i ab = _mm512_madd_epi16(_mm512_packs_epi32(a, b), one);
  const __m512i cd = _mm512_madd_epi16(_mm512_packs_epi32(c, d), one);
  return _mm512_madd_epi16(_mm512_packs_epi32(ab, cd), one);
}

// q[i]: rows 4i .. 4i + 3, one quarter per quarter of the unit. Out: one register of 16 rows per group of
// `Lanes` double words; returns how many.
template <int Lanes>
MOEFLUX_MATH void gather_groups(const __m512i (&q)[4], __m512i (&out)[4]) noexcept {
  if constexpr (Lanes == 4) {
    const __m512i a = _mm512_shuffle_i32x4(q[0], q[1], 0x44), b = _mm512_shuffle_i32x4(q[0], q[1], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(q[2], q[3], 0x44), d = _mm512_shuffle_i32x4(q[2], q[3], 0xee);
    out[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    out[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    out[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    out[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
  } else {
    const __m512i t =
        _mm512_add_epi32(_mm512_shuffle_i32x4(q[0], q[1], 0x88), _mm512_shuffle_i32x4(q[0], q[1], 0xdd));
    const __m512i u =
        _mm512_add_epi32(_mm512_shuffle_i32x4(q[2], q[3], 0x88), _mm512_shuffle_i32x4(q[2], q[3], 0xdd));
    out[0] = _mm512_shuffle_i32x4(t, u, 0x88);
    out[1] = _mm512_shuffle_i32x4(t, u, 0xdd);
    if constexpr (Lanes == 16) out[0] = _mm512_add_epi32(out[0], out[1]);
  }
}

// Partial sums of one row over one unit; `n` codes of it exist.
template <int Slot, bool Whole>
MOEFLUX_MATH __m512i unit_dot(const std::uint8_t* codes, int n, __m512i x0, __m512i x1,
                              __m512i acc) noexcept {
  if constexpr (kNibbles<Slot>) {
    const __m512i v =
        Whole ? load512(codes) : _mm512_maskz_loadu_epi8((std::uint64_t{1} << (n / 2)) - 1, codes);
    acc = _mm512_dpbusd_epi32(acc, low_codes<Slot>(v), x0);
    return _mm512_dpbusd_epi32(acc, high_codes<Slot>(v), x1);
  } else {
    return _mm512_dpbusd_epi32(acc, unpack64<kBits<Slot>>(codes, Whole ? 64 : n), x0);
  }
}

struct Activation {
  const std::int8_t* x8;
  const float* d;
  const std::int32_t* sx;
};

// x8 of one unit as the kernels want it: the halves that meet low and high nibbles, or all of it.
template <int Slot, bool Whole>
MOEFLUX_MATH void load_x(const std::int8_t* x8, int n, __m512i& x0, __m512i& x1) noexcept {
  if constexpr (kNibbles<Slot>) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const int rest = n > 64 ? n - 64 : 0;
    const __m512i a =
        Whole || n >= 64 ? load512(x8) : _mm512_maskz_loadu_epi8((std::uint64_t{1} << n) - 1, x8);
    const __m512i b =
        Whole ? load512(x8 + 64) : _mm512_maskz_loadu_epi8((std::uint64_t{1} << rest) - 1, x8 + 64);
    x0 = _mm512_permutex2var_epi32(a, even, b);
    x1 = _mm512_permutex2var_epi32(a, odd, b);
  } else {
    x0 = Whole ? load512(x8) : _mm512_maskz_loadu_epi8((std::uint64_t{1} << n) - 1, x8);
    x1 = x0;
  }
}

// acc = fma(idot, s * d, acc), then fma(sx, b * d, acc), for 16 rows.
template <int Slot>
MOEFLUX_MATH __m512 add_group(__m512 acc, __m512i idot, const float* s, const float* b, float d,
                              std::int32_t sx) noexcept {
  const __m512 dv = _mm512_set1_ps(d);
  if constexpr (Slot == 3) {
    idot = _mm512_sub_epi32(idot, _mm512_set1_epi32(kE2m1Offset * sx));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(idot), _mm512_mul_ps(_mm512_load_ps(s), dv), acc);
  } else {
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(idot), _mm512_mul_ps(_mm512_load_ps(s), dv), acc);
    return _mm512_fmadd_ps(_mm512_set1_ps(static_cast<float>(sx)), _mm512_mul_ps(_mm512_load_ps(b), dv), acc);
  }
}

// The unit of 16 rows at offset `at`: sums into q, four rows each. `ahead` runs through the bytes to come.
template <int Slot, bool Whole>
MOEFLUX_MATH void tile_unit(const std::uint8_t* const (&row)[kTileRows], std::uint64_t at, const char*& ahead,
                            int n, const std::int8_t* x8, __m512i (&q)[4]) noexcept {
  constexpr int kUnitBytes = kNibbles<Slot> ? 64 : 8 * kBits<Slot>;
  __m512i x0, x1;
  load_x<Slot, Whole>(x8, n, x0, x1);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i p[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const std::uint8_t* codes = row[4 * i + k] + at;
      _mm_prefetch(ahead + (4 * i + k) * kUnitBytes, _MM_HINT_T1);
      p[k] = unit_dot<Slot, Whole>(codes, n, x0, x1, _mm512_setzero_si512());
    }
    q[i] = add_across4(p[0], p[1], p[2], p[3]);
  }
  ahead += 16 * kUnitBytes;
}

// Groups of `Group` codes, a chunk of groups [0, n_groups) from column 0 of the given pointers.
template <int Slot, int Group>
MOEFLUX_MATH __m512 tile_chunk(const std::uint8_t* const (&row)[kTileRows], const char*& ahead, int n_groups,
                               const Activation& x, const float* scales, const float* biases,
                               __m512 acc) noexcept {
  constexpr int kWidth = kUnit<Slot>;
  const auto put = [&](__m512 a, __m512i idot, int g) noexcept {
    return add_group<Slot>(a, idot, scales + g * kTileRows, biases + g * kTileRows, x.d[g], x.sx[g]);
  };
  if constexpr (Group > kWidth) {  // 128 codes in two units
    for (int g = 0; g < n_groups; ++g) {
      __m512i q[4], r[4], out[4];
      const auto at = static_cast<std::uint64_t>(g) * (Group / 8 * kBits<Slot>);
      tile_unit<Slot, true>(row, at, ahead, kWidth, x.x8 + g * Group, q);
      tile_unit<Slot, true>(row, at + kWidth / 8 * kBits<Slot>, ahead, kWidth, x.x8 + g * Group + kWidth, r);
      for (int i = 0; i < 4; ++i) q[i] = _mm512_add_epi32(q[i], r[i]);
      gather_groups<16>(q, out);
      acc = put(acc, out[0], g);
    }
  } else {
    constexpr int kPerUnit = kWidth / Group;
    constexpr std::uint64_t kUnitBytes = kNibbles<Slot> ? 64 : 8 * kBits<Slot>;
    int g = 0;
    std::uint64_t at = 0;
    for (; g + kPerUnit <= n_groups; g += kPerUnit, at += kUnitBytes) {
      __m512i q[4], out[4];
      tile_unit<Slot, true>(row, at, ahead, kWidth, x.x8 + g * Group, q);
      gather_groups<16 / kPerUnit>(q, out);
#pragma GCC unroll 4
      for (int i = 0; i < kPerUnit; ++i) acc = put(acc, out[i], g + i);
    }
    if (g < n_groups) {
      __m512i q[4], out[4];
      tile_unit<Slot, false>(row, at, ahead, (n_groups - g) * Group, x.x8 + g * Group, q);
      gather_groups<16 / kPerUnit>(q, out);
      for (int i = 0; g + i < n_groups; ++i) acc = put(acc, out[i], g + i);
    }
  }
  return acc;
}

MOEFLUX_MATH void store_rows(const MatMulBlock& b, std::int64_t t, std::int64_t row, std::int64_t n,
                             __m512 acc) noexcept {
  const __mmask16 mask = n >= 16 ? static_cast<__mmask16>(0xffff) : first(n);
  if (b.bias != nullptr) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, b.bias + row));
  _mm512_mask_storeu_ps(y_row(b, t) + row, mask, acc);
}

template <int Slot, int Group>
void matvec_rows(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const MatrixView& w = b.w;
  const std::int64_t n_groups = w.cols / Group;
  const std::uint64_t row_bytes = w.row_bytes(), scale_bytes = w.scale_row_bytes();
  const std::uint64_t distance = kTileRows * row_bytes > kAhead ? kTileRows * row_bytes : kAhead;
  alignas(64) float scales[kChunkGroups * kTileRows], biases[kChunkGroups * kTileRows];
  for (std::int64_t r = row_begin; r < row_end; r += kTileRows) {
    const TileRows rows = tile_rows(r, row_end);
    const char* ahead = reinterpret_cast<const char*>(w.data) + rows.offset[0] * row_bytes + distance;
    for (std::uint64_t at = 0; at < kTileRows * scale_bytes; at += 64) {
      const std::uint64_t next = (rows.offset[0] + 2 * kTileRows) * scale_bytes + at;
      _mm_prefetch(reinterpret_cast<const char*>(w.scales + next), _MM_HINT_T1);
      if constexpr (Slot != 3) _mm_prefetch(reinterpret_cast<const char*>(w.biases + next), _MM_HINT_T1);
    }
    for (std::int64_t t = 0; t < b.n_tokens; ++t) {
      __m512 acc = _mm512_setzero_ps();
      for (std::int64_t g = 0; g < n_groups; g += kChunkGroups) {
        const int n = static_cast<int>(n_groups - g < kChunkGroups ? n_groups - g : kChunkGroups);
        load_scales<Slot>(w, rows, g, n, scales, biases, kTileRows);
        const std::uint8_t* row[kTileRows];
        const std::uint64_t at = w.format.row_bytes(static_cast<std::uint64_t>(g * Group));
        for (int i = 0; i < kTileRows; ++i)
          row[i] = reinterpret_cast<const std::uint8_t*>(w.data) + rows.offset[i] * row_bytes + at;
        const Activation x{b.xq.x8 + t * w.cols + g * Group, b.xq.d + t * n_groups + g,
                           b.xq.sx + t * n_groups + g};
        acc = tile_chunk<Slot, Group>(row, ahead, n, x, scales, biases, acc);
      }
      store_rows(b, t, r, row_end - r, acc);
    }
  }
}

}  // namespace
