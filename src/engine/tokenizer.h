// The tokenizer of a folder behind the public Tokenizer: files read here, text handled in text/.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include <moeflux/engine.h>

#include "text/tokenizer.h"

namespace moeflux {

struct Tokenizer::Impl {
  text::Tokenizer text;
};

namespace engine {

// nullopt when the folder has no tokenizer.json.
std::optional<text::Tokenizer> load_tokenizer(const std::filesystem::path& folder);

}  // namespace engine
}  // namespace moeflux
