// One function per family file.
#pragma once

#include "model/family.h"

namespace moeflux::model {

const Family& qwen3_5_moe_family();

}  // namespace moeflux::model
