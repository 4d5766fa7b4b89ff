#include "text/byte_alphabet.h"

#include <array>

#include "text/utf8.h"

namespace moeflux::text {
namespace {

constexpr bool stands_for_itself(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr std::array<char32_t, 256> kChars = [] {
  std::array<char32_t, 256> chars{};
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) chars[byte] = stands_for_itself(byte) ? byte : next++;
  return chars;
}();

// -1 where no byte has the character.
constexpr std::array<std::int16_t, kByteAlphabetEnd> kBytes = [] {
  std::array<std::int16_t, kByteAlphabetEnd> bytes{};
  for (auto& b : bytes) b = -1;
  for (unsigned byte = 0; byte < 256; ++byte) bytes[kChars[byte]] = static_cast<std::int16_t>(byte);
  return bytes;
}();

static_assert(kChars[0x20] == 0x120 && kChars[0x0A] == 0x10A && kChars[0xAD] == 0x143);

}  // namespace

char32_t byte_to_char(std::uint8_t byte) noexcept { return kChars[byte]; }

std::optional<std::uint8_t> char_to_byte(char32_t c) noexcept {
  if (c >= kByteAlphabetEnd || kBytes[c] < 0) return std::nullopt;
  return static_cast<std::uint8_t>(kBytes[c]);
}

void append_spelled(std::string& out, std::string_view bytes) {
  for (const char byte : bytes) append_utf8(out, kChars[static_cast<std::uint8_t>(byte)]);
}

std::string unspell(std::string_view token) {
  std::string bytes;
  bytes.reserve(token.size());
  for (std::size_t i = 0; i < token.size();) {
    const Utf8Step step = utf8_step(token, i);
    const auto byte = char_to_byte(step.code_point);
    if (!byte) return std::string(token);
    bytes.push_back(static_cast<char>(*byte));
    i += step.size;
  }
  return bytes;
}

}  // namespace moeflux::text
