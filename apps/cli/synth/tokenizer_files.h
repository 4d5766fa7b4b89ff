// A tokenizer of bytes for models that never learned any text: 256 byte tokens, then three special ones.
#pragma once

#include <nlohmann/json.hpp>

namespace moeflux::cli::synth {

inline constexpr int kEndOfText = 256;
inline constexpr int kTurnStart = 257;
inline constexpr int kTurnEnd = 258;

nlohmann::ordered_json tokenizer_json();
nlohmann::ordered_json generation_config_json();

}  // namespace moeflux::cli::synth
