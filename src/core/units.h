// Sizes for people: "1.77 MB", "4.9 GB" (powers of ten, as disks and the model cards count).
#pragma once

#include <cstdint>
#include <string>

#include <fmt/format.h>

namespace moeflux {

inline std::string format_bytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.3g} {}", value, kUnits[unit]);
}

}  // namespace moeflux
