// Every family moeflux reads. A new one is added here, and nowhere else.
#include <array>

#include "model/families/families.h"

namespace moeflux::model {

std::span<const Family* const> all_families() {
  static const std::array kFamilies{
      &deepseek_v2_family(),
      &deepseek_v3_family(),
      &glm4_moe_family(),
      &gpt_oss_family(),
      &minimax_m2_family(),
      &mixtral_family(),
      &olmoe_family(),
      &qwen3_5_moe_family(),
      &qwen3_moe_family(),
      &qwen3_next_family(),
  };
  return kFamilies;
}

std::string_view missing_feature(std::string_view type) {
  struct Missing {
    std::string_view type, feature;
  };
  static constexpr std::array kMissing{
      Missing{"deepseek_v32", "sparse attention with an indexer"}, Missing{"glm_moe_dsa", "sparse attention with an indexer"},
      Missing{"kimi_k3", "its own attention blocks"},              Missing{"minimax_m3", "its own attention blocks"},
      Missing{"llama4", "chunked attention"},                      Missing{"qwen2_moe", "attention biases in this family"},
      Missing{"qwen3", "a mixture of experts: the model is dense"}, Missing{"llama", "a mixture of experts: the model is dense"},
      Missing{"mistral", "a mixture of experts: the model is dense"},
  };
  for (const Missing& m : kMissing)
    if (m.type == type) return m.feature;
  return {};
}

}  // namespace moeflux::model
