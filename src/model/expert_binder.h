// The routed experts of one layer, whichever of the published layouts they are stored in.
#pragma once

#include <cstdint>

#include "model/family.h"
#include "model/spec.h"
#include "model/tensor_finder.h"
#include "store/expert_record.h"

namespace moeflux::model {

// Stacked ("switch_mlp.gate_proj" [E, ..], quantized or not), fused ("experts.gate_up_proj", halves or in turn) or one tensor per
// expert; the names present decide. In a pack: records. Absent tensors are noted in the finder and give a layer without experts.
store::ExpertLayer bind_experts(TensorFinder& finder, const TensorNames& names, std::int64_t layer, const MoeSpec& moe, std::int64_t hidden_dim);

}  // namespace moeflux::model
