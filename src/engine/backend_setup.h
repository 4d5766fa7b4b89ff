// Choosing the backend, and the expert store that goes with a device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <moeflux/options.h>

#include "backend/backend.h"
#include "engine/expert_setup.h"
#include "format/model_folder.h"
#include "model/binder.h"
#include "model/spec.h"

namespace moeflux::engine {

struct BackendSetup {
  std::unique_ptr<backend::Backend> backend;
  bool on_device = false;
  std::uint64_t device_bytes = 0;  // of its memory that may be taken, measured before anything was
  std::string note;  // why Auto chose the CPU; may be empty
};

// Auto takes a device when its memory holds at least the trunk, a session and one token's experts. Cuda throws where it cannot:
// Unsupported without a device or driver, OutOfMemory naming what is needed and what there is. A backend's host memory is of
// `host_memory`, which outlives it.
BackendSetup make_backend(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, Allocator& host_memory);

// What computes experts in main memory beside a device.
std::unique_ptr<backend::Backend> make_processor(const EngineOptions& options, Allocator& host_memory);

// Of a device's free memory, what the options allow.
std::uint64_t device_ceiling(const EngineOptions& options, std::uint64_t free_bytes);
// Why Auto leaves a device alone that would be used like that; empty: it takes it.
std::string why_not_the_device(const MemorySplit& split);

// How a model would be spread over device_bytes of a device's memory and main memory: all on the device where that fits, else in tiers,
// which may turn out too little for both (require_enough_tiers). `other_bytes`: what the process takes of main memory besides.
MemorySplit split_for_device(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, std::uint64_t device_bytes,
                             std::uint64_t other_bytes);

// All experts in the device's memory where they fit into device_bytes, else in tiers.
ExpertSetup make_device_experts(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding,
                                const format::ModelFolder& folder, backend::Backend& backend, std::uint64_t device_bytes);

}  // namespace moeflux::engine
