#include "core/checked.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace moeflux {
namespace {

constexpr auto kMax = std::numeric_limits<std::uint64_t>::max();
constexpr auto kMaxSigned = std::numeric_limits<std::int64_t>::max();

TEST(Checked, Add) {
  EXPECT_EQ(checked_add<std::uint64_t>(kMax - 1, 1), kMax);
  EXPECT_EQ(checked_add<std::uint64_t>(kMax, 1), std::nullopt);
  EXPECT_EQ(checked_add<std::int64_t>(kMaxSigned, 1), std::nullopt);
  EXPECT_EQ(checked_add<std::int64_t>(std::numeric_limits<std::int64_t>::min(), -1), std::nullopt);
  EXPECT_EQ(checked_add<std::uint8_t>(200, 55), 255);
  EXPECT_EQ(checked_add<std::uint8_t>(200, 56), std::nullopt);
}

TEST(Checked, Mul) {
  EXPECT_EQ(checked_mul<std::uint64_t>(1ull << 32, (1ull << 32) - 1), 0xffffffff00000000ull);
  EXPECT_EQ(checked_mul<std::uint64_t>(1ull << 32, 1ull << 32), std::nullopt);
  EXPECT_EQ(checked_mul<std::int64_t>(std::numeric_limits<std::int64_t>::min(), -1), std::nullopt);
  EXPECT_EQ(checked_mul<std::uint64_t>(0, kMax), 0u);
}

TEST(Checked, FailuresSayWhatWasComputed) {
  EXPECT_EQ(add_or_fail<std::uint64_t>(2, 3, "end"), 5u);
  EXPECT_EQ(mul_or_fail<std::uint64_t>(2, 3, "bytes"), 6u);
  try {
    mul_or_fail<std::uint64_t>(kMax, 2, "bytes of tensor x");
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::InvalidModel);
    EXPECT_THAT(e.what(), testing::HasSubstr("bytes of tensor x"));
    EXPECT_THAT(e.what(), testing::HasSubstr("18446744073709551615 * 2"));
  }
  EXPECT_THROW(add_or_fail<std::uint64_t>(kMax, 1, "end"), Error);
}

TEST(Checked, RoundUp) {
  EXPECT_EQ(round_up(0, 4096), 0u);
  EXPECT_EQ(round_up(1, 4096), 4096u);
  EXPECT_EQ(round_up(4096, 4096), 4096u);
  EXPECT_EQ(round_up(10, 3), 12u);
}

}  // namespace
}  // namespace moeflux
