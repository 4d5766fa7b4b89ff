// Where 32 codes of 2, 3, 5 or 6 bits lie in their 4 * Bits bytes, for instruction sets that pick bytes by a table. A code's bits
// are in two neighbouring bytes; sixteen codes are picked from sixteen bytes at `base`.

namespace {

template <int Bits>
struct Codes32 {
  static constexpr int kBytes = 4 * Bits;
  static constexpr int base(int half) noexcept { return half == 0 || kBytes <= 16 ? 0 : kBytes - 16; }

  // [even codes, odd codes][the first or last sixteen of the 32][code of that kind]
  alignas(32) std::uint8_t pick[2][2][16];  // two bytes each; 0x80: none, zero
  alignas(32) std::uint16_t shift[2][2][8];
  alignas(32) std::uint16_t factor[2][2][8];  // 2^(8 - shift)
  constexpr Codes32() : pick{}, shift{}, factor{} {
    for (int odd = 0; odd < 2; ++odd)
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 8; ++i) {
          const int bit = (16 * half + 2 * i + odd) * Bits, byte = bit / 8;
          pick[odd][half][2 * i] = static_cast<std::uint8_t>(byte - base(half));
          pick[odd][half][2 * i + 1] = byte + 1 < kBytes ? static_cast<std::uint8_t>(byte + 1 - base(half)) : std::uint8_t{0x80};
          shift[odd][half][i] = static_cast<std::uint16_t>(bit % 8);
          factor[odd][half][i] = static_cast<std::uint16_t>(1 << (8 - bit % 8));
        }
  }
};
template <int Bits>
inline constexpr Codes32<Bits> kCodes32{};

}  // namespace
