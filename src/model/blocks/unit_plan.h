// What a session keeps of a step in units (backend/units.h) while the model's ops are recorded, and later when a layer's experts are
// missing.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor_view.h"
#include "model/blocks/blocks.h"

namespace moeflux::model {

// A layer with experts in the recording.
struct MoeSite {
  LayerIdx layer{};
  const MoeSpec* spec = nullptr;
};

struct UnitPlan {
  bool recording = false;  // else the step is computed as it comes, and memory is reserved for a recording
  std::vector<MoeSite> sites;
  const std::int32_t* slot_of = nullptr;  // [n_layers, row], the backend's memory
  const std::int32_t* forced = nullptr;   // [n_sites, forced_row], the backend's memory; null: routers choose
  std::int64_t row = 0, forced_row = 0;
  std::int64_t n_lent = 0;  // of a row: slots behind the layer's experts that take what is read from main memory
  std::vector<std::uint8_t> fills_lent;  // by layer: all recordings so far do
  bool shares = false;  // of a row: behind those SlotCheck::kShares numbers, how many experts the host computes
  std::vector<std::uint8_t> takes_share;  // by layer: all recordings so far let the host have it
};

// Brings the experts that a layer has chosen to the device's slots: those of c.moe.wanted, in that order. The lease must live until the
// stream has passed the layer.
store::ExpertLease bring_experts(Context& c, const MoeSite& site, std::span<const std::int32_t> ids);

}  // namespace moeflux::model
