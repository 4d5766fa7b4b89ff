// safetensors files built by hand, right or wrong in every way a test wants.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moeflux::test {

inline std::string little_endian(std::uint64_t n) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(n >> (8 * i));
  return out;
}

// Length, header, data_bytes bytes of data counting up.
inline std::string raw_safetensors(std::string_view header, std::size_t data_bytes = 0) {
  std::string out = little_endian(header.size()) + std::string(header);
  for (std::size_t i = 0; i < data_bytes; ++i) out += static_cast<char>(i);
  return out;
}

}  // namespace moeflux::test
