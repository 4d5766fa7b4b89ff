// Mixtral: grouped-query attention, two of a few wide experts.
#include <array>

#include "core/error.h"
#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 1> kTypes{"mixtral"};

ModelSpec parse(format::ModelConfig& c) {
  c.require_absent_or("hidden_act", "silu");
  ModelSpec s = read_dims(c);
  GqaSpec attention = read_gqa(c, s.hidden_dim, {});
  attention.window = c.find_int({"sliding_window"}).value_or(0);
  if (attention.window < 0) fail(ErrorCode::InvalidModel, "{}: \"sliding_window\" is {}", c.origin(), attention.window);
  MoeSpec moe = read_moe(c);
  moe.router.normalize = true;
  for (LayerSpec& layer : s.layers) {
    layer.mixer = attention;
    layer.ffn = moe;
  }
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) {
  TensorNames n = names_with_prefix(folder, spec, {"model."});
  n.router = "block_sparse_moe.gate";
  n.experts_single = "block_sparse_moe.experts";
  n.experts_fused = n.experts_single;
  n.experts_stacked = "block_sparse_moe.switch_mlp";
  n.single_gate = "w1", n.single_up = "w3", n.single_down = "w2";
  return n;
}

}  // namespace

const Family& mixtral_family() {
  static const Family kFamily{"mixtral", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
