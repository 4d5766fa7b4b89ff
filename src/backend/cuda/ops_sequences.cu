// Sequences of a step of one token as one launch each: DeltaMix, HeadInputs.
#include <algorithm>

#include "backend/cuda/cluster.h"
#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/norms.h"

namespace moeflux::backend::cuda {
namespace {

// ---- DeltaMix

constexpr int kTaps = 4;
constexpr int kMostDim = 128;     // of a key or value head
constexpr int kMostCluster = 8;

struct DeltaMixArgs {
  const float *u, *taps;
  float* conv_state;
  const float *a, *b, *neg_exp_a, *dt_bias;
  float* state;
  const float *gate, *norm_weight;
  float* y;
  std::int64_t q_at, k_at, v_at, q_head, k_head, v_head, gate_head, y_head;  // in elements; *_at: of the convolution's channels
  int n_channels, dk, dv, n_k_heads, n_v_heads, parts;  // parts: blocks of a value head
  bool tiled;
  float q_scale, q_eps, k_scale, k_eps, norm_eps;
  std::byte* known;
};

// Columns [at, at + n) of a row of `cols` values in 8 bits, by one warp; n is a multiple of kKnownGroup.
[[maybe_unused]] __device__ inline void put_known_head(const float* x, int n, int at, int cols, int lane, std::byte* to) {
  const QuantizedX q = quantized_at(to, cols, kKnownGroup);
  for (int i0 = 0; i0 < n; i0 += kWarp * 8) {
    const int i = i0 + lane * 8;
    float v[8] = {}, d;
    int code[8], sum;
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = i < n ? x[i + k] : 0.0f;
    quantize8(v, kKnownGroup / 8, code, d, sum);
    if (i >= n) continue;
    put_planes(q, cols, at + i, code);
    if (i % kKnownGroup == 0) q.d[(at + i) / kKnownGroup] = d, q.sx[(at + i) / kKnownGroup] = static_cast<float>(sum);
  }
}

template <int N>
__device__ inline void load_values(const float* from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + i);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
}

// Some blocks per value head, each with a part of its columns: convolution of the channels they read, norms of the head's query and key, the
// delta rule with eight threads a column of the state (ops_delta.cu). The first of them gets all columns and makes the gated norm. The
// value heads of a key head convolve the same channels, so their blocks are a cluster, and the first one moves the channels' state on when
// all have read it. Small blocks, because the kernel before leaves no room for large ones until it ends.
__global__ void __launch_bounds__(kMostDim * 8) delta_mix_kernel(const __grid_constant__ DeltaMixArgs a) {
#ifdef MOEFLUX_CLUSTERS
  constexpr int N = kMostDim / 16;
  constexpr int kPart = 2 * N + 4;  // a thread's values of a key side by side, the next thread's in other banks
  __shared__ float x[3 * kMostDim], out[kMostDim], factors[3], gates[2];
  __shared__ __align__(16) float normed[2][8 * kPart];  // query and key as the threads of a column want them
  __shared__ std::uint64_t arrived;  // of the first block of a head: bytes of `out`
  const int per_key = a.n_v_heads / a.n_k_heads, at_head = blockIdx.x / a.parts, sub = static_cast<int>(blockIdx.x) - at_head * a.parts;
  const int kh = at_head / per_key, rank = at_head - kh * per_key, h = a.tiled ? rank * a.n_k_heads + kh : at_head;
  const int tid = threadIdx.x, part = tid & 7, dk = a.dk, dv = a.dv, own = dv / a.parts, column = sub * own + tid / 8;
  const bool live = tid / 8 < own, convolves = tid < 2 * dk + own, shares = tid < 2 * dk;
  const std::uint32_t barrier = shared_address(&arrived);
  if (sub == 0 && tid == 0) {
    barrier_init(barrier, 1);
    barriers_done();
    barrier_arrive_expecting(barrier, dv * 4);
  }
  cluster_come();

  // Weights and what the step before left: before the inputs are there.
  const std::int64_t channel = tid < dk ? a.q_at + kh * a.q_head + tid : shares ? a.k_at + kh * a.k_head + (tid - dk) : a.v_at + h * a.v_head + sub * own + (tid - 2 * dk);
  float w[kTaps], u[kTaps];
  if (convolves) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) w[j] = a.taps[channel * kTaps + j];
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) u[j] = a.conv_state[static_cast<std::int64_t>(j) * a.n_channels + channel];
  }
  float* state = a.state + (static_cast<std::int64_t>(h) * dv + (live ? column : 0)) * dk;
  float s0[N], s1[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int e = i * 16 + part;
    s0[i] = live && e < dk ? state[e] : 0.0f;
    s1[i] = live && e + 8 < dk ? state[e + 8] : 0.0f;
  }
  const float norm_weight = tid < dv ? a.norm_weight[tid] : 0.0f;
  begin_kernel();

  const float gate = tid < dv ? a.gate[h * a.gate_head + tid] : 0.0f;
  if (convolves) {
    u[kTaps - 1] = a.u[channel];
    float acc = 0.0f;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) acc = math::fma(w[j], u[j], acc);
    x[tid] = math::silu(acc);
  }
  if (tid == static_cast<int>(blockDim.x) - 1) {
    gates[0] = math::exp(a.neg_exp_a[h] * math::softplus(a.a[h] + a.dt_bias[h]));
    gates[1] = math::sigmoid(a.b[h]);
  }
  cluster_go();    // barriers are there
  cluster_come();  // what this block has used it has read: the old inputs
  __syncthreads();
  const int warp = tid / kWarp, lane = tid % kWarp;
  if (warp < 2) {
    const float dot = square16(x + warp * dk, dk, lane & 15);
    if (lane == 0) factors[warp] = warp == 0 ? a.q_scale / math::sqrt(dot + a.q_eps) : a.k_scale / math::sqrt(dot + a.k_eps);
  }
  __syncthreads();
  for (int i = tid; i < 2 * kMostDim; i += static_cast<int>(blockDim.x)) {
    const int which = i / kMostDim, e = i % kMostDim;
    normed[which][(e & 7) * kPart + (e >> 3 & 1) * N + e / 16] = e < dk ? x[which * dk + e] * factors[which] : 0.0f;
  }
  __syncthreads();

  const float decay = gates[0], beta = gates[1];
  float k0[N], k1[N], m0 = 0.0f, m1 = 0.0f;
  load_values<N>(&normed[1][part * kPart], k0);
  load_values<N>(&normed[1][part * kPart + N], k1);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s0[i] = s0[i] * decay;
    s1[i] = s1[i] * decay;
    m0 = math::fma(k0[i], s0[i], m0);
    m1 = math::fma(k1[i], s1[i], m1);
  }
  const float m = tree8(m0 + m1);
  const float d = beta * ((live ? x[2 * dk + tid / 8] : 0.0f) - m);
  float y0 = 0.0f, y1 = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    s0[i] = math::fma(k0[i], d, s0[i]);
    s1[i] = math::fma(k1[i], d, s1[i]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {  // at once: they take longer to get there than the rest of this kernel needs
    const int e = i * 16 + part;
    if (live && e < dk) state[e] = s0[i];
    if (live && e + 8 < dk) state[e + 8] = s1[i];
  }
  load_values<N>(&normed[0][part * kPart], k0);
  load_values<N>(&normed[0][part * kPart + N], k1);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    y0 = math::fma(k0[i], s0[i], y0);
    y1 = math::fma(k1[i], s1[i], y1);
  }
  const float y = tree8(y0 + y1);
  if (live && part == 0) {
    const std::uint32_t leader = cluster_rank() - static_cast<std::uint32_t>(sub);
    store_there(neighbour(shared_address(out + column), leader), y, neighbour(barrier, leader));
  }
  if (sub == 0) {
    barrier_wait(barrier, 0);
    if (warp == 0) {
      const float dot = square16(out, dv, lane & 15);
      if (lane == 0) factors[2] = 1.0f / math::sqrt(dot / static_cast<float>(dv) + a.norm_eps);
    }
    __syncthreads();
    if (tid < dv) {
      const float v = out[tid] * factors[2] * norm_weight * math::silu(gate);
      a.y[h * a.y_head + tid] = v;
      out[tid] = v;
    }
    if (a.known != nullptr) {
      __syncthreads();
      if (warp == 0) put_known_head(out, dv, h * dv, a.n_v_heads * dv, lane, a.known);
    }
  }
  cluster_go();
  if (convolves && (!shares || (rank == 0 && sub == 0)))
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) a.conv_state[static_cast<std::int64_t>(j) * a.n_channels + channel] = u[j + 1];
#endif
}

