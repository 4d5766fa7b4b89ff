// What is known about the keys of config.json beyond the families that read them.
#pragma once

#include <string_view>

#include "core/json_fwd.h"

namespace moeflux::format {

enum class KeyEffect {
  None,     // never changes a forward pass: training, bookkeeping, other modalities, extra heads; or a
            // value that means "nothing special", such as attention_bias: false, or null
  Changes,  // changes the arithmetic of some model without any tensor's shape showing it
  Unknown,  // not on either list
};
KeyEffect key_effect(std::string_view key, const Json& value);

}  // namespace moeflux::format
