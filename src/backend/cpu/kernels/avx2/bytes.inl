// Products of bytes with AVX2, for generic/panels.inl. vpmaddubsw adds two products in 16 bits and would saturate: two
// products of 127 * 127 fit, so codes of up to 7 bits are exact, and 8-bit ones are taken as 2 * (code >> 1) + (code & 1).

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

template <bool E2m1>
MOEFLUX_MATH __m256i nibbles32(const std::uint8_t* p) noexcept {
  const __m128i v = load128(p);
  const __m256i n = _mm256_and_si256(_mm256_inserti128_si256(_mm256_castsi128_si256(v), _mm_srli_epi16(v, 4), 1), _mm256_set1_epi8(15));
  if constexpr (!E2m1) return n;
  const __m128i lut = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(lut), n);
}

template <bool E2m1>
MOEFLUX_MATH void unpack_nibbles32(const std::uint8_t* p, std::uint8_t* out) noexcept {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), nibbles32<E2m1>(p));
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

MOEFLUX_MATH __m256i broadcast4(const std::int8_t* p) noexcept {
  std::int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

// acc[row] += codes[row] . x over two steps of four columns. Up to 6 bits four products of a row still fit in 16 bits.
template <int Slot>
MOEFLUX_MATH void add_products8(I16& acc, const std::uint8_t* codes, const std::int8_t* x0, const std::int8_t* x1) noexcept {
  const __m256i v0 = broadcast4(x0), v1 = broadcast4(x1);
  if constexpr (Slot != 9) {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(load256(codes), v0), _mm256_maddubs_epi16(load256(codes + 64), v1));
    const __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(load256(codes + 32), v0), _mm256_maddubs_epi16(load256(codes + 96), v1));
    acc.a = _mm256_add_epi32(acc.a, _mm256_madd_epi16(a, one));
    acc.b = _mm256_add_epi32(acc.b, _mm256_madd_epi16(b, one));
  } else {
    acc.a = _mm256_add_epi32(acc.a, _mm256_add_epi32(products<Slot>(load256(codes), v0), products<Slot>(load256(codes + 64), v1)));
    acc.b = _mm256_add_epi32(acc.b, _mm256_add_epi32(products<Slot>(load256(codes + 32), v0), products<Slot>(load256(codes + 96), v1)));
  }
}

template <int Slot>
MOEFLUX_MATH Partial row_dot(const std::uint8_t* codes, const std::int8_t* x8, int n) noexcept {
  if constexpr (Slot == 3 || Slot == 6) {  // at most 4 * 2 * 24 * 127 in 16 bits
    __m256i s = _mm256_maddubs_epi16(nibbles32<Slot == 3>(codes), load256(x8));
    for (int i = 32; i < n; i += 32) s = _mm256_add_epi16(s, _mm256_maddubs_epi16(nibbles32<Slot == 3>(codes + i / 2), load256(x8 + i)));
    return _mm256_madd_epi16(s, _mm256_set1_epi16(1));
  } else {
    __m256i s = products<Slot>(load256(codes), load256(x8));
    for (int i = 32; i < n; i += 32) s = _mm256_add_epi32(s, products<Slot>(load256(codes + i), load256(x8 + i)));
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
