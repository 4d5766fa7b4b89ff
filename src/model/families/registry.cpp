// Every family moeflux reads. A new one is added here, and nowhere else.
#include <array>

#include "model/families/families.h"

namespace moeflux::model {

std::span<const Family* const> all_families() {
  static const std::array<const Family*, 1> kFamilies{&qwen3_5_moe_family()};
  return kFamilies;
}

}  // namespace moeflux::model
