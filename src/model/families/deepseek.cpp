// DeepSeek V2 and V3 and Kimi K2: latent attention, dense first layers, grouped top-k, unscaled shared experts.
#include <array>

#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 1> kV2Types{"deepseek_v2"};
constexpr std::array<std::string_view, 3> kV3Types{"deepseek_v3", "kimi_k2", "kimi_k25"};

ModelSpec parse_common(format::ModelConfig& c) {
  c.require_absent_or("hidden_act", "silu");
  ModelSpec s = read_dims(c);
  const MlaSpec attention = read_mla(c);
  for (LayerSpec& layer : s.layers) layer.mixer = attention;
  return s;
}

ModelSpec parse_v2(format::ModelConfig& c) {
  ModelSpec s = parse_common(c);
  c.accept({"norm_topk_prob"});  // weights are never normalized
  MoeSpec moe = read_moe(c);
  need_one_of(c, "scoring_func", {"softmax"});
  moe.router.scaling = static_cast<float>(c.find_number({"routed_scaling_factor"}).value_or(1.0));
  if (need_one_of(c, "topk_method", {"greedy", "group_limited_greedy"}) == "greedy")
    c.accept({"n_group", "topk_group"});
  else
    read_groups(c, moe);
  read_shared_experts(c, moe);
  set_ffn(c, s, moe_after_dense(c, s.layers.size()), moe);
  return s;
}

ModelSpec parse_v3(format::ModelConfig& c) {
  ModelSpec s = parse_common(c);
  MoeSpec moe = read_moe(c);
  read_sigmoid_router(c, moe);
  read_shared_experts(c, moe);
  set_ffn(c, s, moe_after_dense(c, s.layers.size()), moe);
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) {
  TensorNames n = names_with_prefix(folder, spec, {"language_model.model.", "model."});
  n.shared = "mlp.shared_experts";
  return n;
}

}  // namespace

const Family& deepseek_v2_family() {
  static const Family kFamily{"deepseek_v2", kV2Types, parse_v2, names};
  return kFamily;
}

const Family& deepseek_v3_family() {
  static const Family kFamily{"deepseek_v3", kV3Types, parse_v3, names};
  return kFamily;
}

}  // namespace moeflux::model
