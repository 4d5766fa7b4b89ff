#include "core/scalar_math.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace moeflux {
namespace {

// |got - want| in units of the last place of the f32 that `want` lies in.
double ulp_error(float got, long double want) {
  const auto nearest = static_cast<float>(want);
  if (got == nearest && !std::isfinite(got)) return 0.0;
  int exponent = 0;
  std::frexp(want, &exponent);
  const long double ulp = std::ldexp(1.0L, std::max(exponent - 24, -149));
  return static_cast<double>(std::fabs(static_cast<long double>(got) - want) / ulp);
}

// The bounds below are those of core/scalar_math.h.
struct Worst {
  double error = 0.0;
  float at = 0.0f;
  void see(double e, float x) {
    if (e > error) {
      error = e;
      at = x;
    }
  }
};

// Calls f for floats of [lo, hi] (lo > 0), every step-th bit pattern. The steps are primes, so no low bit is
// favoured.
template <class F>
void sweep(float lo, float hi, std::uint32_t step, F&& f) {
  const auto end = std::bit_cast<std::uint32_t>(hi);
  for (std::uint64_t u = std::bit_cast<std::uint32_t>(lo); u <= end; u += step)
    f(std::bit_cast<float>(static_cast<std::uint32_t>(u)));
}

TEST(ScalarMath, ExpError) {
  Worst worst;
  sweep(1e-9f, 88.72f, 211, [&](float x) {
    worst.see(ulp_error(math::exp(x), std::exp(static_cast<long double>(x))), x);
    if (x < 87.33f) worst.see(ulp_error(math::exp(-x), std::exp(static_cast<long double>(-x))), -x);
  });
  EXPECT_LE(worst.error, 1.02) << "at " << worst.at;
  RecordProperty("ulp", std::to_string(worst.error));
}

TEST(ScalarMath, ExpEnds) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(math::exp(0.0f), 1.0f);
  EXPECT_EQ(math::exp(-0.0f), 1.0f);
  EXPECT_EQ(math::exp(-88.0f), 0.0f);
  EXPECT_EQ(math::exp(-inf), 0.0f);
  EXPECT_EQ(math::exp(89.0f), inf);
  EXPECT_EQ(math::exp(inf), inf);
  EXPECT_TRUE(std::isnan(math::exp(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isfinite(math::exp(88.72f)));
  EXPECT_GE(math::exp(-87.33f), std::numeric_limits<float>::min());
}

TEST(ScalarMath, ExpIsMonotonicWhereSoftmaxUsesIt) {
  float last = 0.0f;
  for (int i = -870000; i <= 0; ++i) {
    const float y = math::exp(static_cast<float>(i) * 1e-4f);
    ASSERT_GE(y, last) << i;
    last = y;
  }
  EXPECT_EQ(last, 1.0f);
}

TEST(ScalarMath, SigmoidError) {
  Worst worst;
  sweep(1e-9f, 87.0f, 401, [&](float x) {
    for (const float s : {x, -x})
      worst.see(ulp_error(math::sigmoid(s), 1.0L / (1.0L + std::exp(static_cast<long double>(-s)))), s);
  });
  EXPECT_LE(worst.error, 2.5) << "at " << worst.at;
  EXPECT_EQ(math::sigmoid(0.0f), 0.5f);
  EXPECT_EQ(math::sigmoid(-1000.0f), 0.0f);
  EXPECT_EQ(math::sigmoid(1000.0f), 1.0f);
  RecordProperty("ulp", std::to_string(worst.error));
}

TEST(ScalarMath, Log1pError) {
  Worst worst;
  sweep(1e-30f, 3e9f, 401, [&](float x) {
    worst.see(ulp_error(math::log1p_nonnegative(x), std::log1p(static_cast<long double>(x))), x);
  });
  EXPECT_LE(worst.error, 2.5) << "at " << worst.at;
  EXPECT_EQ(math::log1p_nonnegative(0.0f), 0.0f);
  RecordProperty("ulp", std::to_string(worst.error));
}

TEST(ScalarMath, SoftplusError) {
  Worst worst;
  sweep(1e-9f, 80.0f, 401, [&](float x) {
    for (const float s : {x, -x})
      worst.see(ulp_error(math::softplus(s), std::log1p(std::exp(static_cast<long double>(s)))), s);
  });
  EXPECT_LE(worst.error, 2.9) << "at " << worst.at;
  EXPECT_EQ(math::softplus(25.0f), 25.0f);
  EXPECT_EQ(math::softplus(-200.0f), 0.0f);
  RecordProperty("ulp", std::to_string(worst.error));
}

TEST(ScalarMath, SincosError) {
  Worst sine, cosine;
  const auto see = [&](float x) {
    const math::SinCos got = math::sincos(x);
    sine.see(ulp_error(got.sin, std::sin(static_cast<long double>(x))), x);
    cosine.see(ulp_error(got.cos, std::cos(static_cast<long double>(x))), x);
  };
  sweep(1e-6f, 2e9f, 401, [&](float x) { see(x), see(-x); });
  // Angles of positions: where sine or cosine is near zero the reduction must hold its precision.
  for (int i = 0; i < 1000000; ++i) see(static_cast<float>(i));
  EXPECT_LE(sine.error, 0.51) << "at " << sine.at;
  EXPECT_LE(cosine.error, 0.51) << "at " << cosine.at;
  RecordProperty("ulp", std::to_string(std::max(sine.error, cosine.error)));
}

TEST(ScalarMath, SincosQuadrants) {
  for (int q = -8; q <= 8; ++q) {
    const float x = static_cast<float>(q) * 1.57079637f;
    EXPECT_FLOAT_EQ(math::sincos(x + 0.3f).sin, static_cast<float>(std::sin(static_cast<double>(x + 0.3f))));
    EXPECT_FLOAT_EQ(math::sincos(x + 0.3f).cos, static_cast<float>(std::cos(static_cast<double>(x + 0.3f))));
  }
  EXPECT_EQ(math::sincos(0.0f).sin, 0.0f);
  EXPECT_EQ(math::sincos(0.0f).cos, 1.0f);
}

TEST(ScalarMath, RoundEven) {
  for (const auto& [x, want] : {std::pair{0.5f, 0.0f},
                                {1.5f, 2.0f},
                                {2.5f, 2.0f},
                                {-0.5f, 0.0f},
                                {-1.5f, -2.0f},
                                {126.5f, 126.0f},
                                {126.50001f, 127.0f},
                                {4194303.0f, 4194303.0f}})
    EXPECT_EQ(math::round_even(x), want) << x;
  EXPECT_EQ(math::round_even(2.5), 2.0);
  EXPECT_EQ(math::pow2i(-126), std::numeric_limits<float>::min());
  EXPECT_EQ(math::pow2i(127), 0x1p127f);
}

}  // namespace
}  // namespace moeflux
