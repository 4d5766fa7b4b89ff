// Names from untrusted files in messages: in quotes, control characters escaped, long ones cut.
#pragma once

#include <string>
#include <string_view>

namespace moeflux::format {

inline std::string in_quotes(std::string_view name) {
  constexpr std::size_t kMaxShown = 200;  // bytes; longer than any real tensor name
  constexpr char kHex[] = "0123456789abcdef";
  bool cut = false;
  if (name.size() > kMaxShown) {
    std::size_t end = kMaxShown;
    while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xC0) == 0x80)
      --end;  // not inside a character
    name = name.substr(0, end);
    cut = true;
  }
  std::string out = "\"";
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += c;
    }
  }
  out += cut ? "\".." : "\"";
  return out;
}

}  // namespace moeflux::format
