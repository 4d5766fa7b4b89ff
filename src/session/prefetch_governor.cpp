#include "session/prefetch_governor.h"

#include <algorithm>

namespace moeflux::session {

void PrefetchGovernor::step_took(std::uint64_t ns) noexcept {
  const std::size_t side = on_ ? 1 : 0;
  ++n_[side];
  if (mode_ != Prefetch::Auto || !useful_) return;
  if (holding_) {
    if (++held_ >= hold_) start_trial();
    return;
  }
  if (in_block_ >= kSettle) times_[side][n_times_[side]++] = ns;
  if (++in_block_ < kBlockSteps) return;
  in_block_ = 0;
  if (++block_ < kBlocks)
    on_ = block_on(block_);
  else
    decide();
}

void PrefetchGovernor::start_trial() noexcept {
  holding_ = false;
  block_ = in_block_ = 0;
  n_times_ = {};
  on_ = block_on(0);
}

void PrefetchGovernor::decide() noexcept {
  for (std::size_t side : {std::size_t{0}, std::size_t{1}}) {
    const auto middle = times_[side].begin() + kCounted / 2;
    std::nth_element(times_[side].begin(), middle, times_[side].end());
    medians_[side] = *middle;
  }
  on_ = medians_[1] < medians_[0];
  hold_ = decided_ && on_ == last_choice_ ? std::min(2 * hold_, kLongestHold) : kFirstHold;
  decided_ = true;
  last_choice_ = on_;
  holding_ = true;
  held_ = 0;
}

}  // namespace moeflux::session
