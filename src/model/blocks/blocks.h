// The blocks a layer is made of. Each runs backend ops on a stream and takes activation memory from the arena; the caller
// releases it. x is the normed input [T, D]; pos0 is the position of its first token.
#pragma once

#include <cstdint>

#include "core/tensor_view.h"
#include "model/context.h"
#include "model/spec.h"
#include "model/state.h"
#include "model/tensors.h"

namespace moeflux::model {

// What rotation needs at run time.
struct RopeWeights {
  TensorView inv_freq;  // [r / 2]
  backend::RopeStyle style = backend::RopeStyle::HalfSplit;
  float magnitude = 1.0f;
};

// Scratch of each block: the same function sizes the arena and hands it out.
struct GqaScratch {
  TensorView q, k, v, heads, y;
  GqaScratch(Arena& arena, const GqaSpec& spec, std::int64_t n_tokens, std::int64_t hidden_dim);
};
struct MlaScratch {
  TensorView q_latent;  // [T, q_rank] or empty
  TensorView q;         // [T, H, nope + rope]
  TensorView kv;        // [T, kv_rank + rope]
  TensorView absorbed;  // [T, H, kv_rank + rope]: queries against the cache
  TensorView latent;    // [T, H, kv_rank]: what attention gives
  TensorView heads;     // [T, H, v_dim]
  TensorView y;
  MlaScratch(Arena& arena, const MlaSpec& spec, std::int64_t n_tokens, std::int64_t hidden_dim);
};
struct GatedDeltaScratch {
  TensorView qkv, conv, z, b, a, decay, beta, heads, y;
  GatedDeltaScratch(Arena& arena, const GatedDeltaSpec& spec, std::int64_t n_tokens, std::int64_t hidden_dim);
};
struct DenseScratch {
  TensorView y;
  DenseScratch(Arena& arena, std::int64_t n_tokens, std::int64_t hidden_dim);
};
struct MoeTensorScratch {
  TensorView logits, ids, weights;
  TensorView all_rows;  // [T * k (+ T), D]: `rows`, then `shared`
  TensorView rows, shared, shared_gate;
  MoeTensorScratch(Arena& arena, const MoeSpec& spec, std::int64_t n_tokens, std::int64_t hidden_dim);
};
struct PredictScratch {
  TensorView x, logits, ids, weights;
  PredictScratch(Arena& arena, const MoeSpec& spec, std::int64_t hidden_dim);
};

// The next layer with experts, seen from the layer before.
struct NextRouter {
  LayerIdx layer{-1};
  const MoeSpec* spec = nullptr;  // null: there is none
  const MoeWeights* weights = nullptr;
  TensorView norm;  // of its feed-forward
  float norm_eps = 0.0f;
};

// Mixers give what is added to the residual stream: [T, D].
TensorView attention_gqa(Context& c, const GqaSpec& spec, const GqaWeights& w, const RopeWeights& rope, const LayerState& state,
                         const TensorView& x, std::int64_t pos0, float norm_eps);
TensorView attention_mla(Context& c, const MlaSpec& spec, const MlaWeights& w, const RopeWeights& rope, const LayerState& state,
                         const TensorView& x, std::int64_t pos0);
TensorView delta_net(Context& c, const GatedDeltaSpec& spec, const GatedDeltaWeights& w, const LayerState& state, const TensorView& x,
                     float norm_eps);

// Feed-forwards add to h themselves.
void dense_ffn(Context& c, const FfnWeights& w, const TensorView& x, const TensorView& h);
// With c.prefetch a single token foretells the experts of `next` while its own are under way; a prompt that will need most of
// them has the first ones read while the next mixer computes.
void moe_ffn(Context& c, LayerIdx layer, const MoeSpec& spec, const MoeWeights& w, const TensorView& x, const TensorView& h, const NextRouter& next);

// Foretells the experts of `next` from the residual stream h [1, D] and hints them to the store. Never changes a result.
void predict_experts(Context& c, const NextRouter& next, const TensorView& h);
// For a prompt of n_tokens: hints the first experts of `next`, in file order, where most will be needed.
void announce_scan(Context& c, const NextRouter& next, std::int64_t n_tokens);
// Compares what was foretold for the layer with c.moe.ids, its choice.
void judge_prediction(Context& c, LayerIdx layer);

// logits [n, V] of n rows of the normed hidden state.
void head(Context& c, const quant::MatrixView& w, const TensorView& x, const TensorView& logits);

}  // namespace moeflux::model
