// Prefetch: the next layer's router applied to the residual stream of this one says which experts will be wanted there.
#include <algorithm>

#include "model/blocks/blocks.h"

namespace moeflux::model {
namespace {

// How fast the measured recall follows: about the last 256 predictions, a few tokens of all layers.
constexpr double kRecallStep = 1.0 / 256.0;

}  // namespace

PredictScratch::PredictScratch(Arena& a, const MoeSpec& s, std::int64_t d)
    : x(a.f32({1, d})), logits(a.f32({1, s.n_experts})), ids(a.i32({1, s.top_k})), weights(a.f32({1, s.top_k})) {}

void predict_experts(Context& c, const NextRouter& next, const TensorView& h) {
  const MoeSpec& spec = *next.spec;
  const PredictScratch s(c.arena, spec, h.dim(1));
  c.run(backend::RmsNorm{h, next.norm, s.x, next.norm_eps});
  const backend::MatMulPart router{next.weights->router, next.weights->router_bias, s.logits};
  c.run(backend::MatMul{s.x, {&router, 1}, Precision::Exact});
  const RouterSpec& r = spec.router;
  c.run(backend::Route{s.logits, next.weights->select_bias, s.ids, s.weights, r.score, r.n_groups, r.topk_groups, r.normalize, r.norm_eps, r.scaling});
  c.backend.synchronize(c.stream);

  Prediction& p = c.moe.prediction;
  p.ids.resize(static_cast<std::size_t>(spec.top_k));
  c.backend.copier().to_host(reinterpret_cast<std::byte*>(p.ids.data()), static_cast<const std::byte*>(s.ids.data), p.ids.size() * 4);
  p.layer = next.layer;
  p.experts.clear();
  for (std::int32_t id : p.ids) p.experts.push_back(ExpertIdx(id));  // in rank order: the surest first
  c.experts.hint(next.layer, p.experts, static_cast<float>(p.recall));
}

void judge_prediction(Context& c, LayerIdx layer) {
  Prediction& p = c.moe.prediction;
  if (p.layer != layer || p.ids.empty()) return;
  std::size_t right = 0;
  for (std::int32_t id : p.ids) right += std::find(c.moe.ids.begin(), c.moe.ids.end(), id) != c.moe.ids.end();
  c.counters.predicted += p.ids.size();
  c.counters.predicted_right += right;
  p.recall += kRecallStep * (static_cast<double>(right) / static_cast<double>(p.ids.size()) - p.recall);
  p.ids.clear();
}

}  // namespace moeflux::model
