#include "model/model.h"

#include <utility>

namespace moeflux::model {
namespace {

struct Loader {
  store::TrunkStore& trunk;
  quant::MatrixView operator()(const store::MatrixSource& s) const { return trunk.load(s); }
  TensorView operator()(const store::VectorSource& s) const { return trunk.load(s); }
};

const RopeSpec* rope_of(const LayerSpec& layer) {
  if (const auto* gqa = std::get_if<GqaSpec>(&layer.mixer)) return &gqa->rope;
  if (const auto* mla = std::get_if<MlaSpec>(&layer.mixer)) return &mla->rope;
  return nullptr;
}

}  // namespace

Model::Model(ModelSpec spec, const Binding& binding, const format::ModelFolder& folder, backend::Backend& backend, const ProgressSink& progress)
    : spec_(std::move(spec)), trunk_(folder, backend.allocator(), backend.copier()) {
  binding.require_complete(folder);
  const Loader load{trunk_};
  const ModelSources& from = binding.sources;
  weights_.embed = load(from.embed);
  weights_.head = load(from.head);
  weights_.final_norm = load(from.final_norm);
  for (std::size_t l = 0; l < spec_.layers.size(); ++l) {
    const auto& source = from.layers[l];
    LayerWeights& w = weights_.layers.emplace_back();
    w.input_norm = load(source.input_norm);
    w.post_norm = load(source.post_norm);
    std::visit([&](const auto& t) { w.mixer = t.map(load); }, source.mixer);
    std::visit([&](const auto& t) { w.ffn = t.map(load); }, source.ffn);
    RopeWeights& rope = ropes_.emplace_back();
    if (const RopeSpec* r = rope_of(spec_.layers[l])) rope = {trunk_.load(std::span<const float>(r->inv_freq)), r->style, r->magnitude};
  }
  const std::uint64_t total = trunk_.bytes();
  trunk_.finish([&](std::uint64_t done) {
    if (progress) progress("trunk", done, total);
  });
}

std::size_t activation_bytes(const ModelSpec& spec, std::int64_t n) {
  Arena counter;
  counter.f32({n, spec.hidden_dim});
  counter.f32({n, spec.hidden_dim});
  const std::size_t mark = counter.mark();
  for (std::size_t l = 0; l < spec.layers.size(); ++l) {
    const LayerSpec& layer = spec.layers[l];
    if (const auto* gqa = std::get_if<GqaSpec>(&layer.mixer))
      GqaScratch(counter, *gqa, n, spec.hidden_dim);
    else if (const auto* mla = std::get_if<MlaSpec>(&layer.mixer))
      MlaScratch(counter, *mla, n, spec.hidden_dim);
    else
      GatedDeltaScratch(counter, std::get<GatedDeltaSpec>(layer.mixer), n, spec.hidden_dim);
    counter.release(mark);
    if (const auto* moe = std::get_if<MoeSpec>(&layer.ffn))
      MoeTensorScratch(counter, *moe, n, spec.hidden_dim);
    else
      DenseScratch(counter, n, spec.hidden_dim);
    if (l + 1 < spec.layers.size())
      if (const auto* next = std::get_if<MoeSpec>(&spec.layers[l + 1].ffn)) PredictScratch(counter, *next, spec.hidden_dim);
    counter.release(mark);
  }
  return counter.peak();
}

}  // namespace moeflux::model
