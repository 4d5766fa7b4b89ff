#include "text/added_tokens.h"

#include <algorithm>
#include <unordered_map>

#include "text/regex.h"
#include "text/utf8.h"
#include "text/vocab.h"

namespace moeflux::text {
namespace {

// A search may read this many bytes at every position of a text, so the bound is one of time.
constexpr std::size_t kMaxContentBytes = 512;

// The code point that ends at `offset` > 0 of valid UTF-8, and its size.
Utf8Step step_before(std::string_view text, std::size_t offset) noexcept {
  std::size_t begin = offset - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return utf8_step(text, begin);
}

bool stands_alone(std::string_view text, std::size_t begin, std::size_t end) noexcept {
  const bool left = begin == 0 || !is_word_char(step_before(text, begin).code_point);
  return left && (end == text.size() || !is_word_char(utf8_step(text, end).code_point));
}

std::size_t skip_space_left(std::string_view text, std::size_t begin, std::size_t floor) noexcept {
  while (begin > floor) {
    const Utf8Step step = step_before(text, begin);
    if (!is_space_char(step.code_point)) break;
    begin -= step.size;
  }
  return std::max(begin, floor);
}

std::size_t skip_space_right(std::string_view text, std::size_t end) noexcept {
  while (end < text.size()) {
    const Utf8Step step = utf8_step(text, end);
    if (!is_space_char(step.code_point)) break;
    end += step.size;
  }
  return end;
}

AddedToken parse_one(const JsonNode& node) {
  const JsonNode content = node.at("content");
  if (content.string().empty()) content.reject(ErrorCode::InvalidModel, "must not be empty");
  if (content.string().size() > kMaxContentBytes)
    content.reject(ErrorCode::Unsupported, "an added token of {} bytes, the limit is {}",
                   content.string().size(), kMaxContentBytes);
  const std::int64_t id = node.at("id").integer();
  if (id < 0 || id >= kMaxTokenIds)
    node.reject(ErrorCode::InvalidModel, "the id of {} must be an integer from 0 to {}",
                shown(content.string()), kMaxTokenIds - 1);
  const bool special = node.boolean_or("special", false);
  return {static_cast<TokenId>(id),
          std::string(content.string()),
          node.boolean_or("single_word", false),
          node.boolean_or("lstrip", false),
          node.boolean_or("rstrip", false),
          node.boolean_or("normalized", !special),
          special};
}

}  // namespace

std::vector<AddedToken> parse_added_tokens(const JsonNode& node) {
  std::vector<AddedToken> tokens;
  std::unordered_map<TokenId, std::string> by_id;
  std::unordered_map<std::string, TokenId> by_content;
  for (const JsonNode& element : node.elements()) {
    AddedToken token = parse_one(element);
    const auto [same_id, new_id] = by_id.emplace(token.id, token.content);
    const auto [same_content, new_content] = by_content.emplace(token.content, token.id);
    if (same_id->second != token.content)
      element.reject(ErrorCode::InvalidModel, "{} and {} have the same id {}", shown(same_id->second),
                     shown(token.content), raw(token.id));
    if (same_content->second != token.id)
      element.reject(ErrorCode::InvalidModel, "{} appears twice, with ids {} and {}", shown(token.content),
                     raw(same_content->second), raw(token.id));
    if (new_id && new_content) tokens.push_back(std::move(token));
  }
  return tokens;
}

AddedTokenMatcher::AddedTokenMatcher() : nodes_(1) {}

std::uint32_t AddedTokenMatcher::child(std::uint32_t node, std::uint8_t byte) const noexcept {
  for (const auto& [label, target] : nodes_[node].children)
    if (label == byte) return target;
  return kNone;
}

void AddedTokenMatcher::add(const AddedToken& token, std::string_view content) {
  std::uint32_t node = 0;
  for (const char c : content) {
    const auto byte = static_cast<std::uint8_t>(c);
    std::uint32_t next = child(node, byte);
    if (next == kNone) {
      next = static_cast<std::uint32_t>(nodes_.size());
      nodes_.emplace_back();
      nodes_[node].children.emplace_back(byte, next);
    }
    node = next;
  }
  first_[static_cast<std::uint8_t>(content.front())] = true;
  nodes_[node].rule = static_cast<std::uint32_t>(rules_.size());
  rules_.push_back({token.id, token.single_word, token.lstrip, token.rstrip, token.special});
}

std::optional<AddedTokenMatcher::Found> AddedTokenMatcher::longest_at(std::string_view text,
                                                                      std::size_t begin) const noexcept {
  std::optional<Found> found;
  std::uint32_t node = 0;
  for (std::size_t i = begin; i < text.size(); ++i) {
    node = child(node, static_cast<std::uint8_t>(text[i]));
    if (node == kNone) break;
    if (nodes_[node].rule != kNone) found = {i + 1, nodes_[node].rule};
  }
  return found;
}

std::vector<Segment> AddedTokenMatcher::split(std::string_view text, bool find_special) const {
  std::vector<Segment> segments;
  std::size_t done = 0;
  for (std::size_t i = 0; i < text.size();) {
    const auto found = first_[static_cast<std::uint8_t>(text[i])] ? longest_at(text, i) : std::nullopt;
    if (!found) {
      ++i;
      continue;
    }
    std::size_t begin = i, end = found->end;
    i = end;
    const Rule& rule = rules_[found->rule];
    if (rule.special && !find_special) continue;
    if (rule.single_word && !stands_alone(text, begin, end)) continue;
    if (rule.lstrip) begin = skip_space_left(text, begin, done);
    if (rule.rstrip) i = end = skip_space_right(text, end);
    if (begin > done) segments.push_back({done, begin, std::nullopt});
    segments.push_back({begin, end, rule.id});
    done = end;
  }
  if (done < text.size()) segments.push_back({done, text.size(), std::nullopt});
  return segments;
}

}  // namespace moeflux::text
