// Qwen3-Next: as Qwen3.5-MoE, with the delta-net's input rows grouped by key head and layers that may be dense.
#include <array>

#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 1> kTypes{"qwen3_next"};

ModelSpec parse(format::ModelConfig& c) {
  ModelSpec s = read_hybrid(c);
  MoeSpec moe = read_moe(c);
  moe.shared_dim = c.need_int({"shared_expert_intermediate_size"}, 1, kMaxDim);
  moe.shared_gate = true;
  moe.router.normalize = c.find_bool({"norm_topk_prob"}).value_or(true);
  set_ffn(c, s, moe_by_step(c, s.layers.size()), moe);
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) {
  TensorNames n = names_with_prefix(folder, spec, {"model."});
  n.delta_qkvz = "linear_attn.in_proj_qkvz";
  n.delta_ba = "linear_attn.in_proj_ba";
  n.norm_transform = hybrid_norm_meaning(folder, spec, n);
  return n;
}

}  // namespace

const Family& qwen3_next_family() {
  static const Family kFamily{"qwen3_next", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
