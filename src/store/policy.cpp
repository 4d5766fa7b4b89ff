#include "store/policy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace moeflux::store {
namespace {

// Tokens until half is forgotten, of each running mean: from the last token to the session; and of the
// router's scores.
constexpr std::array kHalfLives{1.0, 3.0, 8.0, 24.0, 128.0, 1.0};
// Before anything is learned. Regression over recorded traces of two models gives this for either.
constexpr std::array kPriorWeights{0.3, 0.0, 0.2, 0.4, 0.0, 0.0, 0.0};
// The prior counts as much as this sum of squared features: it fades with the first tokens.
constexpr double kPriorStrength = 100.0;
// Per token: the fit looks back over some hundred tokens.
constexpr double kForget = 0.99;
// A sample's weight is 1 / (p + this): the variance of a choice is about p, and victims are found among the
// improbable, so these must count.
constexpr double kSampleNoise = 0.05;
// Time to the next visit is counted with this share of a cycle added. Without it the next layer's worst
// expert would outweigh any other's best.
constexpr double kNearness = 0.3;
// Never quite zero: among experts of no probability, the one that was used at all is worth more.
constexpr float kFloor = 1e-6F;

}  // namespace

CachePolicy::CachePolicy(std::span<const std::int64_t> n_experts, std::size_t n_tiers) : n_resident_(n_tiers, 0) {
  std::size_t total = 0, widest = 0;
  for (const std::int64_t n : n_experts) {
    if (n < 0 || n > std::numeric_limits<std::uint16_t>::max())
      fail(ErrorCode::Unsupported, "{} experts in a layer: at most {} can be cached", n,
           std::numeric_limits<std::uint16_t>::max());
    layers_.push_back({.first = total, .n_experts = static_cast<std::uint16_t>(n)});
    total += static_cast<std::size_t>(n);
    widest = std::max(widest, static_cast<std::size_t>(n));
    if (n != 0) ++n_moe_layers_;
  }
  n_moe_layers_ = std::max<std::size_t>(n_moe_layers_, 1);
  features_.assign(total, Features{});
  probability_.assign(total, 0);
  tier_of_.assign(total, kNoTier);
  order_.assign(total * n_tiers, 0);
  n_in_layer_.assign(layers_.size() * n_tiers, 0);
  share_.assign(widest, 0);
  std::copy(kPriorWeights.begin(), kPriorWeights.end(), weights_.begin());
}

void CachePolicy::on_visit(LayerIdx layer_idx, std::span<const ExpertIdx> experts,
                           std::span<const std::uint32_t> counts, std::uint32_t n_tokens,
                           std::span<const float> scores) noexcept {
  current_ = static_cast<std::size_t>(raw(layer_idx));
  const Layer& layer = layers_[current_];
  n_tokens = std::max(n_tokens, 1U);
  std::fill_n(share_.begin(), layer.n_experts, 0.0F);
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const std::uint32_t count = counts.empty() ? 1 : counts[i];
    share_[static_cast<std::size_t>(raw(experts[i]))] =
        std::min(1.0F, static_cast<float>(count) / static_cast<float>(n_tokens));
  }
  learn(layer);
  age(layer, n_tokens, scores);
  for (std::size_t tier = 0; tier < n_resident_.size(); ++tier) sort_residents(current_, tier);
  if (++visits_ % n_moe_layers_ == 0) fit();
}

void CachePolicy::learn(const Layer& layer) noexcept {
  for (std::size_t e = 0; e < layer.n_experts; ++e) {
    const Features& x = features_[layer.first + e];
    // Never seen: nothing to learn from.
    if (x[kEver] == 0.0F) continue;
    const double weight = 1 / (static_cast<double>(probability_[layer.first + e]) + kSampleNoise);
    for (std::size_t i = 0; i < kFeatures; ++i) {
      const double weighted = weight * static_cast<double>(x[i]);
      targets_[i] += weighted * static_cast<double>(share_[e]);
      for (std::size_t j = 0; j <= i; ++j) moments_[i][j] += weighted * static_cast<double>(x[j]);
    }
  }
}

