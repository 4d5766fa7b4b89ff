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

}  // namespace moeflux::model
