// A model as data: what every layer is, with run-time shapes. Families make it from config.json; nothing else knows
// where it came from.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "backend/ops.h"

namespace moeflux::model {

// Rotary position embedding of one kind of layer. No frequencies: no rotation.
struct RopeSpec {
  std::vector<float> inv_freq;  // [r / 2]; the first r values of a head rotate
  backend::RopeStyle style = backend::RopeStyle::HalfSplit;
  float magnitude = 1.0f;  // factor on cosine and sine (YaRN)
};

// RMSNorm on q and k, before rope.
enum class QkNorm : std::uint8_t {
  None,
  PerHead,  // over head_dim, one weight for all heads
  Whole,    // over the whole projection, one statistic
};

// Grouped-query attention.
struct GqaSpec {
  std::int64_t n_heads = 0, n_kv_heads = 0, head_dim = 0;
  QkNorm qk_norm = QkNorm::None;
  bool output_gate = false;  // q_proj gives per head [query | gate]; the output is multiplied by sigmoid(gate)
  bool qkv_bias = false, o_bias = false;
  bool sinks = false;        // one extra logit per head that takes weight and gives no value
  float clip = 0.0f;         // q, k and v are clamped to +-clip after the norms; 0: not
  std::int64_t window = 0;   // 0: all keys
  float scale = 1.0f;
  RopeSpec rope;

  std::int64_t q_dim() const noexcept { return n_heads * head_dim * (output_gate ? 2 : 1); }
  std::int64_t kv_dim() const noexcept { return n_kv_heads * head_dim; }
};

// Multi-head latent attention. The cache holds per position the normed latent c and one rotated key kr for all heads; a
// head's key and value are linear in c, and those matrices are moved to the query and to the output ("absorbed").
struct MlaSpec {
  std::int64_t n_heads = 0;
  std::int64_t q_rank = 0;  // width of the query's latent; 0: none, q comes straight from the input
  std::int64_t kv_rank = 0;
  std::int64_t nope_dim = 0, rope_dim = 0, v_dim = 0;
  float latent_eps = 1e-6f;  // of the norms of both latents: not the model's
  float scale = 1.0f;
  RopeSpec rope;

  std::int64_t q_dim() const noexcept { return n_heads * (nope_dim + rope_dim); }
  std::int64_t cache_dim() const noexcept { return kv_rank + rope_dim; }
  std::int64_t out_dim() const noexcept { return n_heads * v_dim; }
};

// Gated DeltaNet: causal convolution, gated delta rule, gated norm.
struct GatedDeltaSpec {
  std::int64_t n_k_heads = 0, n_v_heads = 0, k_dim = 0, v_dim = 0;
  std::int64_t n_taps = 0;  // of the convolution
  float l2_eps = 1e-6f;

  std::int64_t key_width() const noexcept { return n_k_heads * k_dim; }
  std::int64_t value_width() const noexcept { return n_v_heads * v_dim; }
  std::int64_t conv_width() const noexcept { return 2 * key_width() + value_width(); }
};

struct DenseSpec {
  std::int64_t inner_dim = 0;
};

struct RouterSpec {
  bool bias = false;         // added to the logits
  bool select_bias = false;  // added to the scores for the selection only
  backend::RouterScore score = backend::RouterScore::Softmax;
  std::int32_t n_groups = 1, topk_groups = 1;
  bool normalize = false;
  float norm_eps = 0.0f;
  float scaling = 1.0f;
};

struct MoeSpec {
  std::int64_t n_experts = 0, top_k = 0, inner_dim = 0;
  std::int64_t shared_dim = 0;  // 0: no shared expert
  bool shared_gate = false;     // the shared expert is weighted by sigmoid(gate . x)
  bool expert_bias = false;     // routed experts have additive biases
  backend::GluKind glu = backend::GluKind::Silu;  // of the routed experts
  float glu_limit = 0.0f, glu_alpha = 0.0f;
  RouterSpec router;
};

struct LayerSpec {
  std::variant<GqaSpec, MlaSpec, GatedDeltaSpec> mixer;
  std::variant<DenseSpec, MoeSpec> ffn;
};

// Every layer: h += mixer(norm(h)); h += ffn(norm(h)).
struct ModelSpec {
  std::string family;      // registered name
  std::string model_type;  // as in the file
  std::int64_t hidden_dim = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_context = 0;
  float norm_eps = 0.0f;
  bool tied_head = false;  // the head is the embedding table
  std::vector<LayerSpec> layers;

  // Any layer with state that cannot be truncated.
  bool recurrent() const noexcept {
    for (const LayerSpec& l : layers)
      if (std::holds_alternative<GatedDeltaSpec>(l.mixer)) return true;
    return false;
  }
};

}  // namespace moeflux::model
