// Route and Combine.
#include <algorithm>
#include <memory>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/norms.h"
#include "backend/cuda/route.h"

namespace moeflux::backend::cuda {
namespace {

template <int N>
__global__ void __launch_bounds__(N * kWarp) route_block_kernel(RouteArgs a, ChoiceCheck check) {
  extern __shared__ float memory[];
  const CheckInputs inputs(check, a.n_experts, a.top_k);
  begin_kernel();
  const std::int64_t t = blockIdx.x;
  if (check.shares != nullptr && t > 0) return post_x(check, inputs.serial);  // one token: the second block
  route_block<N>(a, t, static_cast<int>(threadIdx.x) < a.n_experts ? __ldcg(a.logits.row(t) + threadIdx.x) : minus_inf(), memory, check, inputs);
}

__global__ void route_kernel(RouteArgs a) {
  extern __shared__ float memory[];
  begin_kernel();
  route_token(a, blockIdx.x, threadIdx.x, memory);
}

struct CombineArgs {
  const float* rows;
  std::int64_t token_stride, row_stride;
  Rows weights, shared, shared_gate, h;
  int n_ranks;
};

// h + the experts' rows for columns i0, i0 + blockDim.x, .. below n of token t. All loads are under way before one is waited for: the kernel
// behind this one asks for its weights meanwhile, and a load that is issued later waits for them, too.
template <int N>
__device__ inline void combined(const CombineArgs& a, std::int64_t t, int i0, int n, float (&out)[N]) {
  constexpr int kRanks = 8;  // on their way at once
  const float *rows = a.rows + t * a.token_stride, *weights = a.weights.row(t), *own = a.h.row(t);
  const float *shared = a.shared.data != nullptr ? a.shared.row(t) : nullptr, *shared_gate = a.shared_gate.data != nullptr ? a.shared_gate.row(t) : nullptr;
  int at[N];
  float h[N], x[N] = {}, s[N] = {};
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] = min(i0 + k * static_cast<int>(blockDim.x), n - 1);
  const float gate = shared_gate != nullptr ? *shared_gate : 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    h[k] = own[at[k]];
    if (shared != nullptr) x[k] = shared[at[k]];
  }
#pragma unroll 1
  for (int r0 = 0; r0 < a.n_ranks; r0 += kRanks) {
    float w[kRanks], v[kRanks][N];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const int rank = min(r0 + r, a.n_ranks - 1);
      w[r] = weights[rank];
#pragma unroll
      for (int k = 0; k < N; ++k) v[r][k] = rows[rank * a.row_stride + at[k]];
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r0 + r < a.n_ranks)
#pragma unroll
        for (int k = 0; k < N; ++k) s[k] = math::fma(w[r], v[r][k], s[k]);
  }
  const float factor = shared_gate != nullptr ? math::sigmoid(gate) : 1.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (shared != nullptr) s[k] = shared_gate != nullptr ? math::fma(factor, x[k], s[k]) : s[k] + x[k];
    out[k] = h[k] + s[k];
  }
}

__global__ void combine_kernel(CombineArgs a) {
  begin_kernel();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const std::int64_t t = blockIdx.y;
  if (i >= a.h.width) return;
  float sum[1];
  combined(a, t, i, a.h.width, sum);
  a.h.row(t)[i] = sum[0];
}

// The same for one token, and the norm of the result: one block.
__global__ void __launch_bounds__(1024) combine_norm_kernel(CombineArgs a, float* y, const float* weight, float eps, std::byte* known) {
  extern __shared__ float row[];
  __shared__ float factor;
  const int n = a.h.width;
  constexpr int kEarly = 2;
  float w[kEarly];
#pragma unroll
  for (int k = 0; k < kEarly; ++k) w[k] = threadIdx.x + k * blockDim.x < n ? weight[threadIdx.x + k * blockDim.x] : 0.0f;
  begin_kernel();
  for (int i0 = threadIdx.x; i0 < n; i0 += kEarly * static_cast<int>(blockDim.x)) {
    float v[kEarly];
    combined(a, 0, i0, n, v);
#pragma unroll
    for (int k = 0; k < kEarly; ++k)
      if (const int i = i0 + k * static_cast<int>(blockDim.x); i < n) a.h.data[i] = row[i] = v[k];
  }
  __syncthreads();
  const float f = rms_factor(row, n, eps, factor);
  const auto put = [&](int i, float weight_of) { y[i] = row[i] = row[i] * f * weight_of; };
#pragma unroll
  for (int k = 0; k < kEarly; ++k)
    if (threadIdx.x + k * blockDim.x < n) put(threadIdx.x + k * blockDim.x, w[k]);
  for (int i = threadIdx.x + kEarly * blockDim.x; i < n; i += blockDim.x) put(i, weight[i]);
  __syncthreads();
  put_known(row, n, known);
}

