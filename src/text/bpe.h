// Byte pair encoding: a piece of text to token ids by a ranked list of merges.
//
// A piece starts as its single characters; again and again the adjacent pair with the lowest rank
// is merged, the leftmost among equals, until no pair has a rank. O(n log n) in the piece's length.
// Immutable after parse(); may be used by several threads at once, each with its own PieceCache.
#pragma once

#include <moeflux/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "text/byte_alphabet.h"
#include "text/json_node.h"
#include "text/vocab.h"

namespace moeflux::text {

// Pairs of ids to rank and result: open addressing, filled once.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank;
    TokenId result;
  };

  explicit MergeTable(std::size_t n = 0);
  // A pair given again takes the later rank. False when ids were chosen to collide.
  bool set(TokenId left, TokenId right, Merge merge);
  const Merge* find(TokenId left, TokenId right) const noexcept;
  std::size_t size() const noexcept { return size_; }

 private:
  struct Slot {
    std::uint64_t key;
    Merge merge;
  };
  std::optional<std::size_t> locate(std::uint64_t key) const noexcept;

  std::vector<Slot> slots_;
  std::size_t size_ = 0;
};

// Pieces already encoded during one call: words repeat. Bounded: short pieces only, and no new ones
// once it is full.
class PieceCache {
 public:
  const std::vector<TokenId>* find(const std::string& piece) const;
  void put(std::string piece, std::vector<TokenId> ids);
  static bool fits(std::string_view piece) noexcept;

 private:
  std::unordered_map<std::string, std::vector<TokenId>> entries_;
};

class Bpe {
 public:
  // Reads the "model" object. InvalidModel: ids that are negative, too large or used twice, merges that
  // name or make a string outside the vocabulary. Unsupported (named): another type than BPE,
  // byte_fallback, dropout, unknown-token handling, subword prefixes and suffixes.
  //
  // `reserved` are the special tokens: they are recognised in a text as a whole or not at all, so
  // no merge and no whole piece may make one of them out of plain text.
  static Bpe parse(const JsonNode& node, const std::unordered_set<std::string_view>& reserved);

  // Appends the ids of one piece (valid UTF-8, not empty). InvalidModel when a character is not in
  // the vocabulary.
  void encode(std::string_view piece, PieceCache& cache, std::vector<TokenId>& out) const;

  const Vocab& vocab() const noexcept { return vocab_; }
  std::size_t n_merges() const noexcept { return merges_.size(); }

 private:
  Bpe() = default;
  void parse_vocab(const JsonNode& node);
  void parse_merges(const JsonNode& node, const std::unordered_set<std::string_view>& reserved);
  TokenId char_id(std::string_view one_char, char32_t c) const;
  std::vector<TokenId> merge_all(std::string_view piece) const;

  Vocab vocab_;
  MergeTable merges_;
  std::array<TokenId, kByteAlphabetEnd> char_ids_{};  // -1: not in the vocabulary
  bool ignore_merges_ = false;
  std::unordered_set<TokenId> reserved_ids_;
  std::string where_;
};

}  // namespace moeflux::text
