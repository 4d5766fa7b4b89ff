#include "text/pretokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "text/byte_alphabet.h"
#include "text/utf8.h"

namespace moeflux::text {
namespace {

constexpr std::size_t kMaxStages = 32;  // the longest published sequence has eight

// What ByteLevel cuts by when it is told to use a regular expression.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// A stretch of a piece: matched or between matches. Stretches cover the piece without gaps.
struct Stretch {
  std::size_t begin, end;
  bool matched;
};

std::vector<Stretch> stretches(const std::vector<Match>& matches, std::size_t size, bool invert) {
  std::vector<Stretch> out;
  std::size_t done = 0;
  for (const Match& match : matches) {
    if (match.begin > done) out.push_back({done, match.begin, invert});
    out.push_back({match.begin, match.end, !invert});
    done = match.end;
  }
  if (done < size) out.push_back({done, size, invert});
  return out;
}

// Joins each matched stretch whose predecessor (in the order given) is not matched to that
// predecessor; `forward` tells which end of the predecessor moves.
std::vector<Match> merge_matched(const std::vector<Stretch>& in, bool forward) {
  std::vector<Match> out;
  bool previous_matched = false;
  for (const Stretch& s : in) {
    if (s.matched && !previous_matched && !out.empty()) {
      (forward ? out.back().end : out.back().begin) = forward ? s.end : s.begin;
    } else {
      out.push_back({s.begin, s.end});
    }
    previous_matched = s.matched;
  }
  return out;
}

std::vector<Match> merge_alike(const std::vector<Stretch>& in) {
  std::vector<Match> out;
  bool previous_matched = false;
  for (const Stretch& s : in) {
    if (s.matched == previous_matched && !out.empty()) {
      out.back().end = s.end;
    } else {
      out.push_back({s.begin, s.end});
    }
    previous_matched = s.matched;
  }
  return out;
}

std::vector<Match> arrange(std::vector<Stretch> in, SplitBehavior behavior) {
  std::vector<Match> out;
  switch (behavior) {
    case SplitBehavior::Isolated:
      for (const Stretch& s : in) out.push_back({s.begin, s.end});
      break;
    case SplitBehavior::Removed:
      for (const Stretch& s : in)
        if (!s.matched) out.push_back({s.begin, s.end});
      break;
    case SplitBehavior::MergedWithPrevious:
      out = merge_matched(in, true);
      break;
    case SplitBehavior::MergedWithNext:
      std::reverse(in.begin(), in.end());
      out = merge_matched(in, false);
      std::reverse(out.begin(), out.end());
      break;
    case SplitBehavior::Contiguous:
      out = merge_alike(in);
      break;
  }
  return out;
}

std::vector<Match> find_digits(std::string_view text) {
  std::vector<Match> matches;
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(step.code_point));
    if (category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
        category == UTF8PROC_CATEGORY_NO)
      matches.push_back({i, i + step.size});
    i += step.size;
  }
  return matches;
}

// Replaces every piece by the parts that `cut` gives for it; empty parts are dropped.
template <class Cut>
void cut_pieces(PreTokens& tokens, const Cut& cut) {
  std::vector<Match> out;
  out.reserve(tokens.pieces.size());
  for (std::size_t i = 0; i < tokens.pieces.size(); ++i) {
    const std::size_t base = tokens.pieces[i].begin;
    for (const Match& part : cut(tokens.piece(i)))
      if (part.end > part.begin) out.push_back({base + part.begin, base + part.end});
  }
  tokens.pieces = std::move(out);
}

// Rewrites every piece by what `append` adds for it to the new text.
template <class Append>
void rewrite_pieces(PreTokens& tokens, const Append& append) {
  std::string out;
  out.reserve(tokens.text.size() + tokens.text.size() / 2);
  for (std::size_t i = 0; i < tokens.pieces.size(); ++i) {
    const std::size_t begin = out.size();
    append(out, tokens.piece(i));
    tokens.pieces[i] = {begin, out.size()};
  }
  tokens.text = std::move(out);
}

