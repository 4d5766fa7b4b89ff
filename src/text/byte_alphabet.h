// The alphabet of byte-level vocabularies: each of the 256 bytes stands as one printable character.
//
// Bytes 0x21-0x7E, 0xA1-0xAC and 0xAE-0xFF are the code points of the same number; the other 68, in
// increasing order, are U+0100, U+0101, .. (a space is U+0120, a newline U+010A). So every token is
// a valid, visible string and every byte sequence has a spelling. Functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moeflux::text {

// Code points of the alphabet are all below this.
inline constexpr char32_t kByteAlphabetEnd = 0x144;

char32_t byte_to_char(std::uint8_t byte) noexcept;
std::optional<std::uint8_t> char_to_byte(char32_t c) noexcept;

// Appends the spelling of `bytes` (at most twice their size).
void append_spelled(std::string& out, std::string_view bytes);

// The bytes that a vocabulary entry (valid UTF-8) stands for. An entry with a character outside the
// alphabet is literal text and is returned as it is.
std::string unspell(std::string_view token);

}  // namespace moeflux::text
