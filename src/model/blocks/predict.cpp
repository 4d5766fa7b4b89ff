// Prefetch: the next layer's router applied to the residual stream of this one says which experts will be wanted there.
#include <algorithm>
#include <cmath>
#include <vector>

#include "model/blocks/blocks.h"

namespace moeflux::model {
namespace {

// How fast the measured recall follows: about the last 256 predictions, a few tokens of all layers.
constexpr double kRecallStep = 1.0 / 256.0;
// An expert of a prompt that is needed with this probability is read before its router has spoken.
constexpr double kWorthScanning = 0.9;
// How many batches of a prompt's experts are read while a mixer computes.
constexpr std::size_t kScanBatches = 3;

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

void announce_scan(Context& c, const NextRouter& next, std::int64_t n_tokens) {
  const double missed = 1.0 - static_cast<double>(next.spec->top_k) / static_cast<double>(next.spec->n_experts);
  const double needed = 1.0 - std::pow(missed, static_cast<double>(n_tokens));
  if (needed < kWorthScanning) return;
  std::vector<ExpertIdx>& first = c.moe.prediction.experts;
  first.clear();
  const std::size_t n = std::min<std::size_t>(static_cast<std::size_t>(next.spec->n_experts), kScanBatches * c.experts.scan_batch());
  for (std::size_t e = 0; e < n; ++e) first.push_back(ExpertIdx(static_cast<std::int32_t>(e)));
  c.experts.hint(next.layer, first, static_cast<float>(needed));
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
