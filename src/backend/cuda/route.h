// The choice of a token's experts: by a block with a thread an expert, or, with groups of experts or very many, by one warp. Only for CUDA
// sources.
#pragma once

#include "backend/cuda/device.h"
#include "backend/cuda/units.h"

namespace moeflux::backend::cuda {

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

// Experts outside the best groups get a key of -inf. One warp; groups are few.
__device__ inline void mask_groups(const RouteArgs& a, float* key, float* value, int lane) {
  const int size = a.n_experts / a.n_groups;
#pragma unroll 1
  for (int g = lane; g < a.n_groups; g += kWarp) {
    float best = minus_inf(), second = minus_inf();
#pragma unroll 1
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
#pragma unroll 1
  for (int g = lane; g < a.n_groups; g += kWarp) {
    int better = 0;
#pragma unroll 1
    for (int o = 0; o < a.n_groups; ++o) better += value[o] > value[g] || (value[o] == value[g] && o < g);
    if (better >= a.topk_groups)
#pragma unroll 1
      for (int e = g * size; e < (g + 1) * size; ++e) key[e] = minus_inf();
  }
  __syncwarp();
}

// score = exp(score - max) * (1 / sum16(exp)).
__device__ inline void softmax(float* score, int n, int lane) {
  float top = score[0];
#pragma unroll 1
  for (int e = lane; e < n; e += kWarp) top = top > score[e] ? top : score[e];
#pragma unroll 1
  for (int step = 16; step >= 1; step /= 2) {
    const float other = __shfl_xor_sync(kAll, top, step);
    top = top > other ? top : other;
  }
#pragma unroll 2
  for (int e = lane; e < n; e += kWarp) score[e] = math::exp(score[e] - top);
  __syncwarp();
  float sum = 0.0f;
#pragma unroll 1
  for (int e = lane & 15; e < n; e += 16) sum = sum + score[e];
  const float inv = 1.0f / tree16(sum);
  __syncwarp();
#pragma unroll 2
  for (int e = lane; e < n; e += kWarp) score[e] = score[e] * inv;
}


// route_token() without groups by a block with a thread an expert and its logit, at most 32 N experts: little code, because it is fetched
// anew for every token (matvec64.h). The first warp chooses.
template <int N>
__device__ inline void route_block(const RouteArgs& a, std::int64_t t, float v, float* memory, const ChoiceCheck& check, const CheckInputs& inputs) {
  float *score = memory, *shared = memory + a.n_experts;  // shared: a value for each warp, then the rest of route_block_bytes()
  auto* slots = reinterpret_cast<std::int32_t*>(memory + 2 * a.n_experts);
  const int e = threadIdx.x, lane = e % kWarp, n = a.n_experts;
  const bool there = e < n;
  if (a.score == RouterScore::Softmax) {
    float top = v;
#pragma unroll
    for (int step = 16; step >= 1; step /= 2) {
      const float other = __shfl_xor_sync(kAll, top, step);
      top = top > other ? top : other;
    }
    if (lane == 0) shared[e / kWarp] = top;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) top = top > shared[w] ? top : shared[w];
    v = math::exp(v - top);
    if (there) score[e] = v;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane & 15; i < n; i += 16) sum = sum + score[i];
    v = v * (1.0f / tree16(sum));
    __syncthreads();
  } else if (a.score == RouterScore::Sigmoid) {
    v = math::sigmoid(v);
  }
  if (there) score[e] = v;
  const float key = there && a.select_bias != nullptr ? v + a.select_bias[e] : v;
  const unsigned bits = __float_as_uint(key == 0.0f ? 0.0f : key);
  auto* order = reinterpret_cast<unsigned*>(shared);
  if (there) order[e] = key != key ? 1u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (there && check.post != nullptr) slots[e] = inputs.slot;
  __syncthreads();
  if (e >= kWarp) return;
  unsigned own[N];
#pragma unroll
  for (int i = 0; i < N; ++i) own[i] = lane + i * kWarp < n ? order[lane + i * kWarp] : 0u;
  float sum = 0.0f, weight = 0.0f;
  int id = 0, first = 0;
#pragma unroll 1
  for (int r = 0; r < a.top_k; ++r) {
    unsigned best = 0;
    int at = n;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (own[i] > best) best = own[i], at = lane + i * kWarp;
    const unsigned top = __reduce_max_sync(kAll, best);
    const int winner = __reduce_min_sync(kAll, best == top ? at : n);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (lane + i * kWarp == winner) own[i] = 0;
    if (r == 0) first = winner;
    const float w = a.score == RouterScore::SoftmaxOfChosen ? math::exp(score[winner] - score[first]) : score[winner];
    sum = sum + w;
    if (lane == r) weight = w, id = winner;
  }
  if (check.forced != nullptr) id = inputs.forced;
  const bool chosen = lane < a.top_k;
  std::int32_t slot = -1, from = -1;
  if (check.post != nullptr) {
    slot = chosen ? slots[id] : -1;
    from = with_share(check, chosen, slot, inputs.share, lane);
  }
  if (!chosen) return;
  const bool chosen_only = a.score == RouterScore::SoftmaxOfChosen;
  if (a.normalize || chosen_only) weight = weight / (chosen_only ? sum : sum + a.norm_eps);
  a.weights.row(t)[lane] = weight * a.scaling;
  a.ids[t * a.ids_stride + lane] = id;
  if (check.post != nullptr) post_choice(check, id, lane, slot, from, inputs.serial);
}

