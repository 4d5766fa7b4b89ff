// Codes out of packed bytes without VBMI (codes_vbmi.inl): bytes are picked within quarters of a register, words are shifted.

namespace {

// Where 64 codes of 2, 3, 5 or 6 bits are found in their 8 * Bits bytes. A quarter of the register takes sixteen of them, which fill 2 * Bits
// bytes; a code's bits are in two neighbouring ones, so every word of the result takes four bytes by two shuffles: shifted to the right
// they give its low byte, shifted to the left the high one.
template <int Bits>
struct UnpackTables {
  alignas(64) std::uint16_t quarter[32];
  alignas(64) std::uint8_t pick[2][64];
  alignas(64) std::uint16_t shift[2][32];
  constexpr UnpackTables() : quarter{}, pick{}, shift{} {
    constexpr int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    for (int i = 0; i < 32; ++i) {
      quarter[i] = static_cast<std::uint16_t>((i / 8 * Bits + i % 8) % 32);
      for (int high = 0; high < 2; ++high) {
        const int at = 2 * (i % 8) + high, bit = (at / 8 * 8 + order[at % 8]) * Bits;
        pick[high][2 * i] = static_cast<std::uint8_t>(bit / 8);
        pick[high][2 * i + 1] = static_cast<std::uint8_t>(bit / 8 + 1 < 2 * Bits ? bit / 8 + 1 : 0x80);
        shift[high][i] = static_cast<std::uint16_t>(high != 0 ? 8 - bit % 8 : bit % 8);
      }
    }
  }
};
template <int Bits>
inline constexpr UnpackTables<Bits> kUnpack{};

// 64 codes of 2, 3, 5 or 6 bits, one a byte, in x8 order.
template <int Bits>
MOEFLUX_MATH __m512i unpack_codes(__m512i raw) noexcept {
  constexpr const UnpackTables<Bits>& t = kUnpack<Bits>;
  constexpr int kMask = (1 << Bits) - 1;
  const __m512i spread = _mm512_permutexvar_epi16(_mm512_load_si512(t.quarter), raw);
  const __m512i low = _mm512_srlv_epi16(_mm512_shuffle_epi8(spread, _mm512_load_si512(t.pick[0])), _mm512_load_si512(t.shift[0]));
  const __m512i high = _mm512_sllv_epi16(_mm512_shuffle_epi8(spread, _mm512_load_si512(t.pick[1])), _mm512_load_si512(t.shift[1]));
  // low & mask | high & mask << 8
  const __m512i high_codes_only = _mm512_and_si512(high, _mm512_set1_epi16(static_cast<short>(kMask << 8)));
  return _mm512_ternarylogic_epi32(high_codes_only, low, _mm512_set1_epi16(kMask), 0xf8);
}

// Nibble l of the sixteen at p in the low bits of lane l; those above it are not cleared.
MOEFLUX_MATH __m512i lane_nibbles(const std::uint8_t* p) noexcept {
  const __m512i words = _mm512_mask_broadcastd_epi32(_mm512_broadcastd_epi32(_mm_loadu_si32(p)), 0xff00, _mm_loadu_si32(p + 4));
  return _mm512_srlv_epi32(words, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
}

// quant::e4m3_to_f32 of the eight magnitudes without an exponent, as bf16: low and high bytes.
struct SmallE4m3 {
  alignas(16) std::uint8_t low[16], high[16];
  constexpr SmallE4m3() : low{}, high{} {
    for (int code = 1; code < 8; ++code) {
      int exponent = 1, fraction = code;
      for (; fraction < 8; --exponent) fraction *= 2;  // until the leading one falls off
      const int bits = (exponent + 120) << 7 | (fraction - 8) << 4;
      low[code] = static_cast<std::uint8_t>(bits & 255);
      high[code] = static_cast<std::uint8_t>(bits >> 8);
    }
  }
};
inline constexpr SmallE4m3 kSmallE4m3{};

// The two bytes of 64 magnitudes as bf16; their signs are ignored.
MOEFLUX_MATH void e4m3_bytes(__m512i codes, __m512i& low, __m512i& high) noexcept {
  const auto table = [](const std::uint8_t* p) { return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p))); };
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi8(127));
  const __mmask64 small = _mm512_cmplt_epu8_mask(magnitude, _mm512_set1_epi8(8)), nan = _mm512_cmpeq_epi8_mask(magnitude, _mm512_set1_epi8(127));
  // With an exponent: magnitude << 4, and 120 more in the exponent of bf16.
  low = _mm512_and_si512(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi8(-16));
  high = _mm512_add_epi8(_mm512_and_si512(_mm512_srli_epi16(magnitude, 4), _mm512_set1_epi8(7)), _mm512_set1_epi8(60));
  low = _mm512_mask_shuffle_epi8(low, small, table(kSmallE4m3.low), magnitude);
  high = _mm512_mask_shuffle_epi8(high, small, table(kSmallE4m3.high), magnitude);
  low = _mm512_mask_mov_epi8(low, nan, _mm512_set1_epi8(static_cast<char>(0xc0)));
  high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(0x7f));
}

}  // namespace
