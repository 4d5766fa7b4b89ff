#include "session/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "support/expect_error.h"

namespace moeflux::session {
namespace {

const std::vector<float> kLogits{1.0f, 4.0f, 2.0f, 4.0f, -1.0f, 3.0f};

// How often each id is drawn.
std::map<std::int32_t, int> histogram(const SamplingParams& p, int n, std::span<const TokenId> history = {}, std::vector<bool> allowed = {}) {
  Sampler s(p, std::move(allowed));
  std::map<std::int32_t, int> out;
  for (int i = 0; i < n; ++i) ++out[raw(s.sample(kLogits, history))];
  return out;
}

SamplingParams plain() {
  SamplingParams p;
  p.temperature = 1.0;
  p.top_k = 0;
  p.top_p = 1.0;
  p.seed = 3;
  return p;
}

TEST(Sampler, GreedyTakesTheLowerOfEquals) {
  SamplingParams p;
  p.temperature = 0.0;
  EXPECT_EQ(histogram(p, 10), (std::map<std::int32_t, int>{{1, 10}}));
}

TEST(Sampler, FollowsTheSoftmax) {
  const int n = 40000;
  auto h = histogram(plain(), n);
  double sum = 0.0;
  for (float l : kLogits) sum += std::exp(static_cast<double>(l));
  for (std::size_t i = 0; i < kLogits.size(); ++i) {
    const double p = std::exp(static_cast<double>(kLogits[i])) / sum;
    // Five standard deviations of a binomial count.
    EXPECT_NEAR(h[static_cast<std::int32_t>(i)], p * n, 5.0 * std::sqrt(p * (1 - p) * n)) << i;
  }
}

TEST(Sampler, TopK) {
  SamplingParams p = plain();
  p.top_k = 2;
  const auto h = histogram(p, 200);
  EXPECT_EQ(h.size(), 2u);
  EXPECT_TRUE(h.contains(1) && h.contains(3));
  p.top_k = 1;
  EXPECT_EQ(histogram(p, 50), (std::map<std::int32_t, int>{{1, 50}}));
}

TEST(Sampler, TopP) {
  SamplingParams p = plain();
  p.top_p = 0.6;  // the two best hold 0.78 together, one holds 0.39
  const auto h = histogram(p, 300);
  EXPECT_EQ(h.size(), 2u);
  p.top_p = 0.01;
  EXPECT_EQ(histogram(p, 50).size(), 1u);
}

TEST(Sampler, MinP) {
  SamplingParams p = plain();
  p.min_p = 0.3;  // exp(3 - 4) = 0.37 stays, exp(2 - 4) = 0.14 goes
  const auto h = histogram(p, 2000);
  EXPECT_EQ(h.size(), 3u);
  EXPECT_TRUE(h.contains(5));
}

TEST(Sampler, Penalties) {
  SamplingParams p;
  p.temperature = 0.0;
  const std::vector<TokenId> history{TokenId(1), TokenId(1), TokenId(3)};
  p.repeat_penalty = 2.0;  // 4 -> 2: id 5 with 3 wins
  EXPECT_EQ(histogram(p, 1, history).begin()->first, 5);
  p.repeat_penalty = 1.0;
  p.frequency_penalty = 0.4;  // id 1: 3.2, id 3: 3.6
  EXPECT_EQ(histogram(p, 1, history).begin()->first, 3);
  p.frequency_penalty = 0.0;
  p.presence_penalty = 1.5;
  EXPECT_EQ(histogram(p, 1, history).begin()->first, 5);
  p.repeat_last_n = 1;  // only id 3 is penalized
  EXPECT_EQ(histogram(p, 1, history).begin()->first, 1);
  p.repeat_last_n = 0;
  EXPECT_EQ(histogram(p, 1, history).begin()->first, 1);
}

TEST(Sampler, OnlyAllowedIds) {
  const std::vector<bool> allowed{true, false, true, false, true};  // id 5 is beyond the list
  EXPECT_EQ(histogram({.temperature = 0.0}, 1, {}, allowed).begin()->first, 2);
  for (const auto& [id, n] : histogram(plain(), 500, {}, allowed)) EXPECT_TRUE(id == 0 || id == 2 || id == 4);
}

TEST(Sampler, NothingToChooseFrom) {
  const std::vector<float> nan(4, NAN);
  Sampler s(plain(), {});
  test::expect_error([&] { s.sample(nan, {}); }, ErrorCode::Internal, {"4 logits"});
  EXPECT_EQ(raw(argmax(std::vector<float>{NAN, 1.0f, NAN}, {})), 1);
}

TEST(Sampler, BadParameters) {
  const auto with = [](auto change) {
    SamplingParams p;
    change(p);
    return p;
  };
  for (const SamplingParams& p :
       {with([](auto& x) { x.temperature = -1; }), with([](auto& x) { x.temperature = NAN; }), with([](auto& x) { x.top_p = 0; }),
        with([](auto& x) { x.min_p = 1; }), with([](auto& x) { x.repeat_penalty = 0; }), with([](auto& x) { x.frequency_penalty = INFINITY; })})
    test::expect_error([&] { Sampler(p, {}); }, ErrorCode::InvalidArgument, {"cannot be"});
}

}  // namespace
}  // namespace moeflux::session
