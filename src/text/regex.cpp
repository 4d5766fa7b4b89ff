#include "text/regex.h"

#include <oniguruma.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "text/utf8.h"

namespace moeflux::text {
namespace {

constexpr std::size_t kMaxPatternBytes = 64 * 1024;  // the longest published pattern is about 2 KiB
constexpr int kMaxGroupNesting = 200;                // keeps the recursive parser far from the stack's end

// Ordinary patterns take one to five steps per byte; ten million take well under a second.
constexpr std::uint64_t kBaseSteps = 10'000'000;
constexpr std::uint64_t kStepsPerByte = 64;

// A search that needs few steps must not be charged many, and Oniguruma does not say how many it
// took. So each search starts with a small limit that grows fourfold until it suffices, and only
// limits that were hit are charged.
constexpr std::uint64_t kFirstLimit = 128;
constexpr std::uint64_t kLimitGrowth = 4;

// A greedy run keeps one stack entry per character; two per byte leave room for groups.
constexpr std::size_t kBaseStackEntries = 64 * 1024;
constexpr std::size_t kStackEntriesPerByte = 2;

void initialize_once() {
  static const int result = [] {
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    return onig_initialize(encodings, 1);
  }();
  if (result != ONIG_NORMAL) fail(ErrorCode::Internal, "Oniguruma could not be initialised ({})", result);
}

const OnigUChar* bytes_of(std::string_view text) noexcept {
  // The engine wants a pointer even for no text.
  return reinterpret_cast<const OnigUChar*>(text.data() != nullptr ? text.data() : "");
}

std::string error_text(int code, OnigErrorInfo* info) {
  OnigUChar buffer[ONIG_MAX_ERROR_MESSAGE_LEN];
  const int n =
      info != nullptr ? onig_error_code_to_str(buffer, code, info) : onig_error_code_to_str(buffer, code);
  return replace_invalid_utf8(
      {reinterpret_cast<const char*>(buffer), static_cast<std::size_t>(std::max(n, 0))});
}

// An upper bound of the nesting: brackets that are escaped do not count, those inside a character
// class do.
int nesting(std::string_view pattern) noexcept {
  int depth = 0, deepest = 0;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      ++i;
    } else if (c == '(' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if ((c == ')' || c == ']') && depth > 0) {
      --depth;
    }
  }
  return deepest;
}

struct RegionFree {
  void operator()(OnigRegion* region) const noexcept { onig_region_free(region, 1); }
};
struct ParamFree {
  void operator()(OnigMatchParam* param) const noexcept { onig_free_match_param(param); }
};

// One text under search, with what Oniguruma needs for it.
class Searcher {
 public:
  Searcher(regex_t* compiled, std::string_view text, MatchBudget& budget)
      : compiled_(compiled),
        text_(text),
        budget_(budget),
        region_(onig_region_new()),
        param_(onig_new_match_param()) {
    if (region_ == nullptr || param_ == nullptr)
      fail(ErrorCode::OutOfMemory, "no memory to match {} bytes", text.size());
    const std::size_t entries = kBaseStackEntries + kStackEntriesPerByte * text.size();
    onig_set_match_stack_limit_size_of_match_param(
        param_.get(), static_cast<unsigned>(std::min<std::size_t>(entries, INT32_MAX)));
  }

  // The offset of the leftmost match at or after `start`, ONIG_MISMATCH or an error; end() is set.
  int search(std::size_t start) {
    for (std::uint64_t limit = kFirstLimit;; limit *= kLimitGrowth) {
      limit = std::clamp<std::uint64_t>(limit, 1, std::max<std::uint64_t>(budget_.left(), 1));
      const int result = attempt(start, limit);
      const bool over =
          result == ONIGERR_RETRY_LIMIT_IN_MATCH_OVER || result == ONIGERR_RETRY_LIMIT_IN_SEARCH_OVER;
      if (!over) return result;
      budget_.spend(limit);
      if (budget_.left() == 0) return result;
    }
  }
  std::size_t end() const { return static_cast<std::size_t>(region_->end[0]); }

