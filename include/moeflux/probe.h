// What this machine gives and what this process takes, for benchmarks and planning.
#pragma once

#include <cstdint>

namespace moeflux {

struct ProcessMemory {
  std::uint64_t resident_bytes = 0;
  std::uint64_t peak_bytes = 0;  // the most that was ever resident
};
// Zeros where the system does not say.
ProcessMemory process_memory();

struct MemoryBandwidth {
  double bytes_per_second = 0;
  std::uint64_t buffer_bytes = 0;
  int n_threads = 0;
};
// Reading with all threads (n_threads < 1: one per usable core) from a buffer far larger than the caches: the
// best of several passes. Takes some tenths of a second and buffer_bytes of memory while it runs.
// OutOfMemory.
MemoryBandwidth probe_memory_bandwidth(int n_threads = 0);

}  // namespace moeflux
