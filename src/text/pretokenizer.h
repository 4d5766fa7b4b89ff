// The pre-tokenizer of a tokenizer file: cuts a text into the pieces that are encoded one by one.
//
// Known types: Split, ByteLevel, Digits and Sequence of these. The stages run one after the other;
// each cuts every piece of the one before on its own, so a look-ahead ends where its piece ends.
// Immutable after parse(); may be used by several threads at once.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/json_node.h"
#include "text/pattern.h"
#include "text/regex.h"

namespace moeflux::text {

// Pieces in order, as byte ranges of `text`, none empty. A stage may rewrite the text (ByteLevel
// spells every byte, see byte_alphabet.h) and may leave parts out (Split with Removed).
struct PreTokens {
  std::string text;
  std::vector<Match> pieces;

  std::string_view piece(std::size_t i) const {
    return std::string_view(text).substr(pieces[i].begin, pieces[i].end - pieces[i].begin);
  }
};

// What happens to the parts that a pattern matches.
enum class SplitBehavior { Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous };

class PreTokenizer {
 public:
  PreTokenizer() = default;  // the whole text is one piece
  // InvalidModel for a broken description, Unsupported for another type (named).
  static PreTokenizer parse(const JsonNode& node);

  // Text must be valid UTF-8. InvalidArgument when the match budget is spent.
  PreTokens run(std::string_view text, MatchBudget& budget) const;

  // How often a text is spelled in the byte alphabet; byte-level vocabularies want exactly once.
  std::size_t byte_level_stages() const noexcept;

 private:
  struct Split {
    Pattern pattern;
    SplitBehavior behavior;
    bool invert;  // the matches are what lies between the pattern's matches
  };
  struct Digits {
    bool individual;
  };
  struct PrefixSpace {};  // a space before each piece that does not start with one
  struct Spell {};        // bytes to the characters of the byte alphabet
  using Stage = std::variant<Split, Digits, PrefixSpace, Spell>;

  void parse_into(const JsonNode& node, int depth);

  std::vector<Stage> stages_;
};

}  // namespace moeflux::text