SplitBehavior parse_behavior(const JsonNode& node) {
  constexpr std::pair<std::string_view, SplitBehavior> kNames[] = {
      {"Isolated", SplitBehavior::Isolated},
      {"Removed", SplitBehavior::Removed},
      {"MergedWithPrevious", SplitBehavior::MergedWithPrevious},
      {"MergedWithNext", SplitBehavior::MergedWithNext},
      {"Contiguous", SplitBehavior::Contiguous},
  };
  const std::string_view name = node.string();
  for (const auto& [known, behavior] : kNames)
    if (name == known) return behavior;
  node.reject(ErrorCode::Unsupported, "split behavior {} is not supported", shown(name));
}

}  // namespace

PreTokenizer PreTokenizer::parse(const JsonNode& node) {
  PreTokenizer pre;
  pre.parse_into(node, 0);
  return pre;
}

void PreTokenizer::parse_into(const JsonNode& node, int depth) {
  if (depth > kMaxSequenceNesting)
    node.reject(ErrorCode::Unsupported, "pre-tokenizers nested deeper than {}", kMaxSequenceNesting);
  if (stages_.size() >= kMaxStages)
    node.reject(ErrorCode::Unsupported, "more than {} pre-tokenizers", kMaxStages);
  const std::string_view type = node.type();
  if (type == "Sequence") {
    for (const JsonNode& child : node.at("pretokenizers").elements()) parse_into(child, depth + 1);
  } else if (type == "Split") {
    stages_.emplace_back(Split{Pattern::parse(node.at("pattern")), parse_behavior(node.at("behavior")),
                               node.boolean_or("invert", false)});
  } else if (type == "ByteLevel") {
    // The space comes before the cut, the spelling after it.
    if (node.boolean_or("add_prefix_space", true)) stages_.emplace_back(PrefixSpace{});
    if (node.boolean_or("use_regex", true))
      stages_.emplace_back(
          Split{Pattern(Regex::compile(kByteLevelPattern, node.where())), SplitBehavior::Isolated, false});
    stages_.emplace_back(Spell{});
  } else if (type == "Digits") {
    stages_.emplace_back(Digits{node.boolean_or("individual_digits", false)});
  } else {
    node.reject(ErrorCode::Unsupported, "pre-tokenizer {} is not supported", shown(type));
  }
}

PreTokens PreTokenizer::run(std::string_view text, MatchBudget& budget) const {
  PreTokens tokens{std::string(text), {}};
  if (!text.empty()) tokens.pieces.push_back({0, text.size()});
  for (const Stage& stage : stages_) {
    if (const auto* split = std::get_if<Split>(&stage)) {
      cut_pieces(tokens, [&](std::string_view piece) {
        return arrange(stretches(split->pattern.find_all(piece, budget), piece.size(), split->invert),
                       split->behavior);
      });
    } else if (const auto* digits = std::get_if<Digits>(&stage)) {
      const auto behavior = digits->individual ? SplitBehavior::Isolated : SplitBehavior::Contiguous;
      cut_pieces(tokens, [&](std::string_view piece) {
        return arrange(stretches(find_digits(piece), piece.size(), false), behavior);
      });
    } else if (std::holds_alternative<PrefixSpace>(stage)) {
      rewrite_pieces(tokens, [](std::string& out, std::string_view piece) {
        if (!piece.starts_with(' ')) out.push_back(' ');
        out.append(piece);
      });
    } else {
      rewrite_pieces(tokens, [](std::string& out, std::string_view piece) { append_spelled(out, piece); });
    }
  }
  return tokens;
}

std::size_t PreTokenizer::byte_level_stages() const noexcept {
  return static_cast<std::size_t>(std::count_if(
      stages_.begin(), stages_.end(), [](const Stage& s) { return std::holds_alternative<Spell>(s); }));
}

}  // namespace moeflux::text
