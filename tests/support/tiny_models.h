// Models of every kind of attention with random weights, so small that tens of thousands of positions take a
// second.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/json.h"
#include "support/edit_model.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::test {

// Collects tensors of random f32 values; the same seed gives the same model.
class TinyModel {
 public:
  static constexpr std::uint64_t kHidden = 16, kVocab = 32, kExperts = 4, kInner = 8;

  explicit TinyModel(Json config) : config_(std::move(config)) {
    config_.update({{"hidden_size", kHidden},
                    {"vocab_size", kVocab},
                    {"max_position_embeddings", 65536},
                    {"rms_norm_eps", 1e-6},
                    {"tie_word_embeddings", false},
                    {"intermediate_size", kInner},
                    {"num_experts_per_tok", 2}});
    matrix("model.embed_tokens.weight", {kVocab, kHidden}, 1.0);
    matrix("lm_head.weight", {kVocab, kHidden});
    norm("model.norm.weight", kHidden);
  }

  // Names are relative to the layer; entries have deviation gain / sqrt(last dimension).
  TinyModel& layer(std::size_t i) {
    prefix_ = "model.layers." + std::to_string(i) + ".";
    norm("input_layernorm.weight", kHidden);
    return norm("post_attention_layernorm.weight", kHidden);
  }
  TinyModel& matrix(const std::string& name, std::vector<std::uint64_t> shape, double gain = 0.0) {
    const double deviation = gain > 0.0 ? gain : 1.0 / std::sqrt(static_cast<double>(shape.back()));
    return add(name, std::move(shape), 0.0, deviation);
  }
  TinyModel& norm(const std::string& name, std::uint64_t n) { return add(name, {n}, 1.0, 0.1); }
  TinyModel& vector(const std::string& name, std::uint64_t n, double middle = 0.0, double deviation = 0.3) {
    return add(name, {n}, middle, deviation);
  }
  // One tensor per expert and matrix.
  TinyModel& experts() {
    matrix("mlp.gate.weight", {kExperts, kHidden});
    for (std::uint64_t e = 0; e < kExperts; ++e) feed_forward("mlp.experts." + std::to_string(e));
    return *this;
  }
  TinyModel& feed_forward(const std::string& module) {
    matrix(module + ".gate_proj.weight", {kInner, kHidden});
    matrix(module + ".up_proj.weight", {kInner, kHidden});
    return matrix(module + ".down_proj.weight", {kHidden, kInner});
  }
  void write(const TempDir& dir) const {
    dir.write("config.json", config_.dump());
    file_.save(dir / "model.safetensors");
  }

 private:
  TinyModel& add(const std::string& name, std::vector<std::uint64_t> shape, double middle, double deviation) {
    std::uint64_t n = 1;
    for (const std::uint64_t d : shape) n *= d;
    std::normal_distribution<double> normal(middle, deviation);
    std::vector<float> values(n);
    for (float& v : values) v = static_cast<float>(normal(random_));
    file_.tensors[prefix_ + name] = f32_tensor(std::move(shape), values);
    return *this;
  }

  Json config_;
  TensorFile file_;
  std::string prefix_;
  std::mt19937_64 random_{11};
};

// Two query heads on one key/value head.
inline TinyModel tiny_gqa() {
  TinyModel m({{"model_type", "qwen3_moe"},
               {"num_hidden_layers", 1},
               {"num_attention_heads", 2},
               {"num_key_value_heads", 1},
               {"head_dim", 8},
               {"num_experts", TinyModel::kExperts},
               {"norm_topk_prob", true},
               {"rope_theta", 1e6}});
  m.layer(0)
      .matrix("self_attn.q_proj.weight", {16, 16})
      .matrix("self_attn.k_proj.weight", {8, 16})
      .matrix("self_attn.v_proj.weight", {8, 16});
  m.matrix("self_attn.o_proj.weight", {16, 16})
      .norm("self_attn.q_norm.weight", 8)
      .norm("self_attn.k_norm.weight", 8)
      .experts();
  return m;
}

