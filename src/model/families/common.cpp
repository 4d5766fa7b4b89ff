#include "model/families/common.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace moeflux::model {

using format::ModelConfig;
using format::ModelFolder;

namespace {

float inverse_sqrt(std::int64_t n) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))); }

void need_multiple(const ModelConfig& c, std::string_view key, std::int64_t value, std::string_view of_key, std::int64_t of) {
  if (value % of != 0) fail(ErrorCode::InvalidModel, "{}: \"{}\" ({}) is not a multiple of \"{}\" ({})", c.origin(), key, value, of_key, of);
}

}  // namespace

ModelSpec read_dims(ModelConfig& c) {
  c.accept({"model_type", "text_config", "intermediate_size"});
  ModelSpec s;
  s.hidden_dim = c.need_int({"hidden_size"}, 1, kMaxDim);
  s.vocab_size = c.need_int({"vocab_size"}, 1, 1 << 24);
  s.max_context = c.find_int({"max_position_embeddings"}).value_or(4096);
  if (s.max_context < 1) fail(ErrorCode::InvalidModel, "{}: \"max_position_embeddings\" is {}", c.origin(), s.max_context);
  s.norm_eps = static_cast<float>(c.need_number({"rms_norm_eps"}, 0.0, 1.0));
  s.tied_head = c.find_bool({"tie_word_embeddings"}).value_or(false);
  s.layers.resize(static_cast<std::size_t>(c.need_int({"num_hidden_layers"}, 1, 4096)));
  return s;
}

std::string need_one_of(ModelConfig& c, std::string_view key, const std::vector<std::string_view>& values) {
  const std::string value = c.find_string({key}).value_or(std::string(values.front()));
  if (std::find(values.begin(), values.end(), value) == values.end())
    fail(ErrorCode::Unsupported, "{}: \"{}\" is \"{}\"; supported here: {}", c.origin(), key, value, fmt::join(values, ", "));
  return value;
}

GqaSpec read_gqa(ModelConfig& c, std::int64_t hidden, const GqaDefaults& defaults) {
  GqaSpec a;
  a.n_heads = c.need_int({"num_attention_heads"}, 1, kMaxDim);
  a.n_kv_heads = c.find_int({"num_key_value_heads"}).value_or(a.n_heads);
  if (a.n_kv_heads < 1) fail(ErrorCode::InvalidModel, "{}: \"num_key_value_heads\" is {}", c.origin(), a.n_kv_heads);
  need_multiple(c, "num_attention_heads", a.n_heads, "num_key_value_heads", a.n_kv_heads);
  if (const auto hd = c.find_int({"head_dim"})) {
    a.head_dim = *hd;
  } else {
    need_multiple(c, "hidden_size", hidden, "num_attention_heads", a.n_heads);
    a.head_dim = hidden / a.n_heads;
  }
  if (a.head_dim < 1 || a.head_dim > 65536) fail(ErrorCode::InvalidModel, "{}: \"head_dim\" is {}", c.origin(), a.head_dim);
  a.scale = inverse_sqrt(a.head_dim);
  const RopeConfig rope = read_rope(c, defaults.theta);
  const auto by_factor = static_cast<std::int64_t>(static_cast<double>(a.head_dim) * rope.partial_factor.value_or(defaults.partial_factor));
  const auto given = c.find_int({"rotary_dim"});
  const std::int64_t n_rotary = given.value_or(by_factor);
  if (n_rotary < 2 || n_rotary % 2 != 0 || n_rotary > a.head_dim)
    fail(ErrorCode::InvalidModel, "{}: \"{}\" gives {} rotary dimensions of {}", c.origin(), given ? "rotary_dim" : "partial_rotary_factor", n_rotary,
         a.head_dim);
  a.rope = rope.build(n_rotary, backend::RopeStyle::HalfSplit);
  return a;
}

