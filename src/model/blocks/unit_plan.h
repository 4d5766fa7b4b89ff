// What a session keeps of a step in units (backend/units.h) while the model's ops are recorded, and later when a layer's experts are
// missing.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor_view.h"
#include "model/blocks/blocks.h"

namespace moeflux::model {

// A layer with experts in the recording. Views are of the session's arena, which every step uses alike.
struct MoeSite {
  LayerIdx layer{};
  const MoeSpec* spec = nullptr;
  const MoeWeights* weights = nullptr;
  TensorView x, h;
  MoeTensorScratch scratch;
};

struct UnitPlan {
  bool recording = false;  // else the step is computed as it comes, and memory is reserved for a recording
  std::vector<MoeSite> sites;
  const std::int32_t* slot_of = nullptr;  // [n_layers, row], the backend's memory
  const std::int32_t* forced = nullptr;   // [n_sites, forced_row], the backend's memory; null: routers choose
  std::int64_t row = 0, forced_row = 0;
};

// Computes the experts of a layer that has posted this choice, as if the host had routed: what has a slot at once, the rest as it
// lands. The lease must live until the stream has passed. The ops before and behind are those of the recording.
store::ExpertLease run_missed(Context& c, const MoeSite& site, std::span<const std::int32_t> ids);

}  // namespace moeflux::model
