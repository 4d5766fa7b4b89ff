// What a tokenizer file searches for: {"Regex": ".."} or {"String": ".."}.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/json_node.h"
#include "text/regex.h"

namespace moeflux::text {

// Immutable; may be used by several threads at once.
class Pattern {
 public:
  // InvalidModel for a broken regular expression, an empty string or another kind of pattern.
  static Pattern parse(const JsonNode& node);
  explicit Pattern(Regex regex) : what_(std::move(regex)) {}

  // As Regex::find_all; a string is matched byte for byte.
  std::vector<Match> find_all(std::string_view text, MatchBudget& budget) const;

 private:
  explicit Pattern(std::string literal) : what_(std::move(literal)) {}

  std::variant<std::string, Regex> what_;
};

}  // namespace moeflux::text
