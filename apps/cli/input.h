// What users hand in: texts, lists of token ids.
#pragma once

#include <moeflux/types.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moeflux::cli {

// A whole file; `what` says in messages what it was to be ("prompt file"). InvalidArgument: it cannot be
// opened or is larger than any sensible text. Io: reading failed.
std::string read_text_file(const std::string& path, std::string_view what);

// A text given as an argument, else in a file, else on standard input when that is no terminal; bytes as they
// are. `what` ("prompt") for messages. InvalidArgument: there is none.
std::string read_text(const std::optional<std::string>& argument, const std::optional<std::string>& file,
                      std::string_view what);

// "1,2 3\n4": integers between commas and white space. `source` ("--tokens", a file name) for messages.
// InvalidArgument: anything else, or no id at all. The range of the vocabulary is not checked.
std::vector<TokenId> parse_token_ids(std::string_view text, std::string_view source);

// "1,2,3".
std::string join_ids(std::span<const TokenId> tokens);

// In double quotes, on one line, as ASCII-safe as the text allows: control characters and bytes that are no
// UTF-8 become escapes such as \n and \xe2.
std::string quote_bytes(std::string_view bytes);

bool is_utf8(std::string_view bytes) noexcept;

}  // namespace moeflux::cli
