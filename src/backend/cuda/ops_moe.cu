// Route and Combine.
#include <algorithm>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"

namespace moeflux::backend::cuda {
namespace {

struct RouteArgs {
  Rows logits, weights;
  const float* select_bias;
  std::int32_t* ids;
  std::int64_t ids_stride;
  int n_experts, top_k, n_groups, topk_groups;
  RouterScore score;
  bool normalize;
  float norm_eps, scaling;
};

__device__ inline float minus_inf() { return -__int_as_float(0x7f800000); }

// Experts outside the best groups get a key of -inf. One warp; groups are few.
__device__ void mask_groups(const RouteArgs& a, float* key, float* value, int lane) {
  const int size = a.n_experts / a.n_groups;
  for (int g = lane; g < a.n_groups; g += kWarp) {
    float best = minus_inf(), second = minus_inf();
    for (int e = g * size; e < (g + 1) * size; ++e) {
      if (key[e] > best) {
        second = best;
        best = key[e];
      } else if (key[e] > second) {
        second = key[e];
      }
    }
    value[g] = a.score == RouterScore::Sigmoid && size > 1 ? best + second : best;
  }
  __syncwarp();
  for (int g = lane; g < a.n_groups; g += kWarp) {
    int better = 0;
    for (int o = 0; o < a.n_groups; ++o) better += value[o] > value[g] || (value[o] == value[g] && o < g);
    if (better >= a.topk_groups)
      for (int e = g * size; e < (g + 1) * size; ++e) key[e] = minus_inf();
  }
  __syncwarp();
}

// score[e] = exp(x - max) * (1 / sum16(exp)).
__device__ void softmax(const float* x, int n, float* score, int lane) {
  float top = x[0];
  for (int e = lane; e < n; e += kWarp) top = top > x[e] ? top : x[e];
  for (int step = 16; step >= 1; step /= 2) {
    const float other = __shfl_xor_sync(kAll, top, step);
    top = top > other ? top : other;
  }
  for (int e = lane; e < n; e += kWarp) score[e] = math::exp(x[e] - top);
  __syncwarp();
  float sum = 0.0f;
  for (int e = lane & 15; e < n; e += 16) sum = sum + score[e];
  const float inv = 1.0f / tree16(sum);
  __syncwarp();
  for (int e = lane; e < n; e += kWarp) score[e] = score[e] * inv;
}

// A warp per token. Ranks are chosen one after the other: the largest key, the lowest index among equals; a key that is
// NaN is never chosen before a number.
__global__ void route_kernel(RouteArgs a) {
  extern __shared__ float memory[];
  float *score = memory, *key = score + a.n_experts, *value = key + a.n_experts, *chosen_weights = value + a.n_groups;
  int* chosen = reinterpret_cast<int*>(chosen_weights + a.top_k);
  begin_kernel();
  const int lane = threadIdx.x;
  const std::int64_t t = blockIdx.x;
  const float* logits = a.logits.row(t);
  if (a.score == RouterScore::Softmax) {
    softmax(logits, a.n_experts, score, lane);
  } else {
    for (int e = lane; e < a.n_experts; e += kWarp) score[e] = a.score == RouterScore::Sigmoid ? math::sigmoid(logits[e]) : logits[e];
  }
  __syncwarp();
  for (int e = lane; e < a.n_experts; e += kWarp) key[e] = a.select_bias == nullptr ? score[e] : score[e] + a.select_bias[e];
  __syncwarp();
  if (a.n_groups > 1) mask_groups(a, key, value, lane);

  // Keys as integers that order like the floats; 0 is below all of them: taken. Up to 16 a lane stay in registers.
  constexpr int kOwn = 16;
  auto* order = reinterpret_cast<unsigned*>(key);
  unsigned own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = 0;
  for (int e = lane; e < a.n_experts; e += kWarp) {
    const float k = key[e];
    const unsigned bits = __float_as_uint(k == 0.0f ? 0.0f : k);
    order[e] = k != k ? 1u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  const bool small = a.n_experts <= kOwn * kWarp;
  if (small)
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (lane + i * kWarp < a.n_experts) own[i] = order[lane + i * kWarp];
  __syncwarp();
  for (int r = 0; r < a.top_k; ++r) {
    unsigned best = 0;
    int at = a.n_experts;
    if (small) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (own[i] > best) best = own[i], at = lane + i * kWarp;
    } else {
      for (int e = lane; e < a.n_experts; e += kWarp)
        if (order[e] > best) best = order[e], at = e;
    }
    const unsigned top = __reduce_max_sync(kAll, best);
    const int winner = __reduce_min_sync(kAll, best == top ? at : a.n_experts);
    if (lane == 0) chosen[r] = winner;
    if (small) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (lane + i * kWarp == winner) own[i] = 0;
    } else {
      if (lane == 0) order[winner] = 0;
      __syncwarp();
    }
  }
  __syncwarp();
  if (lane == 0) {
    float sum = 0.0f;
    for (int r = 0; r < a.top_k; ++r) {
      const float w = a.score == RouterScore::SoftmaxOfChosen ? math::exp(score[chosen[r]] - score[chosen[0]]) : score[chosen[r]];
      chosen_weights[r] = w;
      sum = sum + w;
    }
    value[0] = a.score == RouterScore::SoftmaxOfChosen ? sum : sum + a.norm_eps;
  }
  __syncwarp();
  const float divisor = value[0];
  for (int r = lane; r < a.top_k; r += kWarp) {
    float w = chosen_weights[r];
    if (a.normalize || a.score == RouterScore::SoftmaxOfChosen) w = w / divisor;
    a.weights.row(t)[r] = w * a.scaling;
    a.ids[t * a.ids_stride + r] = chosen[r];
  }
}

struct CombineArgs {
  const float* rows;
  std::int64_t token_stride, row_stride;
  Rows weights, shared, shared_gate, h;
  int n_ranks;
};

__global__ void combine_kernel(CombineArgs a) {
  begin_kernel();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const std::int64_t t = blockIdx.y;
  if (i >= a.h.width) return;
  const float* weights = a.weights.row(t);
  const float* row = a.rows + t * a.token_stride + i;
  float s = 0.0f;
#pragma unroll 8
  for (int r = 0; r < a.n_ranks; ++r) s = math::fma(weights[r], row[r * a.row_stride], s);
  if (a.shared.data != nullptr) {
    const float x = a.shared.row(t)[i];
    s = a.shared_gate.data != nullptr ? math::fma(math::sigmoid(*a.shared_gate.row(t)), x, s) : s + x;
  }
  float* h = a.h.row(t);
  h[i] = h[i] + s;
}

}  // namespace

void CudaBackend::execute(Stream& stream, const Route& op) {
  RouteArgs a{};
  a.logits = to_rows(op.logits), a.weights = to_rows(op.weights);
  a.select_bias = op.select_bias.f32();
  a.ids = op.ids.i32(), a.ids_stride = op.ids.stride(0);
  a.n_experts = static_cast<int>(op.logits.dim(1)), a.top_k = static_cast<int>(op.ids.dim(1));
  a.n_groups = op.n_groups, a.topk_groups = op.topk_groups;
  a.score = op.score, a.normalize = op.normalize, a.norm_eps = op.norm_eps, a.scaling = op.scaling;
  const auto bytes = static_cast<std::size_t>(2 * a.n_experts + std::max(a.n_groups, 1) + 2 * a.top_k) * 4;
  launch_large(use(stream), "Route", route_kernel, static_cast<unsigned>(op.logits.dim(0)), kWarp, bytes, a);
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
    launch(s, "Combine", combine_kernel, dim3(static_cast<unsigned>(ceil_div(a.h.width, 128)), static_cast<unsigned>(part)), 128, 0, a);
  }
}

}  // namespace moeflux::backend::cuda
