// Codes out of packed bytes with VBMI: one instruction picks bytes from a whole register, another shifts each by its own count.
// codes_words.inl gives the same without it.

namespace {

// Which byte of the packed stream each byte of the unpacked qwords starts from: qword j takes bytes j * Bits ...
template <int Bits>
struct UnpackTables {
  alignas(64) std::uint8_t gather[64];
  alignas(64) std::uint8_t shift[64];
  constexpr UnpackTables() : gather{}, shift{} {
    constexpr int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    for (int i = 0; i < 64; ++i) {
      gather[i] = static_cast<std::uint8_t>(i / 8 * Bits + i % 8);
      shift[i] = static_cast<std::uint8_t>(Bits * order[i % 8] & 63);
    }
  }
};
template <int Bits>
inline constexpr UnpackTables<Bits> kUnpack{};

// 64 codes of 2, 3, 5 or 6 bits, one a byte, in x8 order.
template <int Bits>
MOEFLUX_MATH __m512i unpack_codes(__m512i raw) noexcept {
  const __m512i spread = _mm512_permutexvar_epi8(_mm512_load_si512(kUnpack<Bits>.gather), raw);
  const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_load_si512(kUnpack<Bits>.shift), spread);
  return _mm512_and_si512(codes, _mm512_set1_epi8((1 << Bits) - 1));
}

struct NibbleShifts {
  alignas(64) std::uint8_t v[64];
  constexpr NibbleShifts() : v{} {
    for (int l = 0; l < 16; ++l) v[4 * l] = static_cast<std::uint8_t>(4 * l);
  }
};
inline constexpr NibbleShifts kNibbleShifts{};

// Nibble l of the sixteen at p in the low bits of lane l; those above it are not cleared.
MOEFLUX_MATH __m512i lane_nibbles(const std::uint8_t* p) noexcept {
  std::int64_t word;
  std::memcpy(&word, p, sizeof word);
  return _mm512_multishift_epi64_epi8(_mm512_load_si512(kNibbleShifts.v), _mm512_set1_epi64(word));
}

struct E4m3Tables {
  alignas(64) std::uint8_t low[128], high[128];  // of quant::e4m3_to_f32 as bf16
  constexpr E4m3Tables() : low{}, high{} {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, fraction = code & 7;
      if (exponent == 0 && fraction != 0) {  // subnormal: shifted until the leading one falls off
        for (exponent = 1; fraction < 8; --exponent) fraction *= 2;
        fraction -= 8;
      }
      const int bits = code == 0x7f ? 0x7fc0 : code == 0 ? 0 : (exponent + 120) << 7 | fraction << 4;
      low[code] = static_cast<std::uint8_t>(bits & 255);
      high[code] = static_cast<std::uint8_t>(bits >> 8);
    }
  }
};
inline constexpr E4m3Tables kE4m3{};

// The two bytes of 64 magnitudes as bf16; their signs are ignored.
MOEFLUX_MATH void e4m3_bytes(__m512i codes, __m512i& low, __m512i& high) noexcept {
  low = _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.low), codes, _mm512_load_si512(kE4m3.low + 64));
  high = _mm512_permutex2var_epi8(_mm512_load_si512(kE4m3.high), codes, _mm512_load_si512(kE4m3.high + 64));
}

}  // namespace
