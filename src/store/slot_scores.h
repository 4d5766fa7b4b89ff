// Which slot to give up: decayed frequency. A use adds its weight to the expert's score; scores halve every kHalfLife
// tokens. The lowest score of what is not pinned goes first, so a prompt that passes once (small weights) recycles its own
// slots and leaves what decoding lives on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <moeflux/types.h>

namespace moeflux::store {

class SlotScores {
 public:
  static constexpr double kHalfLife = 8.0;  // tokens

  SlotScores(std::size_t n_keys, std::size_t n_slots) : score_(n_keys), key_of_(n_slots, kNone) {}

  // Called for every lease: a layer that does not come after the last one starts a new token.
  void at_layer(LayerIdx layer) noexcept;
  void use(std::uint32_t key, float weight) noexcept;
  void place(std::uint32_t slot, std::uint32_t key) noexcept { key_of_[slot] = key; }
  void clear(std::uint32_t slot) noexcept { key_of_[slot] = kNone; }

  // The slot with the lowest score among those for which `may` holds; kNone: there is none.
  template <class F>
  std::uint32_t lowest(F&& may) const noexcept {
    std::uint32_t best = kNone;
    double best_score = 0.0;
    for (std::uint32_t s = 0; s < key_of_.size(); ++s) {
      if (key_of_[s] == kNone || !may(s)) continue;
      const double score = score_[key_of_[s]];
      if (best == kNone || score < best_score) {
        best = s;
        best_score = score;
      }
    }
    return best;
  }
  static constexpr std::uint32_t kNone = UINT32_MAX;

 private:
  std::vector<double> score_;  // in units that grow with time: adding grown weights is decaying everything else
  std::vector<std::uint32_t> key_of_;
  double unit_ = 1.0;
  std::int32_t last_layer_ = -1;
};

}  // namespace moeflux::store
