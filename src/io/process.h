// What the operating system says about this process.
#pragma once

#include <cstdint>

namespace moeflux::io {

struct ProcessMemory {
  std::uint64_t resident_bytes = 0;  // now
  std::uint64_t peak_bytes = 0;      // the most there ever was
};

// From /proc/self/status; zeros where there is no such file.
ProcessMemory process_memory() noexcept;

}  // namespace moeflux::io
