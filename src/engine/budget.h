// Dividing a memory ceiling: what is needed anyway, and how many experts fit into the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <moeflux/options.h>
#include <moeflux/plan.h>

#include "model/binder.h"
#include "model/spec.h"

namespace moeflux::engine {

// ram_bytes of the options, or the default of this machine.
std::uint64_t memory_ceiling(const EngineOptions& options);

// `other_bytes`: what the process takes besides the trunk, measured or estimated. The ceiling may turn out too low: then
// split.ram_bytes < split.least_bytes and there are no slots. Where the options leave the chunk open the largest is taken
// that costs little of the ceiling. InvalidArgument as session_sizes.
MemorySplit split_memory(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, std::uint64_t other_bytes);

// OutOfMemory, with the split and the least that would do.
void require_enough(const MemorySplit& split);

// "4.9 GB: trunk 1.2 GB, session 0.1 GB (ctx 576, chunk 512), 1848 of 10240 experts 3.3 GB, other 0.1 GB".
std::string describe(const MemorySplit& split);

// The largest top-k of any layer, and all experts.
std::size_t most_top_k(const model::ModelSpec& spec);
std::size_t count_experts(const model::Binding& binding);

// What no plan names of main memory: heap fragmentation, thread stacks, the reader's tables.
inline constexpr std::uint64_t kHostMargin = 32u << 20;

}  // namespace moeflux::engine
