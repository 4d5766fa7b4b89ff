#include "text/pattern.h"

namespace moeflux::text {

Pattern Pattern::parse(const JsonNode& node) {
  if (const auto regex = node.find("Regex")) return Pattern(Regex::compile(regex->string(), regex->where()));
  const JsonNode literal = node.at("String");
  if (literal.string().empty()) literal.reject(ErrorCode::InvalidModel, "must not be empty");
  return Pattern(std::string(literal.string()));
}

std::vector<Match> Pattern::find_all(std::string_view text, MatchBudget& budget) const {
  if (const auto* regex = std::get_if<Regex>(&what_)) return regex->find_all(text, budget);
  const std::string& needle = std::get<std::string>(what_);
  std::vector<Match> matches;
  for (std::size_t at = text.find(needle); at != std::string_view::npos;
       at = text.find(needle, at + needle.size()))
    matches.push_back({at, at + needle.size()});
  return matches;
}

}  // namespace moeflux::text
