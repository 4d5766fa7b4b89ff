#include "session/prefetch_governor.h"

#include <algorithm>

namespace moeflux::session {

void PrefetchGovernor::step_took(std::uint64_t ns) noexcept {
  ++n_[on_ ? 1 : 0];
  if (mode_ != Prefetch::Auto || !useful_) return;
  if (phase_ == Phase::Hold) {
    if (++in_phase_ < hold_) return;
    phase_ = Phase::TryOn;
    in_phase_ = 0;
    on_ = true;
    return;
  }
  times_[in_phase_] = ns;
  if (++in_phase_ < kTrial) return;
  in_phase_ = 0;
  const auto middle = times_.begin() + kSettle + (kTrial - kSettle) / 2;
  std::nth_element(times_.begin() + kSettle, middle, times_.end());
  medians_[on_ ? 1 : 0] = *middle;
  if (phase_ == Phase::TryOn) {
    phase_ = Phase::TryOff;
    on_ = false;
  } else {
    decide();
  }
}

void PrefetchGovernor::decide() noexcept {
  on_ = medians_[1] < medians_[0];
  hold_ = decided_ && on_ == last_choice_ ? std::min(2 * hold_, kLongestHold) : kFirstHold;
  decided_ = true;
  last_choice_ = on_;
  phase_ = Phase::Hold;
}

}  // namespace moeflux::session
