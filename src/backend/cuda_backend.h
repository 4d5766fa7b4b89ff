// The door to the CUDA backend. A build without CUDA has it too: there it throws.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace moeflux::backend {

struct CudaOptions {
  int device = 0;
};

// Throws Unsupported where this build or this machine has no CUDA.
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);

}  // namespace moeflux::backend
