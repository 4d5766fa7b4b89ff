// gpt-oss: sliding and full attention in turn with biases and sinks, experts with biases and a clamped gate.
#include <array>

#include "core/error.h"
#include "model/families/common.h"
#include "model/families/families.h"

namespace moeflux::model {
namespace {

constexpr std::array<std::string_view, 1> kTypes{"gpt_oss"};

ModelSpec parse(format::ModelConfig& c) {
  c.accept({"hidden_act"});  // the clamped unit below stands, whatever it says
  ModelSpec s = read_dims(c);
  GqaSpec attention = read_gqa(c, s.hidden_dim, {.theta = 150000.0});
  attention.qkv_bias = attention.o_bias = c.find_bool({"attention_bias"}).value_or(true);
  attention.sinks = true;
  std::vector<bool> sliding = read_layer_types(c, s.layers.size(), "sliding_attention", "full_attention");
  for (std::size_t i = sliding.size(); i < s.layers.size(); ++i) sliding.push_back(i % 2 == 0);
  const std::int64_t window = c.find_int({"sliding_window"}).value_or(128);
  if (window < 1) fail(ErrorCode::InvalidModel, "{}: \"sliding_window\" is {}", c.origin(), window);

  MoeSpec moe = read_moe(c);
  moe.router.score = backend::RouterScore::SoftmaxOfChosen;
  moe.router.bias = true;
  moe.expert_bias = true;
  moe.glu = backend::GluKind::Clamped;
  moe.glu_limit = static_cast<float>(c.find_number({"swiglu_limit"}).value_or(7.0));
  moe.glu_alpha = 1.702f;
  if (!(moe.glu_limit > 0.0f)) fail(ErrorCode::InvalidModel, "{}: \"swiglu_limit\" is {}", c.origin(), moe.glu_limit);
  for (std::size_t i = 0; i < s.layers.size(); ++i) {
    attention.window = sliding[i] ? window : 0;
    s.layers[i].mixer = attention;
    s.layers[i].ffn = moe;
  }
  return s;
}

TensorNames names(const format::ModelFolder& folder, const ModelSpec& spec) {
  TensorNames n = names_with_prefix(folder, spec, {"model."});
  n.router = "mlp.router";
  n.experts_stacked = "mlp.experts";
  n.experts_interleaved = true;
  return n;
}

}  // namespace

const Family& gpt_oss_family() {
  static const Family kFamily{"gpt_oss", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
