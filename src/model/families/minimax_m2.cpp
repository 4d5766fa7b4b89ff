// MiniMax-M2: attention with norms over the whole projections and partial rotation, sigmoid router with a correction bias.
#include <array>

#include "core/error.h"
#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 1> kTypes{"minimax_m2"};

// 1 for softmax attention, which is all there is in this generation.
void need_softmax_attention(format::ModelConfig& c) {
  const Json* kinds = c.find("attn_type_list");
  if (kinds == nullptr) return;
  for (const Json& kind : *kinds)
    if (kind != 1) fail(ErrorCode::Unsupported, "{}: \"attn_type_list\" has {}; only 1 is supported", c.origin(), kind.dump());
}

ModelSpec parse(format::ModelConfig& c) {
  c.require_absent_or("hidden_act", "silu");
  c.require_absent_or("attention_bias", false);
  c.require_absent_or("use_qk_norm", true);
  c.require_absent_or("qk_norm_type", "per_layer");
  c.require_absent_or("use_routing_bias", true);
  c.require_absent_or("shared_intermediate_size", 0);
  c.accept({"sliding_window", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"});
  need_softmax_attention(c);
  need_one_of(c, "scoring_func", {"sigmoid"});
  ModelSpec s = read_dims(c);
  GqaSpec attention = read_gqa(c, s.hidden_dim, {.theta = 5e6});
  attention.qk_norm = QkNorm::Whole;
  MoeSpec moe = read_moe(c);
  moe.router.score = backend::RouterScore::Sigmoid;
  moe.router.select_bias = true;
  moe.router.normalize = true;
  moe.router.norm_eps = 1e-20f;
  for (LayerSpec& layer : s.layers) {
    layer.mixer = attention;
    layer.ffn = moe;
  }
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) {
  TensorNames n = names_with_prefix(folder, spec, {"model."});
  n.router = "block_sparse_moe.gate";
  n.select_bias = "block_sparse_moe.e_score_correction_bias";
  n.experts_single = "block_sparse_moe.experts";
  n.experts_fused = n.experts_single;
  n.experts_stacked = "block_sparse_moe.switch_mlp";
  n.single_gate = "w1", n.single_up = "w3", n.single_down = "w2";
  return n;
}

}  // namespace

const Family& minimax_m2_family() {
  static const Family kFamily{"minimax_m2", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
