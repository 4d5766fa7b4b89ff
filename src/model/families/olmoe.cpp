// OLMoE: attention with norms over the whole projections, many small experts with unnormalized weights.
#include <array>

#include "core/error.h"
#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 1> kTypes{"olmoe"};

ModelSpec parse(format::ModelConfig& c) {
  c.require_absent_or("hidden_act", "silu");
  c.require_absent_or("attention_bias", false);
  ModelSpec s = read_dims(c);
  GqaSpec attention = read_gqa(c, s.hidden_dim, {});
  attention.qk_norm = QkNorm::Whole;
  attention.clip = static_cast<float>(c.find_number({"clip_qkv"}).value_or(0.0));
  if (!(attention.clip >= 0.0f)) fail(ErrorCode::InvalidModel, "{}: \"clip_qkv\" is {}", c.origin(), attention.clip);
  MoeSpec moe = read_moe(c);
  moe.router.normalize = c.find_bool({"norm_topk_prob"}).value_or(false);
  for (LayerSpec& layer : s.layers) {
    layer.mixer = attention;
    layer.ffn = moe;
  }
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) { return names_with_prefix(folder, spec, {"model."}); }

}  // namespace

const Family& olmoe_family() {
  static const Family kFamily{"olmoe", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
