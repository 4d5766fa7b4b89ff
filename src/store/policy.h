// Which expert leaves the cache when another must come in. The same code decides in the engine and in the
// simulator.
//
// The policy estimates for every expert the probability that the next visit of its layer wants it, and evicts
// where that probability per time until the visit is least. Layers are visited in a cycle, so the time is
// known: the expert of a layer just passed is wanted a whole token later, if at all.
//
// The probability is a weighted sum of running means of past use over several spans, from the last token to a
// few hundred, and of the router's recent scores where they are given: scores tell of experts that were
// nearly chosen. The weights are fitted while running to what the routers really choose next, so that a model
// with strong locality and one with fixed favourites each get their own. A scan (a prefill that touches every
// expert once) leaves low probabilities behind and therefore evicts its own experts first.
//
// A cache may have several tiers, such as device memory and main memory: an expert is in one of them at most, all are judged by
// the same values, and a victim is sought in one of them.
//
// Not thread-safe: the store's lock protects it. No allocation after construction. Nothing computed depends
// on it but the time it takes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <moeflux/types.h>

namespace moeflux::store {

struct ExpertKey {
  LayerIdx layer{};
  ExpertIdx expert{};
  friend bool operator==(const ExpertKey&, const ExpertKey&) = default;
};

class CachePolicy {
 public:
  // Routed experts of each layer; 0 for a dense one. At most 255 tiers.
  explicit CachePolicy(std::span<const std::int64_t> n_experts, std::size_t n_tiers = 1);

  // A visit of a layer by n_tokens tokens, before its misses are placed. `experts` are distinct; counts[i]
  // says how many of the tokens chose experts[i], and may be empty for a single token. `scores`, empty or one
  // per expert of the layer: the router's probabilities (a mean over the tokens). The order of visits is the
  // order of layers the policy expects to see again.
  void on_visit(LayerIdx layer, std::span<const ExpertIdx> experts,
                std::span<const std::uint32_t> counts = {}, std::uint32_t n_tokens = 1,
                std::span<const float> scores = {}) noexcept;

  // What is in the cache. Inserting what is in that tier already, or erasing what is in none, does nothing; inserting what is in
  // another tier moves it.
  void insert(ExpertKey key, std::size_t tier = 0) noexcept;
  void erase(ExpertKey key) noexcept;
  bool contains(ExpertKey key) const noexcept { return tier_of_[index(key)] != kNoTier; }
  bool contains(ExpertKey key, std::size_t tier) const noexcept { return tier_of_[index(key)] == tier; }
  std::size_t size(std::size_t tier = 0) const noexcept { return n_resident_[tier]; }

  // The expert in a tier that is worth least and for which `pinned(ExpertKey)` is false; nothing when
  // there is none. The caller erases it. Takes one look at each layer, and one more at each pinned expert on
  // the way.
  template <class Pinned>
  std::optional<ExpertKey> choose_victim(const Pinned& pinned, std::size_t tier = 0) const noexcept {
    std::optional<ExpertKey> victim;
    double least = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      for (const std::uint16_t e : residents(l, tier)) {
        const ExpertKey key{LayerIdx{static_cast<std::int32_t>(l)}, ExpertIdx{e}};
        const double v = value(key);
        if (victim && v >= least) break;  // the layer's least is no less than what we have
        if (pinned(key)) continue;
        victim = key;
        least = v;
        break;
      }
    }
    return victim;
  }

  // What holding an expert is worth: its probability per layer to pass until it is tried. Comparable between
  // experts at one moment only.
  double value(ExpertKey key) const noexcept { return value(key.layer, probability_[index(key)]); }
  // The same for an expert whose probability at the next visit is known better, such as a hint with a
  // confidence. It should come in only when this exceeds the value of the victim.
  double value(LayerIdx layer, double probability) const noexcept;
  double probability(ExpertKey key) const noexcept { return probability_[index(key)]; }

 private:
  // What is known of an expert: running means of its use over several spans, one of the router's scores, and
  // whether it was ever used (the constant of the fit: without it, the longest mean would have to stand for
  // chance).
  static constexpr std::size_t kUseSpans = 5;
  static constexpr std::size_t kScore = kUseSpans;
  static constexpr std::size_t kEver = kScore + 1;
  static constexpr std::size_t kFeatures = kEver + 1;
  using Features = std::array<float, kFeatures>;

  struct Layer {
    std::size_t first = 0;  // of its experts among all
    std::uint16_t n_experts = 0;
  };
  static constexpr std::uint8_t kNoTier = 255;

  std::size_t index(ExpertKey key) const noexcept {
    return layers_[static_cast<std::size_t>(raw(key.layer))].first +
           static_cast<std::size_t>(raw(key.expert));
  }
  // Of a layer in a tier, least probable first.
  std::uint16_t* order(std::size_t layer, std::size_t tier) noexcept { return order_.data() + tier * tier_of_.size() + layers_[layer].first; }
  std::uint16_t& n_residents(std::size_t layer, std::size_t tier) noexcept { return n_in_layer_[tier * layers_.size() + layer]; }
  std::span<const std::uint16_t> residents(std::size_t layer, std::size_t tier) const noexcept {
    return {order_.data() + tier * tier_of_.size() + layers_[layer].first, n_in_layer_[tier * layers_.size() + layer]};
  }
  void learn(const Layer& layer) noexcept;
  void age(const Layer& layer, std::uint32_t n_tokens, std::span<const float> scores) noexcept;
  void sort_residents(std::size_t layer, std::size_t tier) noexcept;
  void fit() noexcept;
  void solve(const std::array<bool, kFeatures>& out) noexcept;  // the weights, those taken out being 0

  std::vector<Layer> layers_;
  // All by index(): the layers' experts one after the other.
  std::vector<Features> features_;
  std::vector<float> probability_;
  std::vector<std::uint8_t> tier_of_;
  std::vector<std::uint16_t> order_;       // of each tier and layer: its residents, least probable first
  std::vector<std::uint16_t> n_in_layer_;  // of each tier and layer
  std::vector<float> share_;          // of the visit at hand, by expert
  std::vector<std::size_t> n_resident_;  // of each tier
  std::size_t n_moe_layers_ = 0;
  std::size_t current_ = 0;  // the layer visited last
  std::size_t visits_ = 0;

  // Sums of a least-squares fit of what was chosen to the features before.
  std::array<std::array<double, kFeatures>, kFeatures> moments_{};
  std::array<double, kFeatures> targets_{};
  std::array<double, kFeatures> weights_{};
};

}  // namespace moeflux::store
