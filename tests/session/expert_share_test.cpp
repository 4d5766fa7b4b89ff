// How many experts the processor takes, by what both take for them.
#include "session/expert_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace moeflux::session {
namespace {

constexpr std::size_t kMost = backend::UnitRunner::kMostShared;

ShareTimes times(double link_first, double link_each, double first, double each) {
  ShareTimes t;
  t.link_first = link_first;
  t.link_each = link_each;
  for (std::size_t n = 1; n <= kMost; ++n) t.processor[n] = first + each * static_cast<double>(n - 1);
  return t;
}

TEST(ChooseShares, NothingOfNothing) {
  EXPECT_EQ(choose_shares(times(6, 35, 10, 10))[0], 0);
  EXPECT_EQ(choose_shares({}), ShareCounts{});  // nothing was measured
}

TEST(ChooseShares, NoneForASlowProcessor) { EXPECT_EQ(choose_shares(times(6, 35, 2000, 2000)), ShareCounts{}); }

TEST(ChooseShares, AllForASlowLink) {
  const ShareCounts c = choose_shares(times(6, 5000, 30, 10));
  for (std::size_t n = 0; n < c.size(); ++n) EXPECT_EQ(c[n], static_cast<std::int32_t>(std::min(n, kMost)));
}

// Both work at once: 30, 40, 50 us for 1, 2, 3 beside 41 for one over the link.
TEST(ChooseShares, BothAtOnce) {
  const ShareCounts c = choose_shares(times(6, 35, 30, 10));
  EXPECT_EQ(c[1], 0);  // not for 6 us: the device would not have it afterwards
  EXPECT_EQ(c[2], 1);
  EXPECT_EQ(c[3], 2);
  EXPECT_EQ(choose_shares(times(6, 35, 10, 10))[1], 1);
}

// Never more than there are, never slower than the device alone, and no other number would cost less.
TEST(ChooseShares, CostsLeast) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> us(1, 100);
  for (int i = 0; i < 2000; ++i) {
    const ShareTimes t = times(us(random), us(random), us(random), us(random));
    const ShareCounts counts = choose_shares(t);
    const auto both = [&](std::size_t n, std::size_t c) {
      return std::max(c == n ? 0.0 : t.link_first + t.link_each * static_cast<double>(n - c), c == 0 ? 0.0 : t.processor[c] + 5.0);
    };
    for (std::size_t n = 1; n < counts.size(); ++n) {
      const auto c = static_cast<std::size_t>(counts[n]);
      ASSERT_LE(c, std::min(n, kMost));
      EXPECT_LE(both(n, c), both(n, 0));
      for (std::size_t other = 0; other <= std::min(n, kMost); ++other) {
        EXPECT_GE(cost_of_share(t, n, other), cost_of_share(t, n, c));
        EXPECT_GE(cost_of_share(t, n, other), both(n, other));
      }
    }
  }
}

}  // namespace
}  // namespace moeflux::session
