// One function per family file.
#pragma once

#include "model/family.h"

namespace moeflux::model {

const Family& deepseek_v2_family();
const Family& deepseek_v3_family();
const Family& glm4_moe_family();
const Family& gpt_oss_family();
const Family& minimax_m2_family();
const Family& mixtral_family();
const Family& olmoe_family();
const Family& qwen3_5_moe_family();
const Family& qwen3_moe_family();
const Family& qwen3_next_family();

}  // namespace moeflux::model
