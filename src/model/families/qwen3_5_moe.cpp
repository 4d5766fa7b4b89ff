// Qwen3.5-MoE (text): gated grouped-query attention and Gated DeltaNet layers, softmax top-k experts with a gated shared one.
#include <array>
#include <cmath>

#include "core/error.h"
#include "core/json.h"
#include "model/families/families.h"
#include "model/rope.h"

namespace moeflux::model {
namespace {

using format::ModelConfig;
using format::ModelFolder;
using Transform = store::VectorSource::Transform;

constexpr std::int64_t kMaxDim = 1 << 20;
constexpr std::array<std::string_view, 2> kTypes{"qwen3_5_moe", "qwen3_5_moe_text"};

GqaSpec parse_attention(ModelConfig& c, std::int64_t hidden) {
  GqaSpec a;
  a.n_heads = c.need_int({"num_attention_heads"}, 1, kMaxDim);
  a.n_kv_heads = c.need_int({"num_key_value_heads"}, 1, kMaxDim);
  if (a.n_heads % a.n_kv_heads != 0)
    fail(ErrorCode::InvalidModel, "{}: \"num_attention_heads\" ({}) is not a multiple of \"num_key_value_heads\" ({})", c.origin(), a.n_heads, a.n_kv_heads);
  if (const auto hd = c.find_int({"head_dim"})) {
    a.head_dim = *hd;
  } else {
    if (hidden % a.n_heads != 0)
      fail(ErrorCode::InvalidModel, "{}: \"hidden_size\" ({}) is not a multiple of \"num_attention_heads\" ({})", c.origin(), hidden, a.n_heads);
    a.head_dim = hidden / a.n_heads;
  }
  if (a.head_dim < 1 || a.head_dim > 65536) fail(ErrorCode::InvalidModel, "{}: \"head_dim\" is {}", c.origin(), a.head_dim);
  a.qk_norm = true;
  a.output_gate = true;
  a.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(a.head_dim)));
  const RopeConfig rope = read_rope(c, 10000.0);
  const auto n_rotary = static_cast<std::int64_t>(static_cast<double>(a.head_dim) * rope.partial_factor.value_or(0.25));
  if (n_rotary < 2 || n_rotary % 2 != 0)
    fail(ErrorCode::InvalidModel, "{}: \"partial_rotary_factor\" gives {} rotary dimensions of {}", c.origin(), n_rotary, a.head_dim);
  a.rope = rope.build(n_rotary, backend::RopeStyle::HalfSplit);
  return a;
}

GatedDeltaSpec parse_delta(ModelConfig& c) {
  GatedDeltaSpec d;
  d.n_k_heads = c.need_int({"linear_num_key_heads"}, 1, 65536);
  d.n_v_heads = c.need_int({"linear_num_value_heads"}, 1, 65536);
  d.k_dim = c.need_int({"linear_key_head_dim"}, 1, 65536);
  d.v_dim = c.need_int({"linear_value_head_dim"}, 1, 65536);
  d.n_taps = c.need_int({"linear_conv_kernel_dim"}, 2, backend::CausalConv::kMaxTaps);
  if (d.n_v_heads % d.n_k_heads != 0)
    fail(ErrorCode::InvalidModel, "{}: \"linear_num_value_heads\" ({}) is not a multiple of \"linear_num_key_heads\" ({})", c.origin(), d.n_v_heads, d.n_k_heads);
  return d;
}

MoeSpec parse_moe(ModelConfig& c) {
  MoeSpec m;
  m.n_experts = c.need_int({"num_experts", "num_local_experts", "n_routed_experts"}, 1, 65536);
  m.top_k = c.need_int({"num_experts_per_tok", "experts_per_token"}, 1, 1024);
  if (m.top_k > m.n_experts)
    fail(ErrorCode::InvalidModel, "{}: \"num_experts_per_tok\" ({}) is more than \"num_experts\" ({})", c.origin(), m.top_k, m.n_experts);
  m.inner_dim = c.need_int({"moe_intermediate_size"}, 1, kMaxDim);
  m.shared_dim = c.need_int({"shared_expert_intermediate_size"}, 1, kMaxDim);
  m.shared_gate = true;
  m.router.score = backend::RouterScore::Softmax;
  m.router.normalize = true;  // whatever norm_topk_prob says: the architecture always does
  return m;
}

