#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <queue>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "text/utf8.h"

namespace moeflux::text {
namespace {

constexpr std::size_t kMaxProbes = 1024;           // as in vocab.cpp
constexpr std::uint64_t kFree = UINT64_MAX;        // no pair of ids below 2^24 has this key
constexpr std::size_t kMaxCachedPiece = 64;        // bytes; longer pieces hardly repeat
constexpr std::size_t kMaxCachedPieces = 1 << 15;  // some megabytes at most
constexpr TokenId kNoToken{-1};

std::uint64_t key_of(TokenId left, TokenId right) noexcept {
  return (static_cast<std::uint64_t>(raw(left)) << 24) | static_cast<std::uint64_t>(raw(right));
}

// Multiplicative hashing; the high bits hold the mix of both ids.
std::uint64_t hash_of(std::uint64_t key) noexcept {
  key *= 0x9E3779B97F4A7C15u;
  return key ^ (key >> 29);
}

// One character or merged run of a piece; a doubly linked list in an array.
struct Symbol {
  TokenId id;  // kNoToken: swallowed by its left neighbour
  std::int32_t previous, next;
};

struct Candidate {
  std::uint32_t rank;
  std::int32_t position;
  TokenId result;

  // A max-heap of these gives the lowest rank first, the leftmost among equals.
  bool operator<(const Candidate& other) const noexcept {
    return std::tie(other.rank, other.position) < std::tie(rank, position);
  }
};

class Merger {
 public:
  Merger(std::vector<Symbol> symbols, const MergeTable& merges)
      : symbols_(std::move(symbols)), merges_(merges) {
    std::vector<Candidate> found;
    for (std::size_t i = 0; i + 1 < symbols_.size(); ++i)
      if (const auto* merge = merges_.find(symbols_[i].id, symbols_[i + 1].id))
        found.push_back({merge->rank, static_cast<std::int32_t>(i), merge->result});
    heap_ = std::priority_queue<Candidate>(std::less<Candidate>(), std::move(found));
  }

  std::vector<TokenId> run() {
    while (!heap_.empty()) {
      const Candidate best = heap_.top();
      heap_.pop();
      if (still_there(best)) apply(best);
    }
    std::vector<TokenId> ids;
    for (const Symbol& s : symbols_)
      if (s.id != kNoToken) ids.push_back(s.id);
    return ids;
  }

 private:
  Symbol& at(std::int32_t position) { return symbols_[static_cast<std::size_t>(position)]; }

  // Candidates are not removed when a neighbour changes; they are recognised here instead.
  bool still_there(const Candidate& c) {
    const Symbol& left = at(c.position);
    if (left.id == kNoToken || left.next < 0) return false;
    const auto* merge = merges_.find(left.id, at(left.next).id);
    return merge != nullptr && merge->rank == c.rank;
  }

  void apply(const Candidate& c) {
    Symbol& left = at(c.position);
    Symbol& right = at(left.next);
    left.id = c.result;
    left.next = right.next;
    right.id = kNoToken;
    if (left.next >= 0) at(left.next).previous = c.position;
    if (left.previous >= 0) consider(left.previous);
    if (left.next >= 0) consider(c.position);
  }

  void consider(std::int32_t position) {
    const Symbol& left = at(position);
    if (const auto* merge = merges_.find(left.id, at(left.next).id))
      heap_.push({merge->rank, position, merge->result});
  }

