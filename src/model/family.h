// What a family of models must say: how its config reads, and what its tensors are called. One file each in families/.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "format/model_config.h"
#include "format/model_folder.h"
#include "model/spec.h"
#include "store/trunk_store.h"

namespace moeflux::model {

// Tensor names of one folder. Layer names are relative to prefix + "layers.<i>."; a matrix p is found as "p.weight", with
// "p.scales" (and "p.biases") beside it where it is quantized.
struct TensorNames {
  std::string prefix;                 // "model."
  std::string embed = "embed_tokens";  // relative to prefix
  std::string final_norm = "norm";     // relative to prefix
  std::string head = "lm_head";        // as it stands

  std::string input_norm = "input_layernorm", post_norm = "post_attention_layernorm";
  std::string q = "self_attn.q_proj", k = "self_attn.k_proj", v = "self_attn.v_proj", o = "self_attn.o_proj";
  std::string q_norm = "self_attn.q_norm", k_norm = "self_attn.k_norm";
  std::string sinks = "self_attn.sinks";

  // Latent attention; q without a latent of its own is `q`. Either kv_b or the pair embed_q and unembed_out is there.
  std::string q_a = "self_attn.q_a_proj", q_a_norm = "self_attn.q_a_layernorm", q_b = "self_attn.q_b_proj";
  std::string kv_a = "self_attn.kv_a_proj_with_mqa", kv_a_norm = "self_attn.kv_a_layernorm", kv_b = "self_attn.kv_b_proj";
  std::string embed_q = "self_attn.embed_q", unembed_out = "self_attn.unembed_out";

  std::string delta_qkv = "linear_attn.in_proj_qkv", delta_z = "linear_attn.in_proj_z";
  std::string delta_b = "linear_attn.in_proj_b", delta_a = "linear_attn.in_proj_a";
  // Not empty: instead of the four above, rows grouped by key head: [q | k | v | z] and [b | a] of each.
  std::string delta_qkvz, delta_ba;
  std::string delta_conv = "linear_attn.conv1d", delta_a_log = "linear_attn.A_log";
  std::string delta_dt_bias = "linear_attn.dt_bias", delta_norm = "linear_attn.norm", delta_out = "linear_attn.out_proj";

  std::string select_bias = "mlp.gate.e_score_correction_bias";
  std::string router = "mlp.gate", shared_gate = "mlp.shared_expert_gate", shared = "mlp.shared_expert";
  std::string dense = "mlp";
  std::string gate = "gate_proj", up = "up_proj", down = "down_proj";
  // Routed experts stand in one of these layouts; the names present decide.
  std::string experts_stacked = "mlp.switch_mlp";   // "<this>.gate_proj.weight" [E, ..]
  std::string experts_fused = "mlp.experts";        // "<this>.gate_up_proj" [E, 2I, D], "<this>.down_proj" [E, D, I]
  std::string experts_single = "mlp.experts";       // "<this>.<e>.gate_proj.weight"
  std::string single_gate = "gate_proj", single_up = "up_proj", single_down = "down_proj";
  // Fused experts have gate and up in turn: as plain tensors [E, D, 2I] and [E, I, D] (inputs first), as MXFP4
  // "<name>_blocks" [E, 2I, D / 32, 16] with "<name>_scales"; additive biases are "<name>_bias".
  bool experts_interleaved = false;

  // What the stored norm weight means (all norms but delta_norm, which is plain).
  store::VectorSource::Transform norm_transform = store::VectorSource::Transform::None;

  // Tensors that are there and rightly not read (towers for other inputs, extra heads): name prefixes, or "*" and the end
  // of a name.
  std::vector<std::string> ignored;

  std::string layer(std::int64_t i, std::string_view name) const;
};

struct Family {
  std::string_view name;
  std::span<const std::string_view> model_types;
  // Unsupported or InvalidModel, naming the key, for a config it cannot honour.
  ModelSpec (*parse)(format::ModelConfig& config);
  TensorNames (*names)(const format::ModelFolder& folder, const ModelSpec& spec);
};

std::span<const Family* const> all_families();
// By model_type; nullptr when no family reads it.
const Family* find_family(std::string_view model_type);
// What a known model_type needs that is not here; empty for types nobody knows.
std::string_view missing_feature(std::string_view model_type);

// The config of a folder as a spec. Unsupported names an unknown model_type, what is missing for it and the types that are
// known; warnings get the keys nobody knows.
struct ParsedModel {
  const Family* family = nullptr;
  ModelSpec spec;
  TensorNames names;
  std::vector<std::string> warnings;
};
ParsedModel parse_model(const format::ModelFolder& folder);

}  // namespace moeflux::model