// ---- HeadInputs

struct HeadInputsArgs {
  float *q, *k;
  const float *v, *q_weight, *k_weight, *inv_freq;
  std::byte *k_cache, *v_cache;
  std::int64_t q_head, k_head, k_stride, v_stride;
  int n_q, n_kv, dim, half;
  float eps, magnitude;
  bool split, f16;
  CudaStream::Position pos;
};

constexpr int kHeadThreads = 128;
constexpr int kMostHeadDim = 1024;

// A block per head: of the queries, then of the keys, then of the values, which are only copied.
__global__ void __launch_bounds__(kHeadThreads) head_inputs_kernel(const __grid_constant__ HeadInputsArgs a) {
  __shared__ float row[kMostHeadDim], factor;
  const int b = blockIdx.x, tid = threadIdx.x;
  const bool query = b < a.n_q, value = b >= a.n_q + a.n_kv;
  const int head = query ? b : value ? b - a.n_q - a.n_kv : b - a.n_q;
  const float* weight = query ? a.q_weight : value ? nullptr : a.k_weight;
  begin_kernel();
  const float* x = query ? a.q + head * a.q_head : value ? a.v + static_cast<std::int64_t>(head) * a.dim : a.k + head * a.k_head;
  for (int i = tid; i < a.dim; i += kHeadThreads) row[i] = x[i];
  __syncthreads();
  if (weight != nullptr) {
    if (tid < kWarp) {
      const float dot = square16(row, a.dim, tid & 15);
      if (tid == 0) factor = 1.0f / math::sqrt(dot / static_cast<float>(a.dim) + a.eps);
    }
    __syncthreads();
    for (int i = tid; i < a.dim; i += kHeadThreads) row[i] = row[i] * factor * weight[i];
    __syncthreads();
  }
  const std::int64_t pos = a.pos.get();
  if (!value) {
    for (int i = tid; i < a.half; i += kHeadThreads) {
      const auto turn = math::sincos(static_cast<float>(pos) * a.inv_freq[i]);
      const float c = turn.cos * a.magnitude, sn = turn.sin * a.magnitude;
      float &pa = row[a.split ? i : 2 * i], &pb = row[a.split ? i + a.half : 2 * i + 1];
      const float a0 = pa, b0 = pb;
      pa = math::fma(a0, c, -(b0 * sn));
      pb = math::fma(b0, c, a0 * sn);
    }
    __syncthreads();
  }
  if (query) {
    for (int i = tid; i < a.dim; i += kHeadThreads) a.q[head * a.q_head + i] = row[i];
    return;
  }
  const std::int64_t at = pos * (value ? a.v_stride : a.k_stride) + static_cast<std::int64_t>(head) * a.dim;
  std::byte* cache = value ? a.v_cache : a.k_cache;
  for (int i = tid; i < a.dim; i += kHeadThreads) {
    if (a.f16)
      reinterpret_cast<std::uint16_t*>(cache)[at + i] = f32_to_f16(row[i]);
    else
      reinterpret_cast<float*>(cache)[at + i] = row[i];
  }
}

}  // namespace

