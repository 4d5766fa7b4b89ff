// Added tokens: strings that are found in a text as a whole, before anything else is done with it.
//
// Immutable after construction; may be used by several threads at once.
#pragma once

#include <moeflux/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/json_node.h"

namespace moeflux::text {

struct AddedToken {
  TokenId id;
  std::string content;
  bool single_word;  // only where neither neighbour is a word character
  bool lstrip;       // takes the white space on its left
  bool rstrip;       // takes the white space on its right
  bool normalized;   // looked for in the normalized text, else in the text as it came
  bool special;      // control token: found on request only, left out of decoded text on request
};

// Reads the "added_tokens" array. InvalidModel: ids out of range, empty contents, an id or a content
// given twice with another partner. Unsupported: contents over 512 bytes.
std::vector<AddedToken> parse_added_tokens(const JsonNode& node);

// A part of a text: an added token or, without id, what lies between two of them.
struct Segment {
  std::size_t begin, end;  // byte offsets
  std::optional<TokenId> token;
};

// Finds the leftmost and, among those, the longest token, again and again without overlap.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher();
  // `content` is what to look for (the token's content, normalized if need be). Not empty.
  void add(const AddedToken& token, std::string_view content);

  // Segments in order, none empty. With find_special false, special tokens stay part of the text
  // around them; they still end the search for others inside them.
  std::vector<Segment> split(std::string_view text, bool find_special) const;

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  struct Node {
    std::vector<std::pair<std::uint8_t, std::uint32_t>> children;  // byte -> node
    std::uint32_t rule = kNone;
  };
  struct Rule {
    TokenId id;
    bool single_word, lstrip, rstrip, special;
  };
  struct Found {
    std::size_t end;
    std::uint32_t rule;
  };

  std::uint32_t child(std::uint32_t node, std::uint8_t byte) const noexcept;
  std::optional<Found> longest_at(std::string_view text, std::size_t begin) const noexcept;

  std::vector<Node> nodes_;  // a trie; node 0 is the root
  std::array<bool, 256> first_{};
  std::vector<Rule> rules_;
};

}  // namespace moeflux::text