MlaSpec read_mla(ModelConfig& c) {
  c.require_absent_or("attention_bias", false);
  c.require_absent_or("mlp_bias", false);
  // The cache has one key for all heads; what these would say of plain attention does not apply.
  c.accept({"head_dim", "num_key_value_heads", "qk_head_dim"});
  MlaSpec m;
  m.n_heads = c.need_int({"num_attention_heads"}, 1, 65536);
  if (c.find("q_lora_rank") != nullptr) m.q_rank = c.need_int({"q_lora_rank"}, 1, kMaxDim);
  m.kv_rank = c.need_int({"kv_lora_rank"}, 1, kMaxDim);
  m.nope_dim = c.need_int({"qk_nope_head_dim"}, 1, 65536);
  m.rope_dim = c.need_int({"qk_rope_head_dim"}, 2, 65536);
  m.v_dim = c.need_int({"v_head_dim"}, 1, 65536);
  need_multiple(c, "qk_rope_head_dim", m.rope_dim, "2", 2);
  const RopeConfig rope = read_rope(c, 10000.0);
  const bool interleaved = c.find_bool({"rope_interleave"}).value_or(true);
  m.rope = rope.build(m.rope_dim, interleaved ? backend::RopeStyle::Interleaved : backend::RopeStyle::HalfSplit);
  double scale = 1.0 / std::sqrt(static_cast<double>(m.nope_dim + m.rope_dim));
  if (rope.yarn && rope.yarn->mscale_all_dim != 0.0) {
    const double magnitude = yarn_magnitude(rope.yarn->factor, rope.yarn->mscale_all_dim);
    scale *= magnitude * magnitude;
  }
  m.scale = static_cast<float>(scale);
  return m;
}

GatedDeltaSpec read_gated_delta(ModelConfig& c) {
  GatedDeltaSpec d;
  d.n_k_heads = c.need_int({"linear_num_key_heads"}, 1, 65536);
  d.n_v_heads = c.need_int({"linear_num_value_heads"}, 1, 65536);
  d.k_dim = c.need_int({"linear_key_head_dim"}, 1, 65536);
  d.v_dim = c.need_int({"linear_value_head_dim"}, 1, 65536);
  d.n_taps = c.need_int({"linear_conv_kernel_dim"}, 2, backend::CausalConv::kMaxTaps);
  need_multiple(c, "linear_num_value_heads", d.n_v_heads, "linear_num_key_heads", d.n_k_heads);
  return d;
}

MoeSpec read_moe(ModelConfig& c) {
  MoeSpec m;
  m.n_experts = c.need_int({"num_experts", "num_local_experts", "n_routed_experts"}, 1, 65536);
  m.top_k = c.need_int({"num_experts_per_tok", "experts_per_token"}, 1, 1024);
  if (m.top_k > m.n_experts)
    fail(ErrorCode::InvalidModel, "{}: \"num_experts_per_tok\" is {}, but there are {} experts", c.origin(), m.top_k, m.n_experts);
  m.inner_dim = c.need_int({"moe_intermediate_size", "intermediate_size"}, 1, kMaxDim);
  return m;
}

void read_groups(ModelConfig& c, MoeSpec& m) {
  const std::int64_t groups = c.find_int({"n_group"}).value_or(1), chosen = c.find_int({"topk_group"}).value_or(groups);
  if (groups < 1 || m.n_experts % groups != 0)
    fail(ErrorCode::InvalidModel, "{}: \"n_group\" ({}) does not divide {} experts", c.origin(), groups, m.n_experts);
  if (groups > 1 && m.router.score == backend::RouterScore::Sigmoid && m.n_experts / groups < 2)
    fail(ErrorCode::InvalidModel, "{}: \"n_group\" ({}) leaves one expert to a group", c.origin(), groups);
  if (chosen < 1 || chosen > groups) fail(ErrorCode::InvalidModel, "{}: \"topk_group\" is {} of {} groups", c.origin(), chosen, groups);
  if (m.top_k > m.n_experts / groups * chosen)
    fail(ErrorCode::InvalidModel, "{}: \"topk_group\" ({}) leaves fewer experts than \"num_experts_per_tok\" ({})", c.origin(), chosen, m.top_k);
  m.router.n_groups = static_cast<std::int32_t>(groups);
  m.router.topk_groups = static_cast<std::int32_t>(chosen);
}

void read_sigmoid_router(ModelConfig& c, MoeSpec& m) {
  need_one_of(c, "scoring_func", {"sigmoid"});
  need_one_of(c, "topk_method", {"noaux_tc"});
  m.router.score = backend::RouterScore::Sigmoid;
  m.router.select_bias = true;
  m.router.normalize = c.find_bool({"norm_topk_prob"}).value_or(true);
  m.router.norm_eps = 1e-20f;
  m.router.scaling = static_cast<float>(c.find_number({"routed_scaling_factor"}).value_or(1.0));
  read_groups(c, m);
}

