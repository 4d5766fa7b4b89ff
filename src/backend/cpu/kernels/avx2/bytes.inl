// Products of bytes with AVX2, for generic/panels.inl. vpmaddubsw adds two products in 16 bits and would saturate: two
// products of 127 * 127 fit, so codes of up to 7 bits are exact, and 8-bit ones are taken as 2 * (code >> 1) + (code & 1).
// With MOEFLUX_BYTE_DOTS (AVX-VNNI) one instruction adds four products in 32 bits.

namespace {

template <int Slot>
inline constexpr int kShift = Slot == 3 ? 12 : 0;  // e2m1 codes are signed: -12 .. 12

struct I16 {
  __m256i a, b;
};
using Partial = __m256i;

MOEFLUX_MATH __m256i load256(const void* p) noexcept { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
MOEFLUX_MATH I16 izero() noexcept { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
MOEFLUX_MATH I16 iload(const std::int32_t* p) noexcept { return {load256(p), load256(p + 8)}; }
MOEFLUX_MATH I16 isub(I16 x, std::int32_t c) noexcept {
  const __m256i v = _mm256_set1_epi32(c);
  return {_mm256_sub_epi32(x.a, v), _mm256_sub_epi32(x.b, v)};
}
MOEFLUX_MATH V16 to_f32(I16 x) noexcept { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

MOEFLUX_MATH void order32(const std::uint8_t* in, std::uint8_t* out) noexcept {
  const __m256i halves = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5,
                                          7, 9, 11, 13, 15);
  const __m256i v = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load256(in), halves), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), v);
}

// 32 codes in x8 order, one a byte. AVX2 cannot shift 16-bit lanes by counts of their own: a product moves a code's bits up to the
// same place in every lane.
template <int Bits>
MOEFLUX_MATH __m256i ordered32(const std::uint8_t* p) noexcept {
  using Codes = Codes32<Bits>;
  const auto half = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + Codes::base(i))); };
  __m256i v;
  if constexpr (Codes::kBytes == 8) {
    std::int64_t eight;
    std::memcpy(&eight, p, 8);
    v = _mm256_set1_epi64x(eight);
  } else if constexpr (Codes::kBytes == 12) {
    std::int32_t last;
    std::memcpy(&last, p + 8, 4);
    v = _mm256_broadcastsi128_si256(_mm_insert_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), last, 2));
  } else {
    v = _mm256_inserti128_si256(_mm256_castsi128_si256(half(0)), half(1), 1);
  }
  __m256i words[2];
  for (int odd = 0; odd < 2; ++odd) {
    const __m256i picked = _mm256_shuffle_epi8(v, load256(kCodes32<Bits>.pick[odd]));
    words[odd] = _mm256_srli_epi16(_mm256_mullo_epi16(picked, load256(kCodes32<Bits>.factor[odd])), 8);
  }
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(words[0], words[1]), 0xd8);
  return _mm256_and_si256(bytes, _mm256_set1_epi8((1 << Bits) - 1));
}
template <int Bits>
MOEFLUX_MATH void unpack_ordered32(const std::uint8_t* p, std::uint8_t* out) noexcept {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), ordered32<Bits>(p));
}

// 32 codes in the order of columns. even, odd: every second of them, sixteen each.
MOEFLUX_MATH void interleaved_f32(__m128i even, __m128i odd, V16 (&out)[2]) noexcept {
  const auto widen = [](__m128i x) { return V16{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x)))}; };
  out[0] = widen(_mm_unpacklo_epi8(even, odd));
  out[1] = widen(_mm_unpackhi_epi8(even, odd));
}
template <int Bits>
MOEFLUX_MATH void codes_f32(const std::uint8_t* p, V16 (&out)[2]) noexcept {
  if constexpr (Bits == 4) {
    const __m128i v = load128(p), mask = _mm_set1_epi8(15);
    interleaved_f32(_mm_and_si128(v, mask), _mm_and_si128(_mm_srli_epi16(v, 4), mask), out);
  } else {
    const __m256i v = ordered32<Bits>(p);
    interleaved_f32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1), out);
  }
}
// e2m1: twice the values.
MOEFLUX_MATH void e2m1_f32(const std::uint8_t* p, V16 (&out)[2]) noexcept {
  const __m128i v = load128(p), mask = _mm_set1_epi8(15), twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  interleaved_f32(_mm_shuffle_epi8(twice, _mm_and_si128(v, mask)), _mm_shuffle_epi8(twice, _mm_and_si128(_mm_srli_epi16(v, 4), mask)), out);
}

// e2m1 codes, one a byte -> twice their values, shifted.
MOEFLUX_MATH __m256i e2m1_bytes(__m256i codes) noexcept {
  const __m128i lut = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(lut), codes);
}

