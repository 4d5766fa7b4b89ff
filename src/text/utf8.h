// UTF-8 from untrusted sources: what is valid, what is broken and what is only not finished yet.
//
// Valid means the Unicode standard's table of well-formed sequences: no overlong forms, no surrogates,
// nothing above U+10FFFF. Broken input is measured in maximal subparts: the longest start of a
// well-formed sequence, or one byte where there is none. Each subpart becomes one U+FFFD.
// Functions without state; none fails.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeflux::text {

enum class Utf8Status {
  Valid,       // a whole code point
  Invalid,     // a maximal subpart that no further bytes can mend
  Incomplete,  // the text ends inside a sequence that is well-formed so far
};

struct Utf8Step {
  char32_t code_point;  // U+FFFD unless Valid
  std::size_t size;     // bytes taken, at least 1
  Utf8Status status;
};

// The step at `offset`, which must lie inside the text.
Utf8Step utf8_step(std::string_view text, std::size_t offset) noexcept;

bool is_valid_utf8(std::string_view text) noexcept;

// A copy with every broken or unfinished maximal subpart replaced by U+FFFD.
std::string replace_invalid_utf8(std::string_view text);

// Bytes before an Incomplete sequence at the end (at most 3 bytes are held back); the whole size when
// there is none. Broken bytes in the middle count as complete: nothing that follows can mend them.
std::size_t complete_utf8_prefix(std::string_view text) noexcept;

// Appends a code point that is not a surrogate and not above U+10FFFF.
void append_utf8(std::string& out, char32_t code_point);

// A string from a file as it may appear in a message: cut to a readable length, control characters
// and quotes escaped.
std::string shown(std::string_view text);

}  // namespace moeflux::text