void CudaBackend::run_sequence(Stream& stream, const DeltaMix& m) {
  const GatedDelta& d = m.delta;
  const auto dk = static_cast<int>(d.q.dim(2)), dv = static_cast<int>(d.v.dim(2)), n_k = static_cast<int>(d.q.dim(1)), n_v = static_cast<int>(d.v.dim(1));
  if (m.conv.u.dim(0) != 1 || m.conv.w.dim(1) != kTaps || !traits_.clusters || dk > kMostDim || dv > kMostDim || n_v % n_k != 0 || n_v / n_k > kMostCluster)
    return Backend::run_sequence(stream, m);
  int parts = 4;
  while (dv % parts != 0 || parts * (n_v / n_k) > kMostCluster) parts /= 2;
  const int threads = (std::max({64, dv, dv / parts * 8, 2 * dk + dv / parts + 1}) + 31) / 32 * 32;  // the last one has the gates to make
  DeltaMixArgs a{};
  a.u = m.conv.u.f32(), a.taps = m.conv.w.f32(), a.conv_state = m.conv.state.f32();
  a.a = m.gates.a.f32(), a.b = m.gates.b.f32(), a.neg_exp_a = m.gates.neg_exp_a.f32(), a.dt_bias = m.gates.dt_bias.f32();
  a.state = d.state.f32(), a.gate = m.norm.gate.f32(), a.norm_weight = m.norm.weight.f32(), a.y = m.norm.y.f32();
  a.q_at = d.q.f32() - m.conv.y.f32(), a.k_at = d.k.f32() - m.conv.y.f32(), a.v_at = d.v.f32() - m.conv.y.f32();
  a.q_head = d.q.stride(1), a.k_head = d.k.stride(1), a.v_head = d.v.stride(1), a.gate_head = m.norm.gate.stride(1), a.y_head = m.norm.y.stride(1);
  a.n_channels = static_cast<int>(m.conv.u.dim(1)), a.dk = dk, a.dv = dv, a.n_k_heads = n_k, a.n_v_heads = n_v;
  a.parts = parts, a.tiled = d.tiled_heads;
  a.q_scale = m.q_norm.scale, a.q_eps = m.q_norm.eps, a.k_scale = m.k_norm.scale, a.k_eps = m.k_norm.eps, a.norm_eps = m.norm.eps;
  CudaStream& s = use(stream);
  a.known = s.know(m.norm.y);
  launch_clusters(s, "DeltaMix", delta_mix_kernel, static_cast<unsigned>(n_v * parts), parts * (n_v / n_k), threads, 0, a);
}