template <bool E2m1>
MOEFLUX_MATH __m256i nibbles32(const std::uint8_t* p) noexcept {
  const __m128i v = load128(p);
  const __m256i n = _mm256_and_si256(_mm256_inserti128_si256(_mm256_castsi128_si256(v), _mm_srli_epi16(v, 4), 1), _mm256_set1_epi8(15));
  return E2m1 ? e2m1_bytes(n) : n;
}

// Sums of four products each.
template <int Slot>
MOEFLUX_MATH __m256i products(__m256i codes, __m256i x) noexcept {
  const __m256i one = _mm256_set1_epi16(1);
  if constexpr (Slot != 9) return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), one);
  const __m256i low = _mm256_set1_epi8(1);
  const __m256i half = _mm256_and_si256(_mm256_srli_epi16(codes, 1), _mm256_set1_epi8(127));
  return _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(half, x), _mm256_set1_epi16(2)),
                          _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(codes, low), x), one));
}

// acc + products.
#ifdef MOEFLUX_BYTE_DOTS
inline constexpr bool kByteDots = true;
template <int Slot>
MOEFLUX_MATH __m256i add_products(__m256i acc, __m256i codes, __m256i x) noexcept {
  return _mm256_dpbusd_avx_epi32(acc, codes, x);
}
#else
inline constexpr bool kByteDots = false;
template <int Slot>
MOEFLUX_MATH __m256i add_products(__m256i acc, __m256i codes, __m256i x) noexcept {
  return _mm256_add_epi32(acc, products<Slot>(codes, x));
}
#endif

MOEFLUX_MATH __m256i broadcast4(const std::int8_t* p) noexcept {
  std::int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

// Columns whose products of a row, two by two, fit in 16 bits together; others are added up in 32 from the start.
template <int Slot>
inline constexpr bool kWide = kByteDots || Slot == 9;
template <int Slot>
inline constexpr int kColumns = kWide<Slot> || Slot == 8 ? 8 : Slot == 7 || Slot == 3 ? 16 : 32;
using Part = I16;

template <int Slot>
MOEFLUX_MATH Part begin_part(const I16& acc) noexcept {
  return kWide<Slot> ? acc : izero();
}
// Four columns of sixteen rows.
struct Codes4 {
  __m256i a, b;
};
MOEFLUX_MATH void split_words(const std::uint8_t* p, Codes4& low, Codes4& high) noexcept {
  __m256i a = load256(p), b = load256(p + 32);
  asm volatile("" : "+x"(a), "+x"(b));  // once from memory
  const __m256i mask = _mm256_set1_epi8(15);
  low = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}
template <int Slot>
MOEFLUX_MATH void add_codes4(Part& part, const Codes4& codes, const std::int8_t* x) noexcept {
  const __m256i v = broadcast4(x);
  if constexpr (kWide<Slot>) {
    part.a = add_products<Slot>(part.a, codes.a, v);
    part.b = add_products<Slot>(part.b, codes.b, v);
  } else {
    part.a = _mm256_add_epi16(part.a, _mm256_maddubs_epi16(codes.a, v));
    part.b = _mm256_add_epi16(part.b, _mm256_maddubs_epi16(codes.b, v));
  }
  asm volatile("" : "+x"(part.a), "+x"(part.b));  // now: compilers like all products first, and have no registers for them
}
template <int Slot>
MOEFLUX_MATH void add_columns4(Part& part, const std::uint8_t* codes, const std::int8_t* x) noexcept {
  add_codes4<Slot>(part, {load256(codes), load256(codes + 32)}, x);
}
template <int Slot>
MOEFLUX_MATH void end_part(I16& acc, const Part& part) noexcept {
  const __m256i one = _mm256_set1_epi16(1);
  if constexpr (kWide<Slot>) {
    acc = part;
  } else {
    acc.a = _mm256_add_epi32(acc.a, _mm256_madd_epi16(part.a, one));
    acc.b = _mm256_add_epi32(acc.b, _mm256_madd_epi16(part.b, one));
  }
}

// Scales and biases of sixteen rows, 16 bits each, a row's two in one double word.
MOEFLUX_MATH void band_scales(const std::uint8_t* p, bool bf16, V16& scales, V16& biases) noexcept {
  const __m256i a = load256(p), b = load256(p + 32);
  if (bf16) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    scales = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    biases = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
    return;
  }
  const auto halves = [](__m256i x) {  // eight scales, eight biases
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(x, 16)), 0xd8);
  };
  const __m256i u = halves(a), v = halves(b);
  scales = {_mm256_cvtph_ps(_mm256_castsi256_si128(u)), _mm256_cvtph_ps(_mm256_castsi256_si128(v))};
  biases = {_mm256_cvtph_ps(_mm256_extracti128_si256(u, 1)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
}

// 16 bytes of each of eight rows -> four registers of double words, one row per lane.
MOEFLUX_MATH void columns4(const std::byte* p, std::uint64_t row_bytes, __m256i* out) noexcept {
  __m256i r[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j, p += row_bytes)
    r[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(load128(p)), load128(p + 4 * row_bytes), 1);
  const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
  const __m256i c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
  out[0] = _mm256_unpacklo_epi64(a, c), out[1] = _mm256_unpackhi_epi64(a, c);
  out[2] = _mm256_unpacklo_epi64(b, d), out[3] = _mm256_unpackhi_epi64(b, d);
}

// r: in 0..3 dwords 0..3 of rows i and i + 4, in 4..7 dwords 4..7 -> out[j][i] = dword j of row i, for eight of sixteen rows.
MOEFLUX_MATH void store_transposed(__m256i (&r)[8], std::uint8_t* out) noexcept {
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256i a = _mm256_unpacklo_epi32(r[i], r[i + 1]), b = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    const __m256i c = _mm256_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm256_unpackhi_epi32(r[i + 2], r[i + 3]);
    const __m256i t[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 64 * (i + j)), t[j]);
  }
}
MOEFLUX_MATH __m256i two_rows(const std::uint8_t* low, const std::uint8_t* high) noexcept {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(low)), load128(high), 1);
}

