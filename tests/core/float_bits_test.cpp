#include "core/float_bits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace moeflux {
namespace {

// The value of a small float by its fields.
double by_fields(std::uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = bits >> (exponent_bits + mantissa_bits) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1u));
  const double mantissa = static_cast<double>(bits & ((1u << mantissa_bits) - 1u));
  if (exponent == (1 << exponent_bits) - 1)
    return mantissa == 0.0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  const double fraction = std::ldexp(mantissa, -mantissa_bits) + (exponent == 0 ? 0.0 : 1.0);
  return sign * std::ldexp(fraction, std::max(exponent, 1) - bias);
}

template <class Decode, class Encode>
void all_patterns(int exponent_bits, int mantissa_bits, Decode decode, Encode encode) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const float value = decode(pattern);
    const double want = by_fields(bits, exponent_bits, mantissa_bits);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(decode(encode(value)))) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), want) << bits;
    ASSERT_EQ(std::signbit(value), bits >> 15 != 0) << bits;
    ASSERT_EQ(encode(value), pattern) << bits;
  }
}

TEST(FloatBits, AllPatternsBothWays) {
  all_patterns(8, 7, bf16_to_f32, f32_to_bf16);
  all_patterns(5, 10, f16_to_f32, f32_to_f16);
}

// Halfway between two neighbours the even one wins; one step of f32 to either side decides otherwise.
template <class Decode, class Encode>
void all_ties(std::uint16_t last_finite, Decode decode, Encode encode) {
  for (std::uint16_t low = 0; low < last_finite; ++low) {
    const auto high = static_cast<std::uint16_t>(low + 1);
    const float a = decode(low), b = decode(high);
    const auto middle = static_cast<float>((static_cast<double>(a) + static_cast<double>(b)) / 2);
    ASSERT_EQ(encode(middle), low % 2 == 0 ? low : high) << low;
    ASSERT_EQ(encode(std::nextafter(middle, a)), low);
    ASSERT_EQ(encode(std::nextafter(middle, b)), high);
    ASSERT_EQ(encode(-middle), (low % 2 == 0 ? low : high) | 0x8000);
  }
}

TEST(FloatBits, TiesToEven) {
  all_ties(0x7f7f, bf16_to_f32, f32_to_bf16);
  all_ties(0x7bff, f16_to_f32, f32_to_f16);
}

TEST(FloatBits, OverflowAndUnderflow) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(f32_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-1e30f), 0xfc00);
  EXPECT_EQ(f32_to_f16(inf), 0x7c00);
  EXPECT_EQ(f32_to_f16(0x1p-25f), 0x0000);
  EXPECT_EQ(f32_to_f16(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_EQ(f32_to_f16(-1e-30f), 0x8000);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(f32_to_bf16(-inf), 0xff80);
  // A NaN whose payload lies only in the lower half must not become infinity.
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));
}

}  // namespace
}  // namespace moeflux