void CudaBackend::run_sequence(Stream& stream, const HeadInputs& m) {
  const TensorView &q = m.q_norm.x, &k = m.k_norm.x;
  const auto dim = static_cast<int>(q.dim(2));
  const bool norms_agree = m.q_norm.weight.empty() == m.k_norm.weight.empty() && m.q_norm.eps == m.k_norm.eps;
  if (q.dim(0) != 1 || dim > kMostHeadDim || !norms_agree || m.k.cache.dtype != m.v.cache.dtype) return Backend::run_sequence(stream, m);
  CudaStream& s = use(stream);
  HeadInputsArgs a{};
  a.q = q.f32(), a.k = k.f32(), a.v = m.v.x.f32();
  a.q_weight = m.q_norm.weight.f32(), a.k_weight = m.k_norm.weight.f32(), a.inv_freq = m.q_rope.inv_freq.f32();
  a.k_cache = static_cast<std::byte*>(m.k.cache.data), a.v_cache = static_cast<std::byte*>(m.v.cache.data);
  a.q_head = q.stride(1), a.k_head = k.stride(1), a.k_stride = m.k.cache.stride(0), a.v_stride = m.v.cache.stride(0);
  a.n_q = static_cast<int>(q.dim(1)), a.n_kv = static_cast<int>(k.dim(1)), a.dim = dim;
  a.half = m.q_rope.inv_freq.empty() ? 0 : static_cast<int>(m.q_rope.inv_freq.dim(0));
  a.eps = m.q_norm.eps, a.magnitude = m.q_rope.magnitude, a.split = m.q_rope.style == RopeStyle::HalfSplit;
  a.f16 = m.k.cache.dtype == DType::F16;
  a.pos = s.position(m.k.pos0);
  launch(s, "HeadInputs", head_inputs_kernel, static_cast<unsigned>(a.n_q + 2 * a.n_kv), kHeadThreads, 0, a);
}

}  // namespace moeflux::backend::cuda
