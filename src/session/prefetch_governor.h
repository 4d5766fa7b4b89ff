// Decides, step by step of a decode, whether experts are foretold and read ahead: by measuring whether it pays.
//
// Auto tries a few steps with, a few without, a few more without and a few with: a cache that grows warm meanwhile favours
// neither. It goes on with the faster way and tries again after a while; the while grows as long as the answer stays the
// same. Steps are compared by their medians, so that a single slow one decides nothing. Results never depend on it. One thread; no allocation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <moeflux/options.h>

namespace moeflux::session {

class PrefetchGovernor {
 public:
  // useful: false where everything is in memory; then never, whatever the mode.
  PrefetchGovernor(Prefetch mode, bool useful) noexcept : mode_(mode), useful_(useful), on_(useful && mode != Prefetch::Off) {}

  // Whether the next step shall prefetch.
  bool on() const noexcept { return on_; }
  // A step ended that began with on().
  void step_took(std::uint64_t ns) noexcept;

  // Of all steps so far.
  std::uint64_t steps_on() const noexcept { return n_[1]; }
  std::uint64_t steps_off() const noexcept { return n_[0]; }
  // Medians of the last trial in nanoseconds; 0: not tried yet.
  std::uint64_t median_on() const noexcept { return medians_[1]; }
  std::uint64_t median_off() const noexcept { return medians_[0]; }

 private:
  static constexpr std::size_t kBlocks = 4;        // with, without, without, with
  static constexpr std::size_t kBlockSteps = 5;    // of a block
  static constexpr std::size_t kSettle = 1;        // of them at its start not counted: it lives on what the other side left
  static constexpr std::size_t kCounted = 2 * (kBlockSteps - kSettle);  // of one side
  static constexpr std::uint64_t kFirstHold = 64, kLongestHold = 1024;

  static constexpr bool block_on(std::size_t block) noexcept { return block == 0 || block == 3; }
  void start_trial() noexcept;
  void decide() noexcept;

  Prefetch mode_;
  bool useful_;
  bool on_;
  bool holding_ = false;
  std::size_t block_ = 0, in_block_ = 0;
  std::uint64_t hold_ = kFirstHold, held_ = 0;
  bool decided_ = false, last_choice_ = false;
  std::array<std::array<std::uint64_t, kCounted>, 2> times_{};
  std::array<std::size_t, 2> n_times_{};
  std::array<std::uint64_t, 2> n_{}, medians_{};
};

}  // namespace moeflux::session