  std::vector<Symbol> symbols_;
  const MergeTable& merges_;
  std::priority_queue<Candidate> heap_;
};

// "a b" as older files write a merge.
std::pair<std::string_view, std::string_view> split_pair(std::string_view text) {
  const std::size_t space = text.find(' ');
  if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) return {};
  return {text.substr(0, space), text.substr(space + 1)};
}

// Either form of a merge; empty strings when it is neither.
std::pair<std::string_view, std::string_view> read_merge(simdjson::dom::element element) {
  std::string_view text;
  if (element.get_string().get(text) == simdjson::SUCCESS) return split_pair(text);
  simdjson::dom::array pair;
  if (element.get_array().get(pair) != simdjson::SUCCESS) return {};
  std::string_view parts[2];
  std::size_t n = 0;
  for (const simdjson::dom::element part : pair)
    if (n == 2 || part.get_string().get(parts[n++]) != simdjson::SUCCESS) return {};
  return {parts[0], parts[1]};
}

void reject_features(const JsonNode& node) {
  if (node.type() != "BPE")
    node.reject(ErrorCode::Unsupported, "tokenizer model {} is not supported", shown(node.type()));
  for (const std::string_view key : {"byte_fallback", "fuse_unk"})
    if (node.boolean_or(key, false))
      node.reject(ErrorCode::Unsupported, "\"{}\": true is not supported", key);
  for (const std::string_view key : {"unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
    if (const auto value = node.find(key); value && !value->string().empty())
      node.reject(ErrorCode::Unsupported, "\"{}\": {} is not supported", key, shown(value->string()));
  if (const auto dropout = node.find("dropout"); dropout && dropout->number() != 0.0)
    node.reject(ErrorCode::Unsupported, "\"dropout\": {} is not supported", dropout->number());
}

}  // namespace

MergeTable::MergeTable(std::size_t n)
    : slots_(std::bit_ceil(std::max<std::size_t>(16, 2 * n)), Slot{kFree, {}}) {}

std::optional<std::size_t> MergeTable::locate(std::uint64_t key) const noexcept {
  const std::size_t mask = slots_.size() - 1;
  const std::uint64_t hash = hash_of(key);
  for (std::size_t probe = 0; probe < kMaxProbes; ++probe) {
    const std::size_t at = (hash + probe) & mask;
    if (slots_[at].key == key || slots_[at].key == kFree) return at;
  }
  return std::nullopt;
}

bool MergeTable::set(TokenId left, TokenId right, Merge merge) {
  const std::uint64_t key = key_of(left, right);
  const auto at = locate(key);
  if (!at || 2 * size_ > slots_.size()) return false;
  size_ += slots_[*at].key == kFree ? 1 : 0;
  slots_[*at] = {key, merge};
  return true;
}

const MergeTable::Merge* MergeTable::find(TokenId left, TokenId right) const noexcept {
  const std::uint64_t key = key_of(left, right);
  const auto at = locate(key);
  return at && slots_[*at].key == key ? &slots_[*at].merge : nullptr;
}

bool PieceCache::fits(std::string_view piece) noexcept { return piece.size() <= kMaxCachedPiece; }

const std::vector<TokenId>* PieceCache::find(const std::string& piece) const {
  const auto it = entries_.find(piece);
  return it == entries_.end() ? nullptr : &it->second;
}

void PieceCache::put(std::string piece, std::vector<TokenId> ids) {
  if (entries_.size() < kMaxCachedPieces) entries_.emplace(std::move(piece), std::move(ids));
}

Bpe Bpe::parse(const JsonNode& node, const std::unordered_set<std::string_view>& reserved) {
  reject_features(node);
  Bpe bpe;
  bpe.where_ = node.where();
  bpe.ignore_merges_ = node.boolean_or("ignore_merges", false);
  bpe.parse_vocab(node.at("vocab"));
  bpe.parse_merges(node.at("merges"), reserved);
  for (const std::string_view token : reserved)
    if (const auto id = bpe.vocab_.find(token)) bpe.reserved_ids_.insert(*id);
  for (char32_t c = 0; c < kByteAlphabetEnd; ++c) {
    std::string one;
    append_utf8(one, c);
    bpe.char_ids_[c] = bpe.vocab_.find(one).value_or(kNoToken);
  }
  return bpe;
}

void Bpe::parse_vocab(const JsonNode& node) {
  const simdjson::dom::object entries = node.object();
  vocab_ = Vocab(entries.size());
  for (const auto [token, value] : entries) {
    std::int64_t id = 0;
    if (value.get_int64().get(id) != simdjson::SUCCESS || id < 0 || id >= kMaxTokenIds)
      node.reject(ErrorCode::InvalidModel, "the id of {} must be an integer from 0 to {}", shown(token),
                  kMaxTokenIds - 1);
    const auto added = vocab_.add(token, static_cast<TokenId>(id));
    if (added == Vocab::Added::IdTaken)
      node.reject(ErrorCode::InvalidModel, "{} and {} have the same id {}",
                  shown(vocab_.token(static_cast<TokenId>(id))), shown(token), id);
    if (added == Vocab::Added::NoRoom)
      node.reject(ErrorCode::InvalidModel, "{} does not fit: too many strings or strings that collide",
                  shown(token));
    if (added != Vocab::Added::Yes) node.reject(ErrorCode::InvalidModel, "{} appears twice", shown(token));
  }
  if (vocab_.size() == 0) node.reject(ErrorCode::InvalidModel, "is empty");
}

void Bpe::parse_merges(const JsonNode& node, const std::unordered_set<std::string_view>& reserved) {
  const simdjson::dom::array entries = node.array();
  // simdjson's own count stops at 2^24 - 1.
  std::size_t n = 0;
  for ([[maybe_unused]] const simdjson::dom::element element : entries) ++n;
  merges_ = MergeTable(n);
  std::uint32_t rank = 0;
  std::string joined;
  for (const simdjson::dom::element element : entries) {
    const auto [left, right] = read_merge(element);
    const auto reject = [&](std::string_view why, std::string_view what) {
      node.reject(ErrorCode::InvalidModel, "merge {}: {} {}", rank, why, what);
    };
    if (left.empty() || right.empty()) reject("must be \"a b\" or [\"a\", \"b\"]", "");
    const auto left_id = vocab_.find(left), right_id = vocab_.find(right);
    if (!left_id) reject("not in the vocabulary:", shown(left));
    if (!right_id) reject("not in the vocabulary:", shown(right));
    joined.assign(left).append(right);
    const auto result = vocab_.find(joined);
    if (!result) reject("its result is not in the vocabulary:", shown(joined));
    if (!reserved.contains(joined) && !merges_.set(*left_id, *right_id, {rank, *result}))
      reject("ids collide in the hash table", "");
    ++rank;
  }
}

TokenId Bpe::char_id(std::string_view one_char, char32_t c) const {
  const TokenId id = c < kByteAlphabetEnd ? char_ids_[c] : vocab_.find(one_char).value_or(kNoToken);
  if (id == kNoToken)
    fail(ErrorCode::InvalidModel, "{}.vocab: no token for the character {}", where_, shown(one_char));
  return id;
}

std::vector<TokenId> Bpe::merge_all(std::string_view piece) const {
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (std::size_t i = 0; i < piece.size();) {
    const Utf8Step step = utf8_step(piece, i);
    const auto position = static_cast<std::int32_t>(symbols.size());
    symbols.push_back({char_id(piece.substr(i, step.size), step.code_point), position - 1, position + 1});
    i += step.size;
  }
  symbols.back().next = -1;
  return Merger(std::move(symbols), merges_).run();
}

void Bpe::encode(std::string_view piece, PieceCache& cache, std::vector<TokenId>& out) const {
  if (ignore_merges_) {
    if (const auto id = vocab_.find(piece); id && !reserved_ids_.contains(*id)) {
      out.push_back(*id);
      return;
    }
  }
  std::string key;
  if (PieceCache::fits(piece)) {
    key = piece;
    if (const auto* known = cache.find(key)) {
      out.insert(out.end(), known->begin(), known->end());
      return;
    }
  }
  std::vector<TokenId> ids = merge_all(piece);
  out.insert(out.end(), ids.begin(), ids.end());
  if (!key.empty()) cache.put(std::move(key), std::move(ids));
}

}  // namespace moeflux::text