void CachePolicy::age(const Layer& layer, std::uint32_t n_tokens, std::span<const float> scores) noexcept {
  std::array<float, kHalfLives.size()> keep;
  for (std::size_t i = 0; i < keep.size(); ++i)
    keep[i] = static_cast<float>(std::exp2(-static_cast<double>(n_tokens) / kHalfLives[i]));
  Features weights;
  std::transform(weights_.begin(), weights_.end(), weights.begin(),
                 [](double w) { return static_cast<float>(w); });
  for (std::size_t e = 0; e < layer.n_experts; ++e) {
    Features& x = features_[layer.first + e];
    if (share_[e] > 0) x[kEver] = 1;
    float p = weights[kEver] * x[kEver];
    for (std::size_t i = 0; i < keep.size(); ++i) {
      const float now = i != kScore ? share_[e] : (scores.empty() ? 0.0F : scores[e]);
      x[i] = x[i] * keep[i] + now * (1 - keep[i]);
      p += weights[i] * x[i];
    }
    probability_[layer.first + e] = p + kFloor * x[kUseSpans - 1];
  }
}

// Probabilities fall alike, so the order hardly changes: insertion sort is nearly one pass.
void CachePolicy::sort_residents(std::size_t layer, std::size_t tier) noexcept {
  std::uint16_t* const first = order(layer, tier);
  const float* const p = probability_.data() + layers_[layer].first;
  for (std::size_t i = 1; i < n_residents(layer, tier); ++i) {
    const std::uint16_t e = first[i];
    std::size_t at = i;
    for (; at > 0 && p[first[at - 1]] > p[e]; --at) first[at] = first[at - 1];
    first[at] = e;
  }
}

void CachePolicy::insert(ExpertKey key, std::size_t tier) noexcept {
  const std::size_t at = index(key);
  if (tier_of_[at] == tier) return;
  erase(key);
  tier_of_[at] = static_cast<std::uint8_t>(tier);
  ++n_resident_[tier];
  const auto layer = static_cast<std::size_t>(raw(key.layer));
  order(layer, tier)[n_residents(layer, tier)++] = static_cast<std::uint16_t>(raw(key.expert));
  sort_residents(layer, tier);
}

void CachePolicy::erase(ExpertKey key) noexcept {
  const std::size_t at = index(key), tier = tier_of_[at];
  if (tier == kNoTier) return;
  tier_of_[at] = kNoTier;
  --n_resident_[tier];
  const auto layer = static_cast<std::size_t>(raw(key.layer));
  std::uint16_t* const begin = order(layer, tier);
  std::uint16_t* const end = begin + n_residents(layer, tier);
  std::uint16_t* const found = std::find(begin, end, static_cast<std::uint16_t>(raw(key.expert)));
  std::copy(found + 1, end, found);
  --n_residents(layer, tier);
}

double CachePolicy::value(LayerIdx layer, double probability) const noexcept {
  const std::size_t n = layers_.size();
  const std::size_t ahead = (static_cast<std::size_t>(raw(layer)) + n - current_ - 1) % n + 1;
  return probability / (static_cast<double>(ahead) + kNearness * static_cast<double>(n));
}

// Ridge regression towards the prior, by elimination; the matrix is symmetric and positive definite. A use
// can only speak for an expert: the most negative weight is taken out until there is none.
void CachePolicy::fit() noexcept {
  std::array<bool, kFeatures> out{};
  for (std::size_t round = 0; round < kFeatures; ++round) {
    solve(out);
    const auto least = std::min_element(weights_.begin(), weights_.end());
    if (*least >= 0) break;
    out[static_cast<std::size_t>(least - weights_.begin())] = true;
  }
  for (std::size_t i = 0; i < kFeatures; ++i) {
    targets_[i] *= kForget;
    for (std::size_t j = 0; j <= i; ++j) moments_[i][j] *= kForget;
  }
}

void CachePolicy::solve(const std::array<bool, kFeatures>& out) noexcept {
  std::array<std::array<double, kFeatures>, kFeatures> a{};
  std::array<double, kFeatures> y{};
  for (std::size_t i = 0; i < kFeatures; ++i) {
    a[i][i] = 1;
    if (out[i]) continue;
    for (std::size_t j = 0; j < kFeatures; ++j)
      if (!out[j]) a[i][j] = moments_[std::max(i, j)][std::min(i, j)];
    a[i][i] += kPriorStrength;
    y[i] = targets_[i] + kPriorStrength * kPriorWeights[i];
  }
  for (std::size_t i = 0; i < kFeatures; ++i) {
    for (std::size_t j = i + 1; j < kFeatures; ++j) {
      const double factor = a[j][i] / a[i][i];
      for (std::size_t k = i; k < kFeatures; ++k) a[j][k] -= factor * a[i][k];
      y[j] -= factor * y[i];
    }
  }
  for (std::size_t i = kFeatures; i-- > 0;) {
    double sum = y[i];
    for (std::size_t k = i + 1; k < kFeatures; ++k) sum -= a[i][k] * weights_[k];
    weights_[i] = sum / a[i][i];
  }
}

}  // namespace moeflux::store