// Token t by one warp. Ranks are chosen one after the other: the largest key, the lowest index among equals; a key that is
// NaN is never chosen before a number.
__device__ inline void route_token(const RouteArgs& a, std::int64_t t, int lane, float* memory) {
  float *score = memory, *key = score + a.n_experts, *value = key + a.n_experts, *chosen_weights = value + a.n_groups;
  int* chosen = reinterpret_cast<int*>(chosen_weights + a.top_k);
  const float* logits = a.logits.row(t);
#pragma unroll 8
  for (int e = lane; e < a.n_experts; e += kWarp) score[e] = __ldcg(logits + e);
  __syncwarp();
  if (a.score == RouterScore::Softmax) {
    softmax(score, a.n_experts, lane);
  } else if (a.score == RouterScore::Sigmoid) {
#pragma unroll 2
    for (int e = lane; e < a.n_experts; e += kWarp) score[e] = math::sigmoid(score[e]);
  }
  __syncwarp();
#pragma unroll 1
  for (int e = lane; e < a.n_experts; e += kWarp) key[e] = a.select_bias == nullptr ? score[e] : score[e] + a.select_bias[e];
  __syncwarp();
  if (a.n_groups > 1) mask_groups(a, key, value, lane);

  // Keys as integers that order like the floats; 0 is below all of them: taken. Up to 16 a lane stay in registers.
  constexpr int kOwn = 16;
  auto* order = reinterpret_cast<unsigned*>(key);
  unsigned own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = 0;
#pragma unroll 2
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
#pragma unroll 1
  for (int r = 0; r < a.top_k; ++r) {
    unsigned best = 0;
    int at = a.n_experts;
    if (small) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (own[i] > best) best = own[i], at = lane + i * kWarp;
    } else {
#pragma unroll 1
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
#pragma unroll 1
    for (int r = 0; r < a.top_k; ++r) {
      const float w = a.score == RouterScore::SoftmaxOfChosen ? math::exp(score[chosen[r]] - score[chosen[0]]) : score[chosen[r]];
      chosen_weights[r] = w;
      sum = sum + w;
    }
    value[0] = a.score == RouterScore::SoftmaxOfChosen ? sum : sum + a.norm_eps;
  }
  __syncwarp();
  const float divisor = value[0];
#pragma unroll 1
  for (int r = lane; r < a.top_k; r += kWarp) {
    float w = chosen_weights[r];
    if (a.normalize || a.score == RouterScore::SoftmaxOfChosen) w = w / divisor;
    a.weights.row(t)[r] = w * a.scaling;
    a.ids[t * a.ids_stride + r] = chosen[r];
  }
}

inline std::size_t route_bytes(const RouteArgs& a) {
  return static_cast<std::size_t>(2 * a.n_experts + (a.n_groups > 1 ? a.n_groups : 1) + 2 * a.top_k) * 4;
}

// Of route_block(): scores, keys (or a value for each warp), slots.
inline std::size_t route_block_bytes(const RouteArgs& a) { return static_cast<std::size_t>(3 * a.n_experts + 16) * 4; }

inline RouteArgs to_args(const Route& op) {
  RouteArgs a{};
  a.logits = to_rows(op.logits), a.weights = to_rows(op.weights);
  a.select_bias = op.select_bias.f32();
  a.ids = op.ids.i32(), a.ids_stride = op.ids.stride(0);
  a.n_experts = static_cast<int>(op.logits.dim(1)), a.top_k = static_cast<int>(op.ids.dim(1));
  a.n_groups = op.n_groups, a.topk_groups = op.topk_groups;
  a.score = op.score, a.normalize = op.normalize, a.norm_eps = op.norm_eps, a.scaling = op.scaling;
  return a;
}

}  // namespace moeflux::backend::cuda
