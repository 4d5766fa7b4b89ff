// What this process takes of the machine's memory, as the system counts it.
#pragma once

#include <cstdint>

namespace moeflux::io {

struct ProcessMemory {
  std::uint64_t rss = 0;       // bytes in memory now
  std::uint64_t peak_rss = 0;  // the most so far
};

// Zeros where the system does not tell.
ProcessMemory process_memory();

}  // namespace moeflux::io
