// Qwen3-MoE: grouped-query attention with a norm per head, softmax top-k experts, no shared one.
#include <array>

#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 1> kTypes{"qwen3_moe"};

ModelSpec parse(format::ModelConfig& c) {
  c.require_absent_or("hidden_act", "silu");
  c.require_absent_or("attention_bias", false);
  c.require_absent_or("use_sliding_window", false);
  c.require_absent_or("qkv_bias", false);
  c.require_absent_or("use_qk_norm", true);
  c.accept({"sliding_window"});
  ModelSpec s = read_dims(c);
  GqaSpec attention = read_gqa(c, s.hidden_dim, {});
  attention.qk_norm = QkNorm::PerHead;
  for (LayerSpec& layer : s.layers) layer.mixer = attention;
  MoeSpec moe = read_moe(c);
  moe.router.normalize = c.find_bool({"norm_topk_prob"}).value_or(false);
  set_ffn(c, s, moe_by_step(c, s.layers.size()), moe);
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) { return names_with_prefix(folder, spec, {"model."}); }

}  // namespace

const Family& qwen3_moe_family() {
  static const Family kFamily{"qwen3_moe", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
