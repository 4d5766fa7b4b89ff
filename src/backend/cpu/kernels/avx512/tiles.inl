// Building blocks of the integer kernels: codes of 16 rows side by side, one row per lane.
//
// x8 order of this table: inside every eight values 0 2 4 6 1 3 5 7, so that the low nibbles of four packed
// bytes meet four consecutive bytes of x8 and the high nibbles the next four. Sums inside a group are exact
// integers: their order is free.

namespace {

inline constexpr int kTileRows = 16;  // one f32 accumulator per lane
inline constexpr int kChunkGroups =
    32;  // groups whose scales are transposed at a time: 2 KiB each of scales and biases

template <int Slot>
inline constexpr bool kNibbles = Slot == 3 || Slot == 6;
// Codes of a row that one register of packed bytes (nibbles) or of unpacked codes (other widths) holds.
template <int Slot>
inline constexpr int kUnit = kNibbles<Slot> ? 128 : 64;
// e2m1 codes are signed; vpdpbusd wants the weights unsigned: they are shifted by 12 and 12 * sx is taken off
// again.
inline constexpr int kE2m1Offset = 12;

MOEFLUX_MATH __m512i load512(const void* p) noexcept { return _mm512_loadu_si512(p); }

MOEFLUX_MATH __m512i broadcast4(const std::int8_t* p) noexcept {
  std::int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

// 16 x 16 double words, in place.
MOEFLUX_MATH void transpose16(__m512i (&r)[16]) noexcept {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  // r[4q + c]: column c of every quarter (mod 4), rows 4q .. 4q + 3.
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    r[4 * q] = _mm512_unpacklo_epi64(t[4 * q], t[4 * q + 2]);
    r[4 * q + 1] = _mm512_unpackhi_epi64(t[4 * q], t[4 * q + 2]);
    r[4 * q + 2] = _mm512_unpacklo_epi64(t[4 * q + 1], t[4 * q + 3]);
    r[4 * q + 3] = _mm512_unpackhi_epi64(t[4 * q + 1], t[4 * q + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44),
                  b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44),
                  e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
    t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Where the 16 rows of a tile lie; rows past the end repeat the last one and are not stored.
struct TileRows {
  std::uint64_t offset[kTileRows];  // in rows
};

MOEFLUX_MATH TileRows tile_rows(std::int64_t first, std::int64_t end) noexcept {
  TileRows t;
  for (int i = 0; i < kTileRows; ++i)
    t.offset[i] = static_cast<std::uint64_t>(first + i < end ? first + i : end - 1);
  return t;
}

// Scales of groups [g0, g0 + n) of 16 rows as f32: out[g * stride + row]. n <= kChunkGroups.
MOEFLUX_MATH void load_tile_16bit(const std::byte* p, std::uint64_t row_bytes, const TileRows& rows, int n,
                                  bool bf16, float* out, int stride) noexcept {
  const auto mask = static_cast<__mmask32>((std::uint64_t{1} << n) - 1);
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi16(mask, p + rows.offset[i] * row_bytes);
  transpose16(r);
  for (int g = 0; g < n; ++g) {
    const __m512i pair = r[g / 2];
    if (bf16) {
      const __m512i bits = (g & 1) != 0
                               ? _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))
                               : _mm512_slli_epi32(pair, 16);
      _mm512_store_si512(out + g * stride, bits);
    } else {
      const __m512i bits = (g & 1) != 0 ? _mm512_srli_epi32(pair, 16) : pair;
      _mm512_store_ps(out + g * stride, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)));
    }
  }
}

MOEFLUX_MATH void load_tile_f32(const std::byte* p, std::uint64_t row_bytes, const TileRows& rows, int n,
                                float* out, int stride) noexcept {
  for (int g0 = 0; g0 < n; g0 += 16) {
    const __mmask16 mask = first(n - g0 < 16 ? n - g0 : 16);
    __m512i r[16];
    for (int i = 0; i < 16; ++i)
      r[i] = _mm512_maskz_loadu_epi32(mask, p + rows.offset[i] * row_bytes + 4 * g0);
    transpose16(r);
    for (int g = g0; g < n && g < g0 + 16; ++g) _mm512_store_si512(out + g * stride, r[g - g0]);
  }
}

