#include "engine/inspect.h"

#include <algorithm>

#include "engine/tokenizer.h"
#include "model/state.h"

namespace moeflux {
namespace engine {
namespace {

void describe_layer(const model::LayerSpec& layer, ModelInfo& info) {
  if (const auto* gqa = std::get_if<model::GqaSpec>(&layer.mixer)) {
    info.mixers.emplace_back("attention");
    info.n_heads = gqa->n_heads;
    info.n_kv_heads = gqa->n_kv_heads;
    info.head_dim = gqa->head_dim;
  } else if (const auto* mla = std::get_if<model::MlaSpec>(&layer.mixer)) {
    info.mixers.emplace_back("latent attention");
    info.n_heads = mla->n_heads;
    info.n_kv_heads = 1;
    info.head_dim = mla->nope_dim + mla->rope_dim;
  } else {
    info.mixers.emplace_back("delta-net");
  }
  info.kv_bytes_per_token_f16 += model::kv_bytes(layer, 1, KvType::F16);
  info.state_bytes += model::recurrent_bytes(layer);
  if (const auto* moe = std::get_if<model::MoeSpec>(&layer.ffn)) {
    ++info.n_moe_layers;
    info.n_experts = moe->n_experts;
    info.top_k = moe->top_k;
    info.expert_dim = moe->inner_dim;
    info.shared_dim = moe->shared_dim;
  }
}

struct ExpertSize {
  std::uint64_t bytes = 0;  // without the padding of its record
  std::uint64_t n_params = 0;
};

ExpertSize size_of_expert(const store::RecordLayout& l) {
  ExpertSize size;
  for (const store::RecordMatrix* m : {&l.gate, &l.up, &l.down}) {
    size.bytes += m->bytes();
    size.n_params += m->n_params();
  }
  for (const store::RecordVector* v : {&l.gate_bias, &l.up_bias, &l.down_bias}) {
    size.bytes += v->bytes();
    size.n_params += static_cast<std::uint64_t>(v->count);
  }
  return size;
}

void count_experts(const model::ModelSpec& spec, const model::Binding& binding, ModelInfo& info) {
  for (std::size_t l = 0; l < spec.layers.size(); ++l) {
    const store::ExpertLayer& experts = binding.experts.layers[l];
    if (experts.n_experts == 0) continue;
    const ExpertSize one = size_of_expert(experts.layout);
    const auto used = static_cast<std::uint64_t>(std::get<model::MoeSpec>(spec.layers[l].ffn).top_k);
    info.bytes_per_expert = std::max(info.bytes_per_expert, one.bytes);
    info.active_expert_bytes_per_token += one.bytes * used;
    info.n_params += one.n_params * static_cast<std::uint64_t>(experts.n_experts);
    info.n_active_params += one.n_params * used;
  }
}

}  // namespace

ModelInfo describe(const format::ModelFolder& folder, const model::ParsedModel& parsed, const model::Binding& binding) {
  const model::ModelSpec& spec = parsed.spec;
  ModelInfo info;
  info.family = spec.family;
  info.model_type = spec.model_type;
  info.path = folder.path();
  info.n_layers = static_cast<std::int64_t>(spec.layers.size());
  info.hidden_dim = spec.hidden_dim;
  info.vocab_size = spec.vocab_size;
  info.max_context = spec.max_context;
  for (const model::LayerSpec& layer : spec.layers) describe_layer(layer, info);
  info.trunk_bytes = binding.trunk_bytes();
  info.trunk_bytes_per_token = info.trunk_bytes;
  info.n_trunk_params = info.n_params = info.n_active_params = binding.trunk_params;
  if (const store::MatrixSource& embedding = binding.sources.embed; !spec.tied_head && embedding.rows > 0) {
    const auto rows = static_cast<std::uint64_t>(embedding.rows);
    info.trunk_bytes_per_token -= embedding.bytes() - embedding.bytes() / rows;
    info.n_active_params -= rows * static_cast<std::uint64_t>(embedding.cols);
  }
  info.expert_bytes = binding.expert_bytes();
  info.trunk_formats = binding.trunk_formats;
  info.expert_formats = binding.expert_formats;
  count_experts(spec, binding, info);
  info.missing = binding.missing;
  for (const auto* list : {&folder.warnings(), &parsed.warnings, &binding.warnings}) info.warnings.insert(info.warnings.end(), list->begin(), list->end());
  return info;
}

}  // namespace engine

ModelInfo inspect_model(const std::filesystem::path& path) {
  const format::ModelFolder folder = format::ModelFolder::open(path);
  const model::ParsedModel parsed = model::parse_model(folder);
  ModelInfo info = engine::describe(folder, parsed, model::bind(folder, parsed.spec, parsed.names));
  if (const auto tokenizer = engine::load_tokenizer(path))
    info.tokenizer = tokenizer->description();
  else
    info.missing.emplace_back("tokenizer.json");
  return info;
}

}  // namespace moeflux
