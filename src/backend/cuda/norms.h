// Pieces of norms that several kernels share. Only for CUDA sources.
#pragma once

#include "backend/cuda/device.h"
#include "backend/cuda/matvec.h"

namespace moeflux::backend::cuda {

// 1 / rms of a row in shared memory, which all threads have written and synchronized; `shared` is a float for the block.
__device__ inline float rms_factor(const float* row, int n, float eps, float& shared) {
  if (threadIdx.x < kWarp) {
    const float dot = square16(row, n, threadIdx.x & 15);
    if (threadIdx.x == 0) shared = 1.0f / math::sqrt(dot / static_cast<float>(n) + eps);
  }
  __syncthreads();
  return shared;
}

// A row in shared memory in 8 bits, where the matvec behind will look for it (CudaStream::known). All threads of the block.
__device__ inline void put_known(const float* row, int n, std::byte* to) {
  if (to != nullptr) quantize_block(RowLoad{row}, n, kKnownGroup, Order::EvenOddPlanes, quantized_at(to, n, kKnownGroup));
}

}  // namespace moeflux::backend::cuda
