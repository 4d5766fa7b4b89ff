// Reading memory as fast as it comes, for probes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moeflux::engine {

// The sum of the words: what keeps a compiler from leaving the reads out. Several independent sums, so that loads and not
// one chain of additions are the limit. n_words is a multiple of 16.
inline std::uint64_t sum_words(const std::uint64_t* words, std::size_t n_words) noexcept {
  constexpr std::size_t kLanes = 16;
  std::array<std::uint64_t, kLanes> lanes{};
  for (std::size_t i = 0; i < n_words; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] += words[i + j];
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : lanes) sum += lane;
  return sum;
}

}  // namespace moeflux::engine
