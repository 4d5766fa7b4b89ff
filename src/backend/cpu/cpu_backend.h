// The CPU backend: portable kernels behind a table per instruction set, one thread pool per backend.
#pragma once

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

// Best first: "avx512vnni", "amx", "avx512", "avx2vnni", "avx2", "scalar"; on ARM "neon", "scalar".
std::vector<std::string> supported_isas();

}  // namespace moeflux::backend
