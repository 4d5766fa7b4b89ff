// Qwen3.5-MoE (text): gated grouped-query attention and Gated DeltaNet layers, softmax top-k experts with a gated shared one.
#include <array>

#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 2> kTypes{"qwen3_5_moe", "qwen3_5_moe_text"};

ModelSpec parse(format::ModelConfig& c) {
  c.require_absent_or("mlp_only_layers", Json::array());
  c.require_absent_or("decoder_sparse_step", 1);
  c.accept({"norm_topk_prob"});  // the architecture always normalizes
  ModelSpec s = read_hybrid(c);
  MoeSpec moe = read_moe(c);
  moe.shared_dim = c.need_int({"shared_expert_intermediate_size"}, 1, kMaxDim);
  moe.shared_gate = true;
  moe.router.normalize = true;
  for (LayerSpec& layer : s.layers) layer.ffn = moe;
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) {
  TensorNames n = names_with_prefix(folder, spec, {"language_model.model.", "model.language_model.", "model."});
  n.norm_transform = hybrid_norm_meaning(folder, spec, n);
  return n;
}

}  // namespace

const Family& qwen3_5_moe_family() {
  static const Family kFamily{"qwen3_5_moe", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
