#include "format/config_keys.h"

#include "core/json.h"

#include <algorithm>
#include <array>

namespace moeflux::format {
namespace {

// '*' stands for any run of characters, at most once.
bool matches(std::string_view pattern, std::string_view key) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == key;
  const std::string_view head = pattern.substr(0, star), tail = pattern.substr(star + 1);
  return key.size() >= head.size() + tail.size() && key.starts_with(head) && key.ends_with(tail);
}

constexpr auto kWithoutEffect = std::to_array<std::string_view>({
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "ep_size",
    "id2label",
    "image_token_id",
    "initial_context_length",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_dropout",
    "model_type",
    "mtp_*",
    "num_nextn_predict_layers",
    "output_*",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "qk_head_dim",
    "quantization",
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "text_config",
    "torch_dtype",
    "transformers_version",
    "unsloth_*",
    "use_cache",
    "use_return_dict",
    "video_token_id",
    "vision_config",
    "vision_*_token_id",
    "_attn_implementation_autoset",
});

struct Effect {
  std::string_view pattern;
  const char* neutral = nullptr;  // JSON of the value that has no effect in any family, if there is one
};

constexpr std::array kWithEffect{
    // everywhere
    Effect{"alibi", "false"},
    Effect{"attention_bias", "false"},
    Effect{"attention_multiplier"},
    Effect{"attention_sink*"},
    Effect{"attn_logit_softcapping"},
    Effect{"attn_output_gate", "true"},
    Effect{"clip_qkv"},
    Effect{"embedding_multiplier", "1"},
    Effect{"final_logit_softcapping"},
    Effect{"hidden_act", "\"silu\""},
    Effect{"index_*"},
    Effect{"logit_scale", "1"},
    Effect{"logits_scaling", "1"},
    Effect{"mlp_bias", "false"},
    Effect{"query_pre_attn_scalar"},
    Effect{"residual_multiplier", "1"},
    Effect{"rms_norm_eps"},
    Effect{"sinks"},
    Effect{"swiglu_limit"},
    Effect{"tie_word_embeddings"},
    Effect{"use_qk_norm"},
    // positions and windows
    Effect{"full_attention_interval"},
    Effect{"layer_types"},
    Effect{"partial_rotary_factor", "1"},
    Effect{"rope_interleave"},
    Effect{"rope_parameters"},
    Effect{"rope_scaling"},
    Effect{"rope_theta"},
    Effect{"rope_type", "\"default\""},
    Effect{"rotary_dim"},
    Effect{"sliding_window"},
    Effect{"type"},
    Effect{"use_sliding_window", "false"},
    // other mixers
    Effect{"kv_lora_rank"},
    Effect{"linear_*"},
    Effect{"q_lora_rank"},
    Effect{"qk_nope_head_dim"},
    Effect{"qk_rope_head_dim"},
    Effect{"v_head_dim"},
    // experts and routing
    Effect{"decoder_sparse_step", "1"},
    Effect{"experts_per_token"},
    Effect{"first_k_dense_replace", "0"},
    Effect{"mlp_only_layers", "[]"},
    Effect{"moe_layer_freq", "1"},
    Effect{"n_group", "1"},
    Effect{"n_shared_experts", "0"},
    Effect{"norm_topk_prob"},
    Effect{"num_experts_per_tok"},
    Effect{"routed_scaling_factor", "1"},
    Effect{"scoring_func"},
    Effect{"shared_expert_intermediate_size", "0"},
    Effect{"topk_group", "1"},
    Effect{"topk_method"},
};

}  // namespace

KeyEffect key_effect(std::string_view key, const Json& value) {
  const auto matches_key = [&](std::string_view pattern) { return matches(pattern, key); };
  if (value.is_null() || std::any_of(kWithoutEffect.begin(), kWithoutEffect.end(), matches_key))
    return KeyEffect::None;
  for (const Effect& effect : kWithEffect) {
    if (!matches_key(effect.pattern)) continue;
    const bool neutral = effect.neutral != nullptr && value == Json::parse(effect.neutral);
    return neutral ? KeyEffect::None : KeyEffect::Changes;
  }
  return KeyEffect::Unknown;
}

}  // namespace moeflux::format
