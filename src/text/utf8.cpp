#include "text/utf8.h"

#include <algorithm>
#include <cstdint>

#include <fmt/format.h>

namespace moeflux::text {
namespace {

// What a lead byte promises: the sequence's size (0: no lead byte) and the range of the second byte,
// which is where overlong forms, surrogates and values above U+10FFFF are told apart.
struct Lead {
  std::size_t size;
  std::uint8_t low, high;
};

Lead classify(std::uint8_t b) noexcept {
  if (b < 0x80) return {1, 0, 0};
  if (b < 0xC2) return {0, 0, 0};
  if (b < 0xE0) return {2, 0x80, 0xBF};
  if (b == 0xE0) return {3, 0xA0, 0xBF};
  if (b == 0xED) return {3, 0x80, 0x9F};
  if (b < 0xF0) return {3, 0x80, 0xBF};
  if (b == 0xF0) return {4, 0x90, 0xBF};
  if (b < 0xF4) return {4, 0x80, 0xBF};
  if (b == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

constexpr char32_t kReplacement = 0xFFFD;
constexpr std::size_t kMaxShown = 60;  // bytes of a quoted string

}  // namespace

Utf8Step utf8_step(std::string_view text, std::size_t offset) noexcept {
  const auto first = static_cast<std::uint8_t>(text[offset]);
  if (first < 0x80) return {first, 1, Utf8Status::Valid};
  const Lead lead = classify(first);
  if (lead.size == 0) return {kReplacement, 1, Utf8Status::Invalid};
  char32_t value = first & (0x7Fu >> lead.size);
  for (std::size_t i = 1; i < lead.size; ++i) {
    if (offset + i == text.size()) return {kReplacement, i, Utf8Status::Incomplete};
    const auto byte = static_cast<std::uint8_t>(text[offset + i]);
    const std::uint8_t low = i == 1 ? lead.low : 0x80;
    const std::uint8_t high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return {kReplacement, i, Utf8Status::Invalid};
    value = (value << 6) | (byte & 0x3Fu);
  }
  return {value, lead.size, Utf8Status::Valid};
}

bool is_valid_utf8(std::string_view text) noexcept {
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    if (step.status != Utf8Status::Valid) return false;
    i += step.size;
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    if (step.status == Utf8Status::Valid) {
      out.append(text, i, step.size);
    } else {
      append_utf8(out, kReplacement);
    }
    i += step.size;
  }
  return out;
}

std::size_t complete_utf8_prefix(std::string_view text) noexcept {
  // An unfinished sequence holds one lead byte and at most two continuation bytes.
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const std::size_t start = text.size() - back;
    const auto byte = static_cast<std::uint8_t>(text[start]);
    if (byte >= 0x80 && byte < 0xC0) continue;
    const Utf8Step step = utf8_step(text, start);
    const bool unfinished = step.status == Utf8Status::Incomplete && step.size == back;
    return unfinished ? start : text.size();
  }
  return text.size();
}

void append_utf8(std::string& out, char32_t c) {
  const auto put = [&out](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | (c >> 6));
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3F));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

std::string shown(std::string_view text) {
  std::string out = "\"";
  const std::size_t cut =
      text.size() <= kMaxShown ? text.size() : complete_utf8_prefix(text.substr(0, kMaxShown));
  for (const char c : text.substr(0, cut)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      if (c == '"' || c == '\\') out.push_back('\\');
      out.push_back(c);
    }
  }
  if (cut < text.size()) out += "..";
  return out + "\"";
}

}  // namespace moeflux::text
