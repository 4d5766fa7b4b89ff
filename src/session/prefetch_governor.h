// Decides, step by step of a decode, whether experts are foretold and read ahead: by measuring whether it pays.
//
// Auto tries a few steps with and a few without in turn, goes on with the faster way, and tries again after a while; the
// while grows as long as the answer stays the same. Steps are compared by their medians, so that a single slow one decides
// nothing. Results never depend on it. One thread; no allocation.
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
  static constexpr std::size_t kTrial = 9;              // steps of a trial on one side
  static constexpr std::size_t kSettle = 2;             // of them at the start not counted: they live on what the other side left
  static constexpr std::uint64_t kFirstHold = 64, kLongestHold = 1024;
  enum class Phase : std::uint8_t { TryOn, TryOff, Hold };

  void decide() noexcept;

  Prefetch mode_;
  bool useful_;
  bool on_;
  Phase phase_ = Phase::TryOn;
  std::uint64_t in_phase_ = 0;
  std::uint64_t hold_ = kFirstHold;
  bool decided_ = false, last_choice_ = false;
  std::array<std::uint64_t, kTrial> times_{};
  std::array<std::uint64_t, 2> n_{}, medians_{};
};

}  // namespace moeflux::session