 private:
  int attempt(std::size_t start, std::uint64_t limit) {
    onig_set_retry_limit_in_match_of_match_param(param_.get(), limit);
    onig_set_retry_limit_in_search_of_match_param(param_.get(), limit);
    onig_region_clear(region_.get());
    const OnigUChar* begin = bytes_of(text_);
    const OnigUChar* stop = begin + text_.size();
    return onig_search_with_param(compiled_, begin, stop, begin + start, stop, region_.get(),
                                  ONIG_OPTION_NONE, param_.get());
  }

  regex_t* compiled_;
  std::string_view text_;
  MatchBudget& budget_;
  std::unique_ptr<OnigRegion, RegionFree> region_;
  std::unique_ptr<OnigMatchParam, ParamFree> param_;
};

}  // namespace

MatchBudget::MatchBudget(std::size_t text_bytes) noexcept : left_(kBaseSteps + kStepsPerByte * text_bytes) {}

void Regex::Free::operator()(re_pattern_buffer* p) const noexcept { onig_free(p); }

Regex::Regex(re_pattern_buffer* compiled, std::string pattern, std::string where)
    : compiled_(compiled), pattern_(std::move(pattern)), where_(std::move(where)) {}

Regex Regex::compile(std::string_view pattern, const std::string& where) {
  if (pattern.size() > kMaxPatternBytes)
    fail(ErrorCode::Unsupported, "{}: regular expression of {} bytes, the limit is {}", where, pattern.size(),
         kMaxPatternBytes);
  if (nesting(pattern) > kMaxGroupNesting)
    fail(ErrorCode::Unsupported, "{}: regular expression nested deeper than {} groups", where, kMaxGroupNesting);
  if (!is_valid_utf8(pattern))
    fail(ErrorCode::InvalidModel, "{}: regular expression is not valid UTF-8", where);
  initialize_once();
  regex_t* compiled = nullptr;
  OnigErrorInfo info{};
  const OnigUChar* begin = bytes_of(pattern);
  const int result = onig_new(&compiled, begin, begin + pattern.size(), ONIG_OPTION_IGNORECASE_IS_ASCII,
                              ONIG_ENCODING_UTF8, ONIG_SYNTAX_RUBY, &info);
  if (result == ONIGERR_MEMORY)
    fail(ErrorCode::OutOfMemory, "{}: no memory for the regular expression", where);
  if (result != ONIG_NORMAL)
    fail(ErrorCode::InvalidModel, "{}: regular expression {} is not valid: {}", where, shown(pattern),
         error_text(result, &info));
  return Regex(compiled, std::string(pattern), where);
}

std::vector<Match> Regex::find_all(std::string_view text, MatchBudget& budget) const {
  std::vector<Match> matches;
  Searcher searcher(compiled_.get(), text, budget);
  for (std::size_t start = 0; start <= text.size();) {
    const int result = searcher.search(start);
    if (result == ONIG_MISMATCH) break;
    if (result < 0)
      fail(ErrorCode::InvalidArgument, "{}: matching {} on a text of {} bytes was given up: {}", where_,
           shown(pattern_), text.size(), error_text(result, nullptr));
    const Match match{static_cast<std::size_t>(result), searcher.end()};
    // Only \K inside a look-behind can do this; going on would repeat text or never end.
    if (match.begin < start || match.end < match.begin)
      fail(ErrorCode::Unsupported, "{}: {} matches backwards", where_, shown(pattern_));
    const bool repeated = match.begin == match.end && !matches.empty() && matches.back().end == match.end;
    if (!repeated) {
      matches.push_back(match);
      start = match.end;
    } else {
      start += start < text.size() ? utf8_step(text, start).size : 1;
    }
  }
  return matches;
}

bool is_word_char(char32_t c) noexcept { return ONIGENC_IS_CODE_WORD(ONIG_ENCODING_UTF8, c) != 0; }

bool is_space_char(char32_t c) noexcept { return ONIGENC_IS_CODE_SPACE(ONIG_ENCODING_UTF8, c) != 0; }

}  // namespace moeflux::text