class WaitingCombine final : public WaitingOp {
 public:
  using WaitingOp::launch_with;
  explicit WaitingCombine(const CombineArgs& a) : a_(a) {}
  void launch_alone(CudaStream& s) override { launch(s, "Combine", combine_kernel, static_cast<unsigned>(ceil_div(a_.h.width, 128)), 128, 0, a_); }
  bool launch_with(CudaStream& s, const RmsNorm& op) override {
    if (op.x.data != a_.h.data || op.x.rank != 2 || op.x.dim(0) != 1 || op.x.dim(1) != a_.h.width) return false;
    launch_large(s, "Combine and norm", combine_norm_kernel, 1, 1024, static_cast<std::size_t>(a_.h.width) * 4, a_, op.y.f32(), op.weight.f32(), op.eps,
                 s.know(op.y));
    return true;
  }

 private:
  CombineArgs a_;
};

void launch_route(CudaStream& s, const RouteArgs& a, unsigned n, const ChoiceCheck& check) {
  const int threads = ceil_div(a.n_experts, kWarp) * kWarp;
  const auto kernel = a.n_experts <= 8 * kWarp ? route_block_kernel<8> : route_block_kernel<16>;
  launch_large(s, "Route", kernel, check.shares != nullptr ? n + 1 : n, threads, route_block_bytes(a), a, check);
}

class WaitingRoute final : public WaitingOp {
 public:
  using WaitingOp::launch_with;
  explicit WaitingRoute(const RouteArgs& a) : a_(a) {}
  void launch_alone(CudaStream& s) override { launch_route(s, a_, 1, {}); }
  bool launch_with(CudaStream& s, const ChoiceCheck& check) override {
    launch_route(s, a_, 1, check);
    return true;
  }

 private:
  RouteArgs a_;
};

}  // namespace

void CudaBackend::execute(Stream& stream, const Route& op) {
  CudaStream& s = use(stream, Known::Stays);
  const RouteArgs a = to_args(op);
  const auto n = static_cast<unsigned>(op.logits.dim(0));
  if (a.n_groups > 1 || a.top_k > kWarp || a.n_experts > 16 * kWarp) return launch_large(s, "Route", route_kernel, n, kWarp, route_bytes(a), a);
  if (n > 1 || !s.overlap) return launch_route(s, a, n, {});
  s.waiting = std::make_unique<WaitingRoute>(a);
}

void CudaBackend::execute(Stream& stream, const Combine& op) {
  CudaStream& s = use(stream);
  const std::int64_t n = op.h.dim(0);
  for (std::int64_t t = 0; t < n; t += 32768) {
    const std::int64_t part = std::min<std::int64_t>(n - t, 32768);
    CombineArgs a{};
    a.rows = op.rows.f32() + t * op.rows.stride(0);
    a.token_stride = op.rows.stride(0), a.row_stride = op.rows.stride(1);
    a.weights = to_rows(op.weights.slice(t, part)), a.h = to_rows(op.h.slice(t, part));
    if (!op.shared.empty()) a.shared = to_rows(op.shared.slice(t, part));
    if (!op.shared_gate.empty()) a.shared_gate = to_rows(op.shared_gate.slice(t, part));
    a.n_ranks = static_cast<int>(op.weights.dim(1));
    if (n == 1 && s.overlap) {
      s.waiting = std::make_unique<WaitingCombine>(a);
      return;
    }
    launch(s, "Combine", combine_kernel, dim3(static_cast<unsigned>(ceil_div(a.h.width, 128)), static_cast<unsigned>(part)), 128, 0, a);
  }
}

}  // namespace moeflux::backend::cuda