void read_shared_experts(ModelConfig& c, MoeSpec& m) {
  const std::int64_t n = c.find_int({"n_shared_experts"}).value_or(0);
  if (n < 0 || n > 1024) fail(ErrorCode::InvalidModel, "{}: \"n_shared_experts\" is {}", c.origin(), n);
  m.shared_dim = n * m.inner_dim;
}

std::vector<bool> moe_after_dense(ModelConfig& c, std::size_t n_layers) {
  c.require_absent_or("moe_layer_freq", 1);
  const std::int64_t dense = c.find_int({"first_k_dense_replace"}).value_or(0);
  if (dense < 0) fail(ErrorCode::InvalidModel, "{}: \"first_k_dense_replace\" is {}", c.origin(), dense);
  std::vector<bool> moe(n_layers);
  for (std::size_t i = 0; i < n_layers; ++i) moe[i] = static_cast<std::int64_t>(i) >= dense;
  return moe;
}

std::vector<bool> moe_by_step(ModelConfig& c, std::size_t n_layers) {
  const std::int64_t step = c.find_int({"decoder_sparse_step"}).value_or(1);
  if (step < 1) fail(ErrorCode::InvalidModel, "{}: \"decoder_sparse_step\" is {}", c.origin(), step);
  std::vector<bool> moe(n_layers);
  for (std::size_t i = 0; i < n_layers; ++i) moe[i] = (static_cast<std::int64_t>(i) + 1) % step == 0;
  const Json* dense = c.find("mlp_only_layers");
  if (dense == nullptr) return moe;
  if (!dense->is_array()) fail(ErrorCode::InvalidModel, "{}: \"mlp_only_layers\" must be a list", c.origin());
  for (const Json& layer : *dense) {
    if (!layer.is_number_integer() || layer.get<std::int64_t>() < 0 || layer.get<std::int64_t>() >= static_cast<std::int64_t>(n_layers))
      fail(ErrorCode::InvalidModel, "{}: \"mlp_only_layers\" names layer {}", c.origin(), layer.dump());
    moe[static_cast<std::size_t>(layer.get<std::int64_t>())] = false;
  }
  return moe;
}

void set_ffn(ModelConfig& c, ModelSpec& spec, const std::vector<bool>& is_moe, const MoeSpec& moe) {
  const bool any_dense = std::find(is_moe.begin(), is_moe.end(), false) != is_moe.end();
  const DenseSpec dense{any_dense ? c.need_int({"intermediate_size"}, 1, kMaxDim) : 0};
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    if (is_moe[i])
      spec.layers[i].ffn = moe;
    else
      spec.layers[i].ffn = dense;
  }
}

std::vector<bool> read_layer_types(ModelConfig& c, std::size_t n_layers, std::string_view chosen, std::string_view other) {
  const Json* types = c.find("layer_types");
  if (types == nullptr) return {};
  if (!types->is_array() || types->size() != n_layers)
    fail(ErrorCode::InvalidModel, "{}: \"layer_types\" must list {} layers", c.origin(), n_layers);
  std::vector<bool> out(n_layers);
  for (std::size_t i = 0; i < n_layers; ++i) {
    const std::string t = (*types)[i].is_string() ? (*types)[i].get<std::string>() : "";
    if (t != chosen && t != other) fail(ErrorCode::Unsupported, "{}: \"layer_types\"[{}] is {}", c.origin(), i, (*types)[i].dump());
    out[i] = t == chosen;
  }
  return out;
}

TensorNames names_with_prefix(const ModelFolder& folder, const ModelSpec& spec, const std::vector<std::string_view>& prefixes) {
  TensorNames n;
  n.prefix = prefixes.back();
  for (const std::string_view prefix : prefixes)
    if (folder.find(std::string(prefix) + n.embed + ".weight") != nullptr) {
      n.prefix = prefix;
      break;
    }
  n.head = n.prefix.starts_with("language_model.") ? "language_model.lm_head" : "lm_head";
  // Draft layers stand behind the last one; frequencies are computed.
  for (std::size_t i = 0; i < 8; ++i) n.ignored.push_back(fmt::format("{}layers.{}.", n.prefix, spec.layers.size() + i));
  n.ignored.insert(n.ignored.end(), {"model.visual.", "visual.", "vision_tower.", "mm_projector.", "mtp.", "model.mtp.", "language_model.mtp.", "*.rotary_emb.inv_freq"});
  return n;
}

}  // namespace moeflux::model
