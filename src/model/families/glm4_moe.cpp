// GLM-4.5 and later: grouped-query attention with biases, dense first layers, sigmoid router with a correction bias and an
// unscaled shared expert.
#include <array>

#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 1> kTypes{"glm4_moe"};

ModelSpec parse(format::ModelConfig& c) {
  c.require_absent_or("hidden_act", "silu");
  ModelSpec s = read_dims(c);
  GqaSpec attention = read_gqa(c, s.hidden_dim, {.partial_factor = 0.5});
  attention.qkv_bias = c.find_bool({"attention_bias"}).value_or(false);
  attention.qk_norm = c.find_bool({"use_qk_norm"}).value_or(false) ? QkNorm::PerHead : QkNorm::None;
  for (LayerSpec& layer : s.layers) layer.mixer = attention;
  MoeSpec moe = read_moe(c);
  read_sigmoid_router(c, moe);
  read_shared_experts(c, moe);
  set_ffn(c, s, moe_after_dense(c, s.layers.size()), moe);
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) {
  TensorNames n = names_with_prefix(folder, spec, {"model."});
  n.shared = "mlp.shared_experts";
  return n;
}

}  // namespace

const Family& glm4_moe_family() {
  static const Family kFamily{"glm4_moe", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
