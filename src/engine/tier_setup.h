// Experts in tiers: how a device's memory and main memory are divided, and the store that results.
#pragma once

#include <cstdint>
#include <memory>

#include <moeflux/options.h>
#include <moeflux/plan.h>

#include "core/async_copier.h"
#include "core/buffer.h"
#include "engine/expert_setup.h"
#include "format/model_folder.h"
#include "model/binder.h"
#include "model/spec.h"

namespace moeflux::engine {

// What the planner does not name of device memory: the runtime's own, fragments of allocations, scratch that grows with the routing.
inline constexpr std::uint64_t kDeviceMargin = 512u << 20;

// Trunk, session and some experts on the device, more of them in main memory under the ceiling of the options. `device_bytes`: of
// its memory that may be taken; `other_bytes`: what the process takes of main memory besides. Either may turn out too low: then
// there are no slots there, and require_enough_tiers() throws OutOfMemory with the least that would do. Where the options leave the
// chunk open the largest is taken that costs little of the device.
MemorySplit split_tiers(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, std::uint64_t device_bytes,
                        std::uint64_t other_bytes);
void require_enough_tiers(const MemorySplit& split);

// The memory of a device, or of what plays it in tests.
struct TierMemory {
  Allocator& device;
  Allocator& pinned;
  std::unique_ptr<AsyncCopier> copier;
  bool device_reads_pinned = false;
};

// Reads what both tiers hold when all experts fit into them; else starts empty.
ExpertSetup make_tiered_experts(const EngineOptions& options, const model::Binding& binding, const format::ModelFolder& folder,
                                const MemorySplit& split, TierMemory memory);

}  // namespace moeflux::engine
