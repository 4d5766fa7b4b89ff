// The normalizer of a tokenizer file: what happens to text before it is split.
//
// Known types: NFC, NFD, NFKC, NFKD, Replace, Prepend and Sequence of these. Immutable after parse();
// may be used by several threads at once.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/json_node.h"
#include "text/pattern.h"
#include "text/regex.h"

namespace moeflux::text {

enum class UnicodeForm { Nfc, Nfd, Nfkc, Nfkd };

// Text must be valid UTF-8. Time is O(n log n) for every input, also for endless runs of combining
// marks. OutOfMemory is the only failure.
std::string normalize_unicode(std::string_view text, UnicodeForm form);

class Normalizer {
 public:
  Normalizer() = default;  // changes nothing
  // InvalidModel for a broken description, Unsupported for another type (named).
  static Normalizer parse(const JsonNode& node);

  // Text must be valid UTF-8. InvalidArgument when the match budget is spent or when replacements
  // make the text more than 64 times as long.
  std::string apply(std::string_view text, MatchBudget& budget) const;

  bool empty() const noexcept { return steps_.empty(); }
  std::string description() const;  // "NFC", "NFC + Replace", "no normalizer"

 private:
  struct Replace {
    Pattern pattern;
    std::string content;
  };
  struct Prepend {
    std::string content;
  };
  using Step = std::variant<UnicodeForm, Replace, Prepend>;

  void parse_into(const JsonNode& node, int depth);
  static std::string apply_replace(const Replace& step, std::string_view text, MatchBudget& budget);

  std::vector<Step> steps_;
};

}  // namespace moeflux::text
