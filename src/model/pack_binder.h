// The routed experts of one layer of a pack.
#pragma once

#include <cstdint>

#include "format/model_folder.h"
#include "model/spec.h"
#include "store/expert_record.h"

namespace moeflux::model {

// Every expert is one piece, a record as the index lays it out, with what it must hash to. The folder is a pack. InvalidModel,
// naming the index and the layer, where the index does not fit the config.
store::ExpertLayer bind_packed_experts(const format::ModelFolder& folder, std::int64_t layer, const MoeSpec& moe, std::int64_t hidden_dim);

}  // namespace moeflux::model
