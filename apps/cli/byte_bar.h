// The progress of long work that is counted in bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "cli/terminal.h"

namespace moeflux::cli {

// "[####......] 41 %, 8.0 GB of 19.6 GB, 1.9 GB/s, 6 s left" on a terminal. One thread at a time.
class ByteBar {
 public:
  void show(std::uint64_t done_bytes, std::uint64_t total_bytes);
  double seconds() const;  // since it was made
  void clear() noexcept { line_.clear(); }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  StatusLine line_{std::chrono::milliseconds(300)};  // a bar that flashes by is noise
};

std::string duration_text(double seconds);  // "6 s", "2 min 05 s"

}  // namespace moeflux::cli
