// The CPU backend: portable kernels behind a table per instruction set, one thread pool per backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace moeflux::backend {

struct CpuOptions {
  int n_threads = 0;  // < 1: one per usable core
  std::string isa;    // "" picks the best this CPU has; a name of supported_isas() forces one
  Allocator* allocator = nullptr;  // what the backend hands out and uses itself; outlives it. Null: plain host memory
};

// Streams are synchronous: run() returns when the op is done. Throws InvalidArgument for an instruction set that
// is unknown or that this CPU does not have (the message lists those it has).
std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options);

// Best first: "amx", "avx512vbmi", "avx512vnni", "avx512", "avx2vnni", "avx2", "scalar"; on ARM "neon", "scalar".
std::vector<std::string> supported_isas();

// The sum of n_words 64-bit words, a multiple of 16, read as fast as this CPU can: for probes of memory.
using WordSum = std::uint64_t (*)(const std::uint64_t* words, std::size_t n_words) noexcept;
WordSum widest_word_sum() noexcept;

}  // namespace moeflux::backend
