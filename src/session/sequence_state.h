// The memory of one sequence: key/value cache and recurrent state, layer by layer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <moeflux/types.h>

#include "core/buffer.h"
#include "model/spec.h"
#include "model/state.h"

namespace moeflux::session {

class SequenceState {
 public:
  // Allocates everything for `ctx` positions; zeroed. Throws OutOfMemory with the size.
  SequenceState(const model::ModelSpec& spec, std::int64_t ctx, KvType kv, Allocator& allocator, Copier& copier);

  std::span<const model::LayerState> layers() const noexcept { return layers_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  // Back to the empty sequence: recurrent state is zeroed; cache rows are overwritten before they are read.
  void reset();

 private:
  std::uint64_t lay_out(const model::ModelSpec& spec, std::int64_t ctx, KvType kv, std::byte* memory);

  Copier& copier_;
  Buffer memory_;
  std::vector<TensorView> recurrent_;
  std::vector<model::LayerState> layers_;
  std::uint64_t bytes_ = 0;
};

}  // namespace moeflux::session