// "linear_attention" or "full_attention" per layer, or every n-th full.
std::vector<bool> full_attention_layers(ModelConfig& c, std::int64_t n_layers) {
  std::vector<bool> full(static_cast<std::size_t>(n_layers));
  const std::int64_t interval = c.find_int({"full_attention_interval"}).value_or(4);
  const Json* types = c.find("layer_types");
  if (types == nullptr) {
    if (interval < 1) fail(ErrorCode::InvalidModel, "{}: \"full_attention_interval\" is {}", c.origin(), interval);
    for (std::int64_t i = 0; i < n_layers; ++i) full[static_cast<std::size_t>(i)] = (i + 1) % interval == 0;
    return full;
  }
  if (!types->is_array() || static_cast<std::int64_t>(types->size()) != n_layers)
    fail(ErrorCode::InvalidModel, "{}: \"layer_types\" must list {} layers", c.origin(), n_layers);
  for (std::size_t i = 0; i < full.size(); ++i) {
    const std::string t = (*types)[i].is_string() ? (*types)[i].get<std::string>() : "";
    if (t != "full_attention" && t != "linear_attention")
      fail(ErrorCode::Unsupported, "{}: \"layer_types\"[{}] is {}", c.origin(), i, (*types)[i].dump());
    full[i] = t == "full_attention";
  }
  return full;
}

ModelSpec parse(ModelConfig& c) {
  c.require_absent_or("hidden_act", "silu");
  c.require_absent_or("attention_bias", false);
  c.require_absent_or("attn_output_gate", true);
  c.require_absent_or("use_sliding_window", false);
  c.require_absent_or("mlp_only_layers", Json::array());
  c.require_absent_or("decoder_sparse_step", 1);
  c.accept({"sliding_window", "intermediate_size", "norm_topk_prob", "mamba_ssm_dtype", "model_type", "text_config"});

  ModelSpec s;
  s.hidden_dim = c.need_int({"hidden_size"}, 1, kMaxDim);
  s.vocab_size = c.need_int({"vocab_size"}, 1, 1 << 24);
  s.max_context = c.find_int({"max_position_embeddings"}).value_or(4096);
  if (s.max_context < 1) fail(ErrorCode::InvalidModel, "{}: \"max_position_embeddings\" is {}", c.origin(), s.max_context);
  s.norm_eps = static_cast<float>(c.need_number({"rms_norm_eps"}, 0.0, 1.0));
  s.tied_head = c.find_bool({"tie_word_embeddings"}).value_or(false);
  const std::int64_t n_layers = c.need_int({"num_hidden_layers"}, 1, 4096);
  const GqaSpec attention = parse_attention(c, s.hidden_dim);
  const GatedDeltaSpec delta = parse_delta(c);
  const MoeSpec moe = parse_moe(c);
  for (const bool full : full_attention_layers(c, n_layers)) {
    LayerSpec& layer = s.layers.emplace_back();
    if (full)
      layer.mixer = attention;
    else
      layer.mixer = delta;
    layer.ffn = moe;
  }
  return s;
}

// Raw checkpoints store w for norms of 1 + w and the convolution as [C, 1, K]; converted ones store 1 + w and [C, K, 1].
Transform norm_meaning(const ModelFolder& folder, const ModelSpec& spec, const TensorNames& names) {
  const std::string& writer = folder.writer_format();
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    const auto* delta = std::get_if<GatedDeltaSpec>(&spec.layers[i].mixer);
    if (delta == nullptr) continue;
    const std::string name = names.layer(static_cast<std::int64_t>(i), names.delta_conv) + ".weight";
    const format::FolderTensor* t = folder.find(name);
    if (t == nullptr || t->info.shape.size() != 3) continue;  // the binder will say what is wrong with it
    const bool raw_layout = t->info.shape[1] == 1 && t->info.shape[2] > 1;
    if ((writer == "mlx" && raw_layout) || (writer == "pt" && !raw_layout))
      fail(ErrorCode::InvalidModel, "{}: {} has the shape of a {} file, but the header says format \"{}\"",
           folder.file(t->file).path().string(), name, raw_layout ? "raw" : "converted", writer);
    return raw_layout ? Transform::PlusOne : Transform::None;
  }
  return writer == "mlx" ? Transform::None : Transform::PlusOne;
}

TensorNames names(const ModelFolder& folder, const ModelSpec& spec) {
  TensorNames n;
  n.prefix = "model.";
  for (const char* prefix : {"language_model.model.", "model.language_model.", "model."})
    if (folder.find(std::string(prefix) + "embed_tokens.weight") != nullptr) {
      n.prefix = prefix;
      break;
    }
  n.head = n.prefix == "language_model.model." ? "language_model.lm_head" : "lm_head";
  n.ignored = {"model.visual.", "visual.", "vision_tower.", "mtp.", "model.mtp.", "language_model.mtp."};
  n.norm_transform = norm_meaning(folder, spec, n);
  return n;
}

}  // namespace

const Family& qwen3_5_moe_family() {
  static const Family kFamily{"qwen3_5_moe", kTypes, parse, names};
  return kFamily;
}

}  // namespace moeflux::model
