// JSON from untrusted files: small documents (configs) as a tree.
//
// Large documents (safetensors headers, tokenizer.json) are read with simdjson where they are used.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/json_fwd.h"

namespace moeflux {

// Parses one document. `origin` (a path) starts every message. Rejected with InvalidModel: syntax
// errors (line and column are named), nesting over 64 levels, an object with the same key twice or over 8192 keys.
Json parse_json(std::string_view text, std::string_view origin);

// Typed look-up in an object. A key that is absent or null gives nullopt; a value of another type is
// an InvalidModel error that names origin and key. Integers must be integral and fit; 1.0 is not one.
std::optional<std::int64_t> json_int(const Json& object, std::string_view key, std::string_view origin);
std::optional<double> json_number(const Json& object, std::string_view key, std::string_view origin);
std::optional<bool> json_bool(const Json& object, std::string_view key, std::string_view origin);
std::optional<std::string> json_string(const Json& object, std::string_view key, std::string_view origin);
// A pointer to the value, or nullptr when absent or null.
const Json* json_find(const Json& object, std::string_view key);

}  // namespace moeflux