// out[j][i] = the j-th four codes of row i.
MOEFLUX_MATH void transpose32(const std::uint8_t (&block)[16][32], std::uint8_t* out) noexcept {
  for (int half = 0; half < 16; half += 8) {
    __m256i r[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      r[i] = two_rows(block[half + i], block[half + i + 4]);
      r[i + 4] = two_rows(block[half + i] + 16, block[half + i + 4] + 16);
    }
    store_transposed(r, out + 4 * half);
  }
}

// The same of packed nibbles: 16 bytes of each row.
template <bool E2m1>
MOEFLUX_MATH void transpose_nibbles32(const std::uint8_t* const (&rows)[16], std::uint8_t* out) noexcept {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int half = 0; half < 16; half += 8) {
    __m256i r[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i v = two_rows(rows[half + i], rows[half + i + 4]);
      r[i] = _mm256_and_si256(v, mask), r[i + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
      if constexpr (E2m1) r[i] = e2m1_bytes(r[i]), r[i + 4] = e2m1_bytes(r[i + 4]);
    }
    store_transposed(r, out + 4 * half);
  }
}

// Eight bf16 of each of sixteen rows -> out[j][i] = value j of row i.
MOEFLUX_MATH void transpose_bf16(const std::byte* p, std::uint64_t row_bytes, float* out) noexcept {
  for (int half = 0; half < 16; half += 8) {
    __m256i c[4];
    columns4(p + static_cast<std::uint64_t>(half) * row_bytes, row_bytes, c);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      _mm256_storeu_ps(out + 32 * j + half, _mm256_castsi256_ps(_mm256_slli_epi32(c[j], 16)));
      _mm256_storeu_ps(out + 32 * j + 16 + half, _mm256_castsi256_ps(_mm256_and_si256(c[j], _mm256_set1_epi32(static_cast<int>(0xffff0000u)))));
    }
  }
}

template <int Slot>
MOEFLUX_MATH Partial row_dot(const std::uint8_t* codes, const std::int8_t* x8, int n) noexcept {
  if constexpr (kByteDots) {
    constexpr bool kPacked = Slot == 3 || Slot == 6;
    __m256i s = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 32) s = add_products<Slot>(s, kPacked ? nibbles32<Slot == 3>(codes + i / 2) : load256(codes + i), load256(x8 + i));
    return s;
  } else if constexpr (Slot == 3 || Slot == 6) {  // at most 4 * 2 * 24 * 127 in 16 bits
    __m256i s = _mm256_maddubs_epi16(nibbles32<Slot == 3>(codes), load256(x8));
    for (int i = 32; i < n; i += 32) s = _mm256_add_epi16(s, _mm256_maddubs_epi16(nibbles32<Slot == 3>(codes + i / 2), load256(x8 + i)));
    return _mm256_madd_epi16(s, _mm256_set1_epi16(1));
  } else {
    __m256i s = products<Slot>(load256(codes), load256(x8));
    for (int i = 32; i < n; i += 32) s = add_products<Slot>(s, load256(codes + i), load256(x8 + i));
    return s;
  }
}

// The sum of each of eight rows.
MOEFLUX_MATH void reduce8(const Partial (&p)[8], std::int32_t* out) noexcept {
  const __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
  const __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(p[4], p[5]), _mm256_hadd_epi32(p[6], p[7]));
  const __m256i s = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  _mm256_store_si256(reinterpret_cast<__m256i*>(out), s);
}

}  // namespace