// The lowest byte of every lane, an e8m0, as quant::e8m0_half_to_f32.
MOEFLUX_MATH __m512 e8m0_scales(__m512i bytes) noexcept {
  const __m512i one = _mm512_set1_epi32(1), u = _mm512_and_si512(bytes, _mm512_set1_epi32(255));
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(u, one), 23);
  const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), u);
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmple_epu32_mask(u, one), normal, small));
}

MOEFLUX_MATH void load_tile_e8m0(const std::byte* p, std::uint64_t row_bytes, const TileRows& rows, int n,
                                 float* out, int stride) noexcept {
  const auto mask = static_cast<__mmask64>((std::uint64_t{1} << n) - 1);
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi8(mask, p + rows.offset[i] * row_bytes);
  transpose16(r);
  for (int g = 0; g < n; ++g)
    _mm512_store_ps(out + g * stride, e8m0_scales(_mm512_srl_epi32(r[g / 4], _mm_cvtsi32_si128(8 * (g % 4)))));
}

template <int Slot>
MOEFLUX_MATH void load_scales(const MatrixView& w, const TileRows& rows, std::int64_t g0, int n,
                              float* scales, float* biases, int stride) noexcept {
  const std::uint64_t row_bytes = w.scale_row_bytes();
  if constexpr (Slot == 3) {
    load_tile_e8m0(w.scales + g0, row_bytes, rows, n, scales, stride);
  } else if (w.format.scale_dtype == DType::F32) {
    load_tile_f32(w.scales + 4 * g0, row_bytes, rows, n, scales, stride);
    load_tile_f32(w.biases + 4 * g0, row_bytes, rows, n, biases, stride);
  } else {
    const bool bf16 = w.format.scale_dtype == DType::BF16;
    load_tile_16bit(w.scales + 2 * g0, row_bytes, rows, n, bf16, scales, stride);
    load_tile_16bit(w.biases + 2 * g0, row_bytes, rows, n, bf16, biases, stride);
  }
}

// Unsigned codes of nibbles, low and high.
template <int Slot>
MOEFLUX_MATH __m512i low_codes(__m512i packed) noexcept {
  const __m512i n = _mm512_and_si512(packed, _mm512_set1_epi8(15));
  if constexpr (Slot != 3) return n;
  // kE2m1Twice + kE2m1Offset by nibble.
  const __m128i lut = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(lut), n);
}
template <int Slot>
MOEFLUX_MATH __m512i high_codes(__m512i packed) noexcept {
  return low_codes<Slot>(_mm512_srli_epi16(packed, 4));
}

// 64 codes (or the first n, a multiple of 8) of any width in x8 order; absent ones are 0.
template <int Bits>
MOEFLUX_MATH __m512i unpack64(const std::uint8_t* p, int n) noexcept {
  const int bytes = n / 8 * Bits;
  const __mmask64 mask = bytes >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bytes) - 1;
  const __m512i raw = _mm512_maskz_loadu_epi8(mask, p);
  if constexpr (Bits == 8) {
    return _mm512_shuffle_epi8(raw, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)));
  } else {
    return unpack_codes<Bits>(raw);
  }
}

// The same formula as generic/matmul.inl, x8 in this table's order.
[[maybe_unused]] void quantize_row_tiles(const float* x, std::int64_t cols, std::int64_t group, std::int8_t* x8, float* d,  // not in every table
                        std::int32_t* sx) noexcept {
  const V16 magic = set1(12582912.0f), top = set1(127.0f), bottom = set1(-127.0f);
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  for (std::int64_t g = 0; g < cols / group; ++g) {
    const float* p = x + g * group;
    std::int8_t* q = x8 + g * group;
    V16 m = zero();
    for (std::int64_t i = 0; i < group; i += 16) m = max(abs(load(p + i)), m);
    const float scale = reduce_max(m) / 127.0f;
    d[g] = scale;
    if (!(scale > 0.0f)) {
      std::memset(q, 0, static_cast<std::size_t>(group));
      sx[g] = 0;
      continue;
    }
    const V16 s = set1(scale);
    __m512i sum = _mm512_setzero_si512();
    for (std::int64_t i = 0; i < group; i += 16) {
      const V16 rounded = sub(add(div(load(p + i), s), magic), magic);
      const __m512i v = _mm512_cvtps_epi32(max(min(rounded, top), bottom).a);
      sum = _mm512_add_epi32(sum, v);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q + i), _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(v), order));
    }
    sx[g] = _mm512_reduce_add_epi32(sum);
  }
}

}  // namespace
