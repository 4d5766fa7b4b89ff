#include "store/slot_scores.h"

#include <cmath>

namespace moeflux::store {

void SlotScores::at_layer(LayerIdx layer) noexcept {
  if (raw(layer) <= last_layer_) {
    unit_ *= std::exp2(1.0 / kHalfLife);
    if (unit_ > 1e200) {  // long before a double ends
      for (double& s : score_) s /= unit_;
      unit_ = 1.0;
    }
  }
  last_layer_ = raw(layer);
}

void SlotScores::use(std::uint32_t key, float weight) noexcept { score_[key] += unit_ * static_cast<double>(weight); }

}  // namespace moeflux::store
