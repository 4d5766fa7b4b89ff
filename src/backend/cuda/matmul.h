// What MatMul and the feed-forwards share on the host side. Only for CUDA sources.
#pragma once

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/gemm.h"

namespace moeflux::backend::cuda {

// Up to here every token is a matvec of its own; above, tensor cores pay.
inline constexpr std::int64_t kMatvecTokens = 4;

inline bool is_fast(const quant::MatrixView& w, Precision p) { return p == Precision::Fast && w.format.integer_codes(); }

// Kernels with more than 48 KiB of dynamic shared memory must ask for it.
template <class Kernel>
void allow_shared(Kernel kernel, std::size_t bytes) {
  if (bytes > 48u << 10)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), "shared memory of a kernel");
}

// Rows to quantize: x, or glu(x, up) where up is given; both with the same stride.
struct RowsSource {
  const float* x;
  const float* up;
  std::int64_t x_stride;
  GluParams glu;
};

// n rows in 8 bits, in a scratch buffer of the stream.
QuantizedRows quantize_rows(CudaStream& s, Scratch where, const RowsSource& source, std::int64_t n, int cols, int group);

void gemm(CudaStream& s, const Matrix& w, const QuantizedRows& x, const float* bias, float* y, std::int64_t y_stride, std::int64_t n);
void gemm_exact(CudaStream& s, const Matrix& w, const float* x, std::int64_t x_stride, const float* bias, float* y, std::int64_t y_stride, std::int64_t n);

}  // namespace moeflux::backend::cuda
