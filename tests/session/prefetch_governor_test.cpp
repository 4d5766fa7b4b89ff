#include "session/prefetch_governor.h"

#include <gtest/gtest.h>

namespace moeflux::session {
namespace {

// Steps of a decode whose time depends on what the governor chose; returns the share with prefetch among the last half.
double share_on(PrefetchGovernor& g, std::uint64_t with_ns, std::uint64_t without_ns, int n) {
  int on = 0;
  for (int i = 0; i < n; ++i) {
    const bool now = g.on();
    if (i >= n / 2 && now) ++on;
    g.step_took(now ? with_ns : without_ns);
  }
  return on / (n / 2.0);
}

TEST(PrefetchGovernor, KeepsWhatPaysAndDropsWhatDoesNot) {
  PrefetchGovernor good(Prefetch::Auto, true), bad(Prefetch::Auto, true);
  EXPECT_GT(share_on(good, 80, 100, 2000), 0.95);
  EXPECT_LT(share_on(bad, 100, 80, 2000), 0.05);
  EXPECT_EQ(good.median_on(), 80u);
  EXPECT_EQ(good.median_off(), 100u);
  EXPECT_EQ(good.steps_on() + good.steps_off(), 2000u);
}

TEST(PrefetchGovernor, FollowsAChange) {
  PrefetchGovernor g(Prefetch::Auto, true);
  share_on(g, 80, 100, 500);
  EXPECT_TRUE(g.on());
  EXPECT_LT(share_on(g, 100, 80, 5000), 0.05);
}

TEST(PrefetchGovernor, OneSlowStepDecidesNothing) {
  PrefetchGovernor g(Prefetch::Auto, true);
  for (int i = 0; i < 400; ++i) g.step_took(i % 7 == 0 ? 1'000'000 : g.on() ? 80 : 100);
  EXPECT_GT(g.steps_on(), g.steps_off() * 3);
}

// A cache that warms up makes every step faster than the one before, whatever is done.
TEST(PrefetchGovernor, WarmingUpFavoursNeitherSide) {
  PrefetchGovernor good(Prefetch::Auto, true), bad(Prefetch::Auto, true);
  for (std::uint64_t i = 0; i < 60; ++i) {
    good.step_took(1000 - 5 * i - (good.on() ? 30 : 0));
    bad.step_took(1000 - 5 * i + (bad.on() ? 30 : 0));
  }
  EXPECT_TRUE(good.on());
  EXPECT_FALSE(bad.on());
}

TEST(PrefetchGovernor, ModesAndUselessness) {
  PrefetchGovernor on(Prefetch::On, true), off(Prefetch::Off, true), useless(Prefetch::On, false);
  EXPECT_EQ(share_on(on, 100, 1, 300), 1.0);
  EXPECT_EQ(share_on(off, 1, 100, 300), 0.0);
  EXPECT_EQ(share_on(useless, 1, 100, 300), 0.0);
}

}  // namespace
}  // namespace moeflux::session
