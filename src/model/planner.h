// What a model will take of the machine's memory, before anything is loaded.
#pragma once

#include <cstdint>

#include <moeflux/types.h>

#include "model/binder.h"
#include "model/spec.h"

namespace moeflux::model {

// Rows of logits a session computes together when a caller wants those of every position: the head's rows are decoded once
// for all of them.
inline constexpr std::int64_t kLogitRows = 16;

struct MemoryPlan {
  std::uint64_t trunk = 0;
  std::uint64_t experts = 0;      // as records in memory
  std::uint64_t kv = 0;           // of one sequence at its full context
  std::uint64_t recurrent = 0;    // of one sequence
  std::uint64_t activations = 0;  // of one sequence, a chunk at a time
  std::uint64_t logits = 0;
  std::uint64_t scratch = 0;      // of the backend: gathered rows, intermediates and quantized activations of a chunk

  std::uint64_t engine() const noexcept { return trunk + experts; }
  std::uint64_t session() const noexcept { return kv + recurrent + activations + logits + scratch; }
};

// Checked: sizes that overflow are InvalidModel. ctx and chunk are positive.
MemoryPlan plan_memory(const ModelSpec& spec, const Binding& binding, std::int64_t ctx, std::int64_t chunk, KvType kv);

}  // namespace moeflux::model
