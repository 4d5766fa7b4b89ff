// Regular expressions as tokenizer files write them: Oniguruma with Ruby syntax over UTF-8.
//
// The pattern string is used unchanged. Inside (?i:..) only ASCII letters fold, so "'s" does not
// match an apostrophe and a long s. Patterns come from files and texts from users, so neither
// compiling nor matching may run away: matching draws on a MatchBudget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct re_pattern_buffer;  // Oniguruma's compiled pattern

namespace moeflux::text {

// Backtracking steps that one encoding may spend over all its searches: a fixed part, and for each
// byte of text far more than sensible patterns need. It is a count, not a clock: whether a text is
// accepted does not depend on the machine. One per call, not shared by threads.
class MatchBudget {
 public:
  explicit MatchBudget(std::size_t text_bytes) noexcept;
  std::uint64_t left() const noexcept { return left_; }
  void spend(std::uint64_t steps) noexcept { left_ -= steps < left_ ? steps : left_; }

 private:
  std::uint64_t left_;
};

struct Match {
  std::size_t begin, end;  // byte offsets
};

// Immutable after compile(); may be used by several threads at once. Movable.
class Regex {
 public:
  // `where` starts the messages. InvalidModel for a pattern that Oniguruma refuses, Unsupported for
  // one that is longer than 64 KiB or nested deeper than 200 groups.
  static Regex compile(std::string_view pattern, const std::string& where);

  // All matches from left to right without overlap; text must be valid UTF-8 below 2 GiB. Look-behind
  // sees the text before a match, nothing outside `text`. A zero-length match is given unless it
  // stands at the end of the previous one. InvalidArgument when the budget is spent.
  std::vector<Match> find_all(std::string_view text, MatchBudget& budget) const;

 private:
  struct Free {
    void operator()(re_pattern_buffer* p) const noexcept;
  };
  Regex(re_pattern_buffer* compiled, std::string pattern, std::string where);

  std::unique_ptr<re_pattern_buffer, Free> compiled_;
  std::string pattern_;
  std::string where_;
};

// \w and \s of the same engine and Unicode version.
bool is_word_char(char32_t c) noexcept;
bool is_space_char(char32_t c) noexcept;

}  // namespace moeflux::text
