// HeadMatMul: a small matrix per head, one chain of fmas per output in ascending inputs.
#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"

namespace moeflux::backend::cuda {
namespace {

struct HeadArgs {
  Matrix w;
  const float* x;
  float* y;
  std::int64_t x_token, x_head, y_token, y_head;
  int n_in, n_out, n_passed, n_tokens;
  bool inputs_first;
};

constexpr int kTokens = 4;     // tokens that share every decoded weight
constexpr int kOutputs = 64;   // outputs of a block, a thread each
constexpr int kInputs = 32;    // weights of a step: decoded once into shared memory

// Weights are decoded by all threads, neighbours along the stored rows, then every thread walks down its output.
__global__ void head_matmul_kernel(HeadArgs a) {
  __shared__ float w[kInputs][kOutputs + 1];
  __shared__ float x[kTokens][kInputs];
  begin_kernel();
  const int h = blockIdx.y, o0 = blockIdx.x * kOutputs, t0 = blockIdx.z * kTokens, tid = threadIdx.x;
  float acc[kTokens] = {};
  for (int i0 = 0; i0 < a.n_in; i0 += kInputs) {
    __syncthreads();
    for (int e = tid; e < kInputs * kOutputs; e += blockDim.x) {
      const int i = a.inputs_first ? e / kOutputs : e % kInputs, o = a.inputs_first ? e % kOutputs : e / kInputs;
      float v = 0.0f;
      if (i0 + i < a.n_in && o0 + o < a.n_out)
        v = a.inputs_first ? weight_at(a.w, h * a.n_in + i0 + i, o0 + o) : weight_at(a.w, h * a.n_out + o0 + o, i0 + i);
      w[i][o] = v;
    }
    for (int e = tid; e < kTokens * kInputs; e += blockDim.x) {
      const int t = e / kInputs, i = e % kInputs;
      x[t][i] = t0 + t < a.n_tokens && i0 + i < a.n_in ? a.x[(t0 + t) * a.x_token + h * a.x_head + i0 + i] : 0.0f;
    }
    __syncthreads();
    const int n = min(kInputs, a.n_in - i0);
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) acc[t] = math::fma(x[t][i], w[i][tid], acc[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t0 + t >= a.n_tokens) break;
    float* y = a.y + (t0 + t) * a.y_token + h * a.y_head;
    if (o0 + tid < a.n_out) y[o0 + tid] = acc[t];
    if (blockIdx.x == 0)
      for (int p = tid; p < a.n_passed; p += blockDim.x) y[a.n_out + p] = a.x[(t0 + t) * a.x_token + h * a.x_head + a.n_in + p];
  }
}

}  // namespace

void CudaBackend::execute(Stream& stream, const HeadMatMul& op) {
  HeadArgs a{};
  a.w = to_device(op.w);
  a.x = op.x.f32(), a.y = op.y.f32();
  a.x_token = op.x.stride(0), a.x_head = op.x.stride(1), a.y_token = op.y.stride(0), a.y_head = op.y.stride(1);
  a.n_in = static_cast<int>(op.n_inputs()), a.n_out = static_cast<int>(op.n_outputs()), a.n_passed = static_cast<int>(op.n_passed());
  a.n_tokens = static_cast<int>(op.x.dim(0)), a.inputs_first = op.inputs_first;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.n_out, kOutputs)), static_cast<unsigned>(op.x.dim(1)), static_cast<unsigned>(ceil_div(a.n_tokens, kTokens)));
  launch(use(stream), "HeadMatMul", head_matmul_kernel, grid, kOutputs, 0, a);
}

}  // namespace moeflux::backend::cuda
