// Names of files from untrusted documents.
#pragma once

#include <algorithm>
#include <string_view>

namespace moeflux::format {

// A file inside the folder, whatever the system: no separators, no way up, nothing that a terminal would act on.
inline bool plain_file_name(std::string_view name) noexcept {
  constexpr std::size_t kMaxFileName = 255;
  if (name.empty() || name == "." || name.size() > kMaxFileName) return false;
  if (name.find("..") != std::string_view::npos) return false;
  return std::none_of(name.begin(), name.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return c == '/' || c == '\\' || byte < 0x20 || byte == 0x7F;
  });
}

}  // namespace moeflux::format
