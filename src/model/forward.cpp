// The model on one page: embed; for each layer mix and feed forward; norm. The head is asked for apart.
#include "model/model.h"

namespace moeflux::model {

TensorView Model::forward(Context& c, std::span<const std::int32_t> tokens, std::int64_t pos0, std::span<const LayerState> state,
                          const ForwardHooks& hooks) const {
  const auto n = static_cast<std::int64_t>(tokens.size());
  c.arena.release(0);
  const TensorView h = c.arena.f32({n, spec_.hidden_dim});  // the residual stream
  const TensorView x = c.arena.f32({n, spec_.hidden_dim});  // its norm: what blocks read

  c.run(backend::Embed{tokens, weights_.embed, h});
  if (hooks.hidden) hooks.hidden(0, h);
  for (std::size_t l = 0; l < spec_.layers.size(); ++l) {
    if (hooks.before_layer) hooks.before_layer();
    const LayerWeights& w = weights_.layers[l];
    const std::size_t mark = c.arena.mark();

    c.run(backend::RmsNorm{h, w.input_norm, x, spec_.norm_eps});
    const TensorView mixed = mix(c, l, x, state[l], pos0);
    c.run(backend::AddRmsNorm{h, mixed, w.post_norm, x, spec_.norm_eps});
    c.arena.release(mark);

    feed_forward(c, l, x, h);
    c.arena.release(mark);
    if (hooks.hidden && l + 1 < spec_.layers.size()) hooks.hidden(static_cast<std::int64_t>(l) + 1, h);
  }
  c.run(backend::RmsNorm{h, weights_.final_norm, x, spec_.norm_eps});
  if (hooks.hidden) hooks.hidden(static_cast<std::int64_t>(spec_.layers.size()), x);
  return x;
}

TensorView Model::mix(Context& c, std::size_t l, const TensorView& x, const LayerState& state, std::int64_t pos0) const {
  const auto& mixer = weights_.layers[l].mixer;
  if (const auto* gqa = std::get_if<GqaSpec>(&spec_.layers[l].mixer))
    return attention_gqa(c, *gqa, std::get<GqaWeights>(mixer), ropes_[l], state, x, pos0, spec_.norm_eps);
  if (const auto* mla = std::get_if<MlaSpec>(&spec_.layers[l].mixer))
    return attention_mla(c, *mla, std::get<MlaWeights>(mixer), ropes_[l], state, x, pos0);
  return delta_net(c, std::get<GatedDeltaSpec>(spec_.layers[l].mixer), std::get<GatedDeltaWeights>(mixer), state, x, spec_.norm_eps);
}

void Model::feed_forward(Context& c, std::size_t l, const TensorView& x, const TensorView& h) const {
  const auto& ffn = weights_.layers[l].ffn;
  if (const auto* moe = std::get_if<MoeSpec>(&spec_.layers[l].ffn))
    moe_ffn(c, LayerIdx(static_cast<std::int32_t>(l)), *moe, std::get<MoeWeights>(ffn), x, h, next_router(l));
  else
    dense_ffn(c, std::get<FfnWeights>(ffn), x, h);
}

NextRouter Model::next_router(std::size_t l) const {
  const std::size_t next = l + 1;
  if (next >= spec_.layers.size()) return {};
  const auto* moe = std::get_if<MoeSpec>(&spec_.layers[next].ffn);
  if (moe == nullptr) return {};
  const LayerWeights& w = weights_.layers[next];
  return {LayerIdx(static_cast<std::int32_t>(next)), moe, &std::get<MoeWeights>(w.ffn), w.post_norm, spec_.norm_eps};
}

void Model::logits(Context& c, const TensorView& hidden, const TensorView& out) const {
  head(c, spec_.tied_head ? weights_.embed : weights_.head, hidden, out);
}

}  // namespace moeflux::model
