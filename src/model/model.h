// A loaded model: spec and weights. Immutable; sessions share it and bring their own state.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "format/model_folder.h"
#include "model/binder.h"
#include "model/blocks/blocks.h"
#include "model/context.h"
#include "model/spec.h"
#include "model/state.h"
#include "model/tensors.h"
#include "store/trunk_store.h"

namespace moeflux::model {

// Called between ops; may throw (cancellation), and may look at the residual stream.
struct ForwardHooks {
  std::function<void()> before_layer;  // empty: nothing
  // Layer 0: after the embedding; n: after layer n; the last one after the final norm. [T, D]
  std::function<void(std::int64_t layer, const TensorView& hidden)> hidden;
};

class Model {
 public:
  // Reads the trunk. `folder` is needed only here; the backend must outlive the model. `bands`: matrices may be brought into bands; only a
  // backend that wants_bands(), in precision fast, can compute with them.
  Model(ModelSpec spec, const Binding& binding, const format::ModelFolder& folder, backend::Backend& backend, const ProgressSink& progress, bool bands = false);

  const ModelSpec& spec() const noexcept { return spec_; }
  std::uint64_t trunk_bytes() const noexcept { return trunk_.bytes(); }

  // Runs the tokens (host memory, at positions pos0 ..) through all layers, appending to `state` (one entry a layer).
  // Returns the normed hidden states [T, D], in the arena until its next use.
  TensorView forward(Context& c, std::span<const std::int32_t> tokens, std::int64_t pos0, std::span<const LayerState> state,
                     const ForwardHooks& hooks) const;
  // logits [n, V] of n rows of forward()'s result.
  void logits(Context& c, const TensorView& hidden, const TensorView& out) const;

 private:
  TensorView mix(Context& c, std::size_t layer, const TensorView& x, const LayerState& state, std::int64_t pos0) const;
  void feed_forward(Context& c, std::size_t layer, const TensorView& x, const TensorView& h) const;
  NextRouter next_router(std::size_t layer) const;

  ModelSpec spec_;
  store::TrunkStore trunk_;
  ModelWeights weights_;
  std::vector<RopeWeights> ropes_;  // one a layer; empty where nothing rotates
};

// Arena bytes that forward() of up to n_tokens needs.
std::size_t activation_bytes(const ModelSpec& spec, std::int64_t n_tokens);

}  // namespace moeflux::model
