// What the families' configs have in common. Every function marks the keys it reads; errors name the key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "format/model_config.h"
#include "model/family.h"
#include "model/rope.h"
#include "model/spec.h"

namespace moeflux::model {

inline constexpr std::int64_t kMaxDim = 1 << 20;

// Widths, norm, head; `layers` gets num_hidden_layers entries. hidden_act must be silu unless the family says otherwise.
ModelSpec read_dims(format::ModelConfig& c);

// One of the values, else Unsupported naming key and value; absent: the first.
std::string need_one_of(format::ModelConfig& c, std::string_view key, const std::vector<std::string_view>& values);

struct GqaDefaults {
  double theta = 10000.0;
  double partial_factor = 1.0;  // share of a head that rotates
};
// Heads, scale and half-split rotation. `rotary_dim` wins over a factor.
GqaSpec read_gqa(format::ModelConfig& c, std::int64_t hidden_dim, const GqaDefaults& defaults);

// Latent attention with its YaRN scale.
MlaSpec read_mla(format::ModelConfig& c);

GatedDeltaSpec read_gated_delta(format::ModelConfig& c);

// Number of experts, top-k and expert width (moe_intermediate_size, else intermediate_size). The router is left to the family.
MoeSpec read_moe(format::ModelConfig& c);

// A router by sigmoid with a correction bias and groups, and shared experts of a multiple of the expert width.
void read_sigmoid_router(format::ModelConfig& c, MoeSpec& moe);
void read_groups(format::ModelConfig& c, MoeSpec& moe);
void read_shared_experts(format::ModelConfig& c, MoeSpec& moe);

// Per layer whether it is a mixture. By first_k_dense_replace, or by mlp_only_layers and decoder_sparse_step.
std::vector<bool> moe_after_dense(format::ModelConfig& c, std::size_t n_layers);
std::vector<bool> moe_by_step(format::ModelConfig& c, std::size_t n_layers);
// Fills ffn of every layer; dense ones have width intermediate_size.
void set_ffn(format::ModelConfig& c, ModelSpec& spec, const std::vector<bool>& is_moe, const MoeSpec& moe);

// layer_types as one bool per layer: is it `chosen` (else it must be `other`). Absent: empty.
std::vector<bool> read_layer_types(format::ModelConfig& c, std::size_t n_layers, std::string_view chosen, std::string_view other);

// Names with the first of the prefixes under which there is an embedding, and what comes after the last layer ignored.
TensorNames names_with_prefix(const format::ModelFolder& folder, const ModelSpec& spec, const std::vector<std::string_view>& prefixes);

// Hybrids with Gated DeltaNet: full attention by layer_types or full_attention_interval, shared expert with a gate.
ModelSpec read_hybrid(format::ModelConfig& c);
// Raw checkpoints store w for norms of 1 + w and the convolution as [C, 1, K]; converted ones store 1 + w and [C, K, 1].
// InvalidModel when the file's header contradicts its shapes.
store::VectorSource::Transform hybrid_norm_meaning(const format::ModelFolder& folder, const ModelSpec& spec, const TensorNames& names);

}  // namespace moeflux::model
