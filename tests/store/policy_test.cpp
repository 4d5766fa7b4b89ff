#include "store/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "support/expect_error.h"

namespace moeflux::store {
namespace {

constexpr auto kNothingPinned = [](ExpertKey) { return false; };

ExpertKey key(int layer, int expert) { return {LayerIdx{layer}, ExpertIdx{expert}}; }

void visit(CachePolicy& policy, int layer, std::vector<int> experts, std::span<const float> scores = {}) {
  std::vector<ExpertIdx> ids;
  for (const int e : experts) ids.push_back(ExpertIdx{e});
  policy.on_visit(LayerIdx{layer}, ids, {}, 1, scores);
}

TEST(CachePolicy, KnowsWhatIsIn) {
  const std::vector<std::int64_t> n_experts = {4, 0, 4};
  CachePolicy policy(n_experts);
  EXPECT_EQ(policy.choose_victim(kNothingPinned), std::nullopt);
  policy.insert(key(0, 3));
  policy.insert(key(0, 3));
  policy.insert(key(2, 1));
  EXPECT_EQ(policy.size(), 2u);
  EXPECT_TRUE(policy.contains(key(0, 3)));
  EXPECT_FALSE(policy.contains(key(0, 1)));
  policy.erase(key(0, 1));
  EXPECT_EQ(policy.size(), 2u);
  policy.erase(key(0, 3));
  EXPECT_EQ(policy.choose_victim(kNothingPinned), key(2, 1));
  policy.erase(key(2, 1));
  EXPECT_EQ(policy.size(), 0u);
}

TEST(CachePolicy, KeepsTheFrequentAndTheRecent) {
  const std::vector<std::int64_t> n_experts = {8};
  CachePolicy policy(n_experts);
  for (int e = 0; e < 4; ++e) policy.insert(key(0, e));
  for (int token = 0; token < 20; ++token) visit(policy, 0, {0, token % 5 == 0 ? 1 : 2});
  visit(policy, 0, {0, 3});
  // 0 always, 2 mostly, 3 just now, 1 now and then.
  EXPECT_EQ(policy.choose_victim(kNothingPinned), key(0, 1));
  policy.erase(key(0, 1));
  EXPECT_GT(policy.probability(key(0, 0)), policy.probability(key(0, 2)));
  EXPECT_GT(policy.probability(key(0, 0)), policy.probability(key(0, 3)));
}

TEST(CachePolicy, AmongEqualsTheLayerJustPassedGoes) {
  const std::vector<std::int64_t> n_experts = {2, 2, 2, 2};
  CachePolicy policy(n_experts);
  for (int l = 0; l < 4; ++l) policy.insert(key(l, 0));
  for (int token = 0; token < 2000; ++token)  // until all means have settled
    for (int l = 0; l < 4; ++l) visit(policy, l, {0});
  EXPECT_EQ(policy.choose_victim(kNothingPinned), key(3, 0));
  visit(policy, 0, {0});
  EXPECT_EQ(policy.choose_victim(kNothingPinned), key(0, 0));
  EXPECT_GT(policy.value(key(1, 0)), policy.value(key(2, 0)));
  // A hint for the next layer is worth more than the same confidence further off.
  EXPECT_GT(policy.value(LayerIdx{1}, 0.5), policy.value(LayerIdx{3}, 0.5));
}

TEST(CachePolicy, NeverThePinned) {
  std::mt19937_64 rng(5);
  const std::vector<std::int64_t> n_experts(6, 16);
  CachePolicy policy(n_experts);
  constexpr std::size_t kSlots = 30;
  std::set<std::pair<int, int>> cached;
  for (int token = 0; token < 200; ++token)
    for (int l = 0; l < 6; ++l) {
      std::vector<int> wanted(16);
      for (int e = 0; e < 16; ++e) wanted[static_cast<std::size_t>(e)] = e;
      std::shuffle(wanted.begin(), wanted.end(), rng);
      wanted.resize(1 + rng() % 8);
      visit(policy, l, wanted);
      const int pinned_layer = static_cast<int>(rng() % 6);  // another lease
      const auto pinned = [&](ExpertKey k) {
        return (raw(k.layer) == l &&
                std::find(wanted.begin(), wanted.end(), raw(k.expert)) != wanted.end()) ||
               (raw(k.layer) == pinned_layer && raw(k.expert) < 4);
      };
      for (const int e : wanted) {
        if (policy.contains(key(l, e))) continue;
        if (policy.size() == kSlots) {
          const std::optional<ExpertKey> victim = policy.choose_victim(pinned);
          ASSERT_TRUE(victim.has_value());
          ASSERT_FALSE(pinned(*victim));
          ASSERT_TRUE(policy.contains(*victim));
          // Nothing that may go is worth less.
          for (const auto& [cl, ce] : cached)
            ASSERT_TRUE(pinned(key(cl, ce)) || policy.value(*victim) <= policy.value(key(cl, ce)));
          policy.erase(*victim);
          cached.erase({raw(victim->layer), raw(victim->expert)});
        }
        policy.insert(key(l, e));
        cached.insert({l, e});
      }
      ASSERT_EQ(policy.size(), cached.size());
      ASSERT_LE(policy.size(), kSlots);
    }
  EXPECT_EQ(policy.choose_victim([](ExpertKey) { return true; }), std::nullopt);
}

TEST(CachePolicy, AScanEvictsItself) {
  const std::vector<std::int64_t> n_experts(4, 64);
  CachePolicy policy(n_experts);
  // The working set of a decode: experts 0 to 7 of each layer.
  for (int l = 0; l < 4; ++l)
    for (int e = 0; e < 8; ++e) policy.insert(key(l, e));
  for (int token = 0; token < 50; ++token)
    for (int l = 0; l < 4; ++l) visit(policy, l, {token % 8, (token + 3) % 8});
  for (int e = 60; e < 64; ++e) policy.insert(key(3, e));
  // A prefill of 100 tokens wants every expert of every layer a few times.
  std::vector<ExpertIdx> all;
  for (int e = 0; e < 64; ++e) all.push_back(ExpertIdx{e});
  const std::vector<std::uint32_t> counts(64, 3);
  for (int l = 0; l < 4; ++l) {
    policy.on_visit(LayerIdx{l}, all, counts, 100);
    for (int e = 8; e < 64; ++e) {
      if (policy.contains(key(l, e))) continue;
      const auto victim = policy.choose_victim([&](ExpertKey k) { return k == key(l, e - 1); });
      ASSERT_TRUE(victim.has_value());
      policy.erase(*victim);
      policy.insert(key(l, e));
    }
  }
  int kept = 0;
  for (int l = 0; l < 4; ++l)
    for (int e = 0; e < 8; ++e) kept += policy.contains(key(l, e));
  EXPECT_GE(kept, 24) << "of 32";
}

// Routers whose scores persist: who is nearly chosen now is chosen soon.
double hit_rate(bool with_scores) {
  constexpr int kLayers = 8, kExperts = 64, kTopK = 4;
  std::mt19937_64 rng(11);
  std::normal_distribution<float> noise;
  std::vector<float> logits(kLayers * kExperts);
  const std::vector<std::int64_t> n_experts(kLayers, kExperts);
  CachePolicy policy(n_experts);
  std::size_t hits = 0, total = 0;
  for (int token = 0; token < 400; ++token)
    for (int l = 0; l < kLayers; ++l) {
      std::vector<float> scores(kExperts);
      std::vector<int> order(kExperts);
      float sum = 0;
      for (int e = 0; e < kExperts; ++e) {
        float& z = logits[static_cast<std::size_t>(l * kExperts + e)];
        z = 0.8F * z + 1.2F * noise(rng);
        sum += scores[static_cast<std::size_t>(e)] = std::exp(z);
        order[static_cast<std::size_t>(e)] = e;
      }
      for (float& s : scores) s /= sum;
      std::partial_sort(order.begin(), order.begin() + kTopK, order.end(), [&](int a, int b) {
        return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
      });
      order.resize(kTopK);
      visit(policy, l, order, with_scores ? std::span<const float>(scores) : std::span<const float>());
      for (const int e : order) {
        ++total;
        if (policy.contains(key(l, e))) {
          ++hits;
          continue;
        }
        if (policy.size() == 128) {
          const auto victim = policy.choose_victim([&](ExpertKey k) {
            return raw(k.layer) == l && std::find(order.begin(), order.end(), raw(k.expert)) != order.end();
          });
          policy.erase(*victim);
        }
        policy.insert(key(l, e));
      }
    }
  return static_cast<double>(hits) / static_cast<double>(total);
}

TEST(CachePolicy, ScoresOfTheUnchosenHelp) { EXPECT_GT(hit_rate(true), hit_rate(false) + 0.01); }

TEST(CachePolicy, TooManyExperts) {
  const std::vector<std::int64_t> n_experts = {70000};
  test::expect_error([&] { CachePolicy policy(n_experts); }, ErrorCode::Unsupported, {"70000"});
}

}  // namespace
}  // namespace moeflux::store
