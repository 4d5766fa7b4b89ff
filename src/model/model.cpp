#include "model/model.h"

#include <type_traits>
#include <utility>

namespace moeflux::model {
namespace {

struct Loader {
  store::TrunkStore& trunk;
  bool bands;
  quant::MatrixView operator()(const store::MatrixSource& s) const { return trunk.load(s); }
  TensorView operator()(const store::VectorSource& s) const { return trunk.load(s); }
  // All of one of the structs of model/tensors.h.
  template <class Tensors>
  auto all(const Tensors& t) const {
    return t.map([&](const auto& s) {
      if constexpr (std::is_same_v<decltype(s), const store::MatrixSource&>)
        return trunk.load(s, bands && matmul_only(t, s));
      else
        return trunk.load(s);
    });
  }
};

const RopeSpec* rope_of(const LayerSpec& layer) {
  if (const auto* gqa = std::get_if<GqaSpec>(&layer.mixer)) return &gqa->rope;
  if (const auto* mla = std::get_if<MlaSpec>(&layer.mixer)) return &mla->rope;
  return nullptr;
}

}  // namespace

Model::Model(ModelSpec spec, const Binding& binding, const format::ModelFolder& folder, backend::Backend& backend, const ProgressSink& progress, bool bands)
    : spec_(std::move(spec)), trunk_(folder, backend.allocator(), backend.copier()) {
  binding.require_complete(folder);
  const Loader load{trunk_, bands};
  const ModelSources& from = binding.sources;
  weights_.embed = load(from.embed);
  weights_.head = trunk_.load(from.head, bands);
  weights_.final_norm = load(from.final_norm);
  for (std::size_t l = 0; l < spec_.layers.size(); ++l) {
    const auto& source = from.layers[l];
    LayerWeights& w = weights_.layers.emplace_back();
    w.input_norm = load(source.input_norm);
    w.post_norm = load(source.post_norm);
    std::visit([&](const auto& t) { w.mixer = load.all(t); }, source.mixer);
    std::visit([&](const auto& t) { w.ffn = load.all(t); }, source.ffn);
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
