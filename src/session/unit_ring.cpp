#include "session/unit_ring.h"

namespace moeflux::session {

void UnitRing::begin(Device& device) {
  device.launch(2 * begun_ - (begun_ > 0 ? 1 : 0), 2 * begun_);
  ++begun_;
}

void UnitRing::discard() {
  n_discarded_ += 2 * (begun_ - complete_ - 1);
  begun_ = complete_ + 1;
}

bool UnitRing::run(Device& device, Host& host) {
  bool any_missed = false;
  begun_ = complete_ = 0;
  while (complete_ < n_checks_) {
    while (begun_ <= n_checks_ && begun_ < complete_ + window_) begin(device);
    const backend::UnitPost post = device.wait(complete_);
    if (post.missed) {
      any_missed = true;
      window_ = window_after_miss_;
      discard();
      device.resume();
      host.missed(complete_, post);
    } else {
      host.passed(complete_, post);
    }
    ++complete_;
  }
  while (begun_ <= n_checks_) begin(device);
  return !any_missed;
}

}  // namespace moeflux::session