// Sinks; `windows` per layer whether it slides over 100 positions.
inline TinyModel tiny_sinks(const std::vector<bool>& windows) {
  constexpr std::uint64_t e = TinyModel::kExperts, i = TinyModel::kInner;
  Json types = Json::array();
  for (const bool w : windows) types.push_back(w ? "sliding_attention" : "full_attention");
  TinyModel m({{"model_type", "gpt_oss"},
               {"num_hidden_layers", windows.size()},
               {"num_attention_heads", 2},
               {"num_key_value_heads", 2},
               {"head_dim", 8},
               {"num_local_experts", e},
               {"layer_types", types},
               {"sliding_window", 100},
               {"rope_scaling",
                {{"rope_type", "yarn"},
                 {"factor", 32.0},
                 {"original_max_position_embeddings", 4096},
                 {"truncate", false}}}});
  for (std::size_t l = 0; l < windows.size(); ++l) {
    m.layer(l)
        .vector("self_attn.sinks", 2, 1.0)
        .vector("mlp.router.bias", e)
        .matrix("mlp.router.weight", {e, 16});
    for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"})
      m.matrix(std::string("self_attn.") + name + ".weight", {16, 16})
          .vector(std::string("self_attn.") + name + ".bias", 16);
    m.matrix("mlp.experts.gate_up_proj", {e, 16, 2 * i}, 0.25)
        .matrix("mlp.experts.gate_up_proj_bias", {e, 2 * i}, 0.1);
    m.matrix("mlp.experts.down_proj", {e, i, 16}, 0.3).matrix("mlp.experts.down_proj_bias", {e, 16}, 0.1);
  }
  return m;
}

inline TinyModel tiny_mla() {
  TinyModel m({{"model_type", "deepseek_v3"},
               {"num_hidden_layers", 1},
               {"num_attention_heads", 2},
               {"q_lora_rank", 8},
               {"kv_lora_rank", 8},
               {"qk_nope_head_dim", 8},
               {"qk_rope_head_dim", 4},
               {"v_head_dim", 8},
               {"n_routed_experts", TinyModel::kExperts},
               {"n_shared_experts", 1},
               {"n_group", 2},
               {"topk_group", 1},
               {"first_k_dense_replace", 0},
               {"norm_topk_prob", true},
               {"routed_scaling_factor", 2.5},
               {"rope_scaling",
                {{"type", "yarn"},
                 {"factor", 40.0},
                 {"mscale", 1.0},
                 {"mscale_all_dim", 1.0},
                 {"original_max_position_embeddings", 4096}}}});
  m.layer(0)
      .matrix("self_attn.q_a_proj.weight", {8, 16})
      .norm("self_attn.q_a_layernorm.weight", 8)
      .matrix("self_attn.q_b_proj.weight", {24, 8});
  m.matrix("self_attn.kv_a_proj_with_mqa.weight", {12, 16})
      .norm("self_attn.kv_a_layernorm.weight", 8)
      .matrix("self_attn.kv_b_proj.weight", {32, 8});
  m.matrix("self_attn.o_proj.weight", {16, 16})
      .vector("mlp.gate.e_score_correction_bias", TinyModel::kExperts, 0.0, 0.1);
  m.feed_forward("mlp.shared_experts").experts();
  return m;
}

// Delta-net layers, and full attention where `full` says so.
inline TinyModel tiny_delta(const std::vector<bool>& full) {
  Json types = Json::array();
  for (const bool f : full) types.push_back(f ? "full_attention" : "linear_attention");
  TinyModel m({{"model_type", "qwen3_next"},
               {"num_hidden_layers", full.size()},
               {"num_attention_heads", 2},
               {"num_key_value_heads", 1},
               {"head_dim", 8},
               {"num_experts", TinyModel::kExperts},
               {"norm_topk_prob", true},
               {"shared_expert_intermediate_size", TinyModel::kInner},
               {"layer_types", types},
               {"linear_num_key_heads", 1},
               {"linear_num_value_heads", 2},
               {"linear_key_head_dim", 8},
               {"linear_value_head_dim", 8},
               {"linear_conv_kernel_dim", 4},
               {"rope_theta", 1e7}});
  for (std::size_t l = 0; l < full.size(); ++l) {
    m.layer(l).feed_forward("mlp.shared_expert").matrix("mlp.shared_expert_gate.weight", {1, 16}).experts();
    if (full[l]) {
      m.matrix("self_attn.q_proj.weight", {32, 16})
          .matrix("self_attn.k_proj.weight", {8, 16})
          .matrix("self_attn.v_proj.weight", {8, 16});
      m.matrix("self_attn.o_proj.weight", {16, 16})
          .norm("self_attn.q_norm.weight", 8)
          .norm("self_attn.k_norm.weight", 8);
      continue;
    }
    m.matrix("linear_attn.in_proj_qkvz.weight", {48, 16}).matrix("linear_attn.in_proj_ba.weight", {4, 16});
    m.matrix("linear_attn.conv1d.weight", {32, 1, 4}, 0.5)
        .vector("linear_attn.A_log", 2, 0.0)
        .vector("linear_attn.dt_bias", 2, -4.0);
    m.norm("linear_attn.norm.weight", 8).matrix("linear_attn.out_proj.weight", {16, 16});
  }
  return m;
}

}  // namespace moeflux::test
