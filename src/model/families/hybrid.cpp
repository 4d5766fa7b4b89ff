// The hybrids of gated attention and Gated DeltaNet: what their two generations share.
#include "core/error.h"
#include "model/families/common.h"

namespace moeflux::model {

using format::ModelConfig;
using Transform = store::VectorSource::Transform;

ModelSpec read_hybrid(ModelConfig& c) {
  c.require_absent_or("hidden_act", "silu");
  c.require_absent_or("attention_bias", false);
  c.require_absent_or("attn_output_gate", true);
  c.require_absent_or("use_sliding_window", false);
  c.accept({"sliding_window", "mamba_ssm_dtype"});

  ModelSpec s = read_dims(c);
  GqaSpec attention = read_gqa(c, s.hidden_dim, {.partial_factor = 0.25});
  attention.qk_norm = QkNorm::PerHead;
  attention.output_gate = true;
  const GatedDeltaSpec delta = read_gated_delta(c);
  const std::int64_t interval = c.find_int({"full_attention_interval"}).value_or(4);
  if (interval < 1) fail(ErrorCode::InvalidModel, "{}: \"full_attention_interval\" is {}", c.origin(), interval);
  std::vector<bool> full = read_layer_types(c, s.layers.size(), "full_attention", "linear_attention");
  for (std::size_t i = full.size(); i < s.layers.size(); ++i) full.push_back((static_cast<std::int64_t>(i) + 1) % interval == 0);
  for (std::size_t i = 0; i < s.layers.size(); ++i) {
    if (full[i])
      s.layers[i].mixer = attention;
    else
      s.layers[i].mixer = delta;
  }
  return s;
}

Transform hybrid_norm_meaning(const format::ModelFolder& folder, const ModelSpec& spec, const TensorNames& names) {
  const std::string& writer = folder.writer_format();
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    if (!std::holds_alternative<GatedDeltaSpec>(spec.layers[i].mixer)) continue;
    const std::string name = names.layer(static_cast<std::int64_t>(i), names.delta_conv) + ".weight";
    const format::FolderTensor* t = folder.find(name);
    if (t == nullptr || t->info.shape.size() != 3) continue;  // the binder will say what is wrong with it
    const bool raw_layout = t->info.shape[1] == 1 && t->info.shape[2] > 1;
    if ((writer == "mlx" && raw_layout) || (writer == "pt" && !raw_layout))
      fail(ErrorCode::InvalidModel, "{}: {} has the shape of a {} file, but the header says format \"{}\"", folder.file(t->file).path().string(), name,
           raw_layout ? "raw" : "converted", writer);
    return raw_layout ? Transform::PlusOne : Transform::None;
  }
  return writer == "mlx" ? Transform::None : Transform::PlusOne;
}

}  // namespace moeflux::model
