// CausalConv, DeltaGates, GatedDelta.
#include <cuda_pipeline.h>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"

namespace moeflux::backend::cuda {
namespace {

struct ConvArgs {
  const float *u, *w;
  float *state, *y;
  std::int64_t u_stride, y_stride;
  int n_channels, n_tokens;
};

// A thread keeps the taps and the last inputs of one channel while a run of tokens passes. Runs after the first begin
// with inputs of the op itself.
template <int Taps>
__global__ void conv_kernel(ConvArgs a, int per_run) {
  begin_kernel();
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= a.n_channels) return;
  const int begin = blockIdx.y * per_run, end = min(begin + per_run, a.n_tokens);
  float w[Taps], u[Taps];
#pragma unroll
  for (int j = 0; j < Taps; ++j) w[j] = a.w[static_cast<std::int64_t>(c) * Taps + j];
#pragma unroll
  for (int j = 0; j + 1 < Taps; ++j) {
    const int at = begin - (Taps - 1) + j;
    u[j] = at < 0 ? a.state[static_cast<std::int64_t>(at + Taps - 1) * a.n_channels + c] : a.u[at * a.u_stride + c];
  }
  for (int t = begin; t < end; ++t) {
    u[Taps - 1] = a.u[t * a.u_stride + c];
    float acc = 0.0f;
#pragma unroll
    for (int j = 0; j < Taps; ++j) acc = math::fma(w[j], u[j], acc);
    a.y[t * a.y_stride + c] = math::silu(acc);
#pragma unroll
    for (int j = 0; j + 1 < Taps; ++j) u[j] = u[j + 1];
  }
  if (gridDim.y == 1)
#pragma unroll
    for (int j = 0; j + 1 < Taps; ++j) a.state[static_cast<std::int64_t>(j) * a.n_channels + c] = u[j];
}

// The last Taps - 1 inputs, oldest first, become the state. After the convolution where it has several runs: they read
// the old one.
__global__ void conv_state_kernel(ConvArgs a, int keep) {
  begin_kernel();
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= a.n_channels) return;
  for (int i = 0; i < keep; ++i) {  // ascending: an older row lies further on and is still whole
    const int from = a.n_tokens - keep + i;
    a.state[static_cast<std::int64_t>(i) * a.n_channels + c] =
        from < 0 ? a.state[static_cast<std::int64_t>(from + keep) * a.n_channels + c] : a.u[from * a.u_stride + c];
  }
}

template <int Taps>
void conv(CudaStream& s, const ConvArgs& a, int taps) {
  if constexpr (Taps < CausalConv::kMaxTaps)
    if (taps != Taps) return conv<Taps + 1>(s, a, taps);
  const int per_run = a.n_tokens <= 64 ? a.n_tokens : 32;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.n_channels, 64)), static_cast<unsigned>(ceil_div(a.n_tokens, per_run)));
  launch(s, "CausalConv", conv_kernel<Taps>, grid, 64, 0, a, per_run);
  if (Taps > 1 && grid.y > 1) launch(s, "CausalConv", conv_state_kernel, grid.x, 64, 0, a, Taps - 1);
}

__global__ void gates_kernel(Rows a, Rows b, const float* neg_exp_a, const float* dt_bias, Rows decay, Rows beta, std::int64_t n_tokens) {
  begin_kernel();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n_tokens * a.width) return;
  const std::int64_t t = i / a.width;
  const int h = static_cast<int>(i % a.width);
  decay.row(t)[h] = math::exp(neg_exp_a[h] * math::softplus(a.row(t)[h] + dt_bias[h]));
  beta.row(t)[h] = math::sigmoid(b.row(t)[h]);
}

struct DeltaArgs {
  const float *q, *k, *v, *decay, *beta;
  float *state, *y;
  std::int64_t q_stride, q_head, k_stride, k_head, v_stride, v_head, y_stride, y_head, decay_stride, beta_stride;
  int n_tokens, n_k_heads, n_v_heads, dk, dv;
  bool tiled;
};

constexpr int kColumns = 16;     // of a block, eight threads each
constexpr int kDeltaThreads = kColumns * 8;
constexpr int kTokens = 16;      // staged together

// Keys and queries of some tokens in shared memory, the next ones on their way.
template <int N>
struct DeltaStage {
  float k[kTokens][16 * N], q[kTokens][16 * N];
  float v[kTokens][kColumns], decay[kTokens], beta[kTokens];
};

template <int N>
__device__ void stage_tokens(const DeltaArgs& a, int h, int kh, int c0, int t0, DeltaStage<N>& s) {
  const int n = min(kTokens, a.n_tokens - t0);
  for (int e = threadIdx.x; e < n * 16 * N; e += kDeltaThreads) {
    const int t = e / (16 * N), d = e % (16 * N);
    const bool has = d < a.dk;
    if (has) {
      __pipeline_memcpy_async(&s.k[t][d], a.k + (t0 + t) * a.k_stride + kh * a.k_head + d, 4);
      __pipeline_memcpy_async(&s.q[t][d], a.q + (t0 + t) * a.q_stride + kh * a.q_head + d, 4);
    } else {
      s.k[t][d] = 0.0f, s.q[t][d] = 0.0f;
    }
  }
  for (int e = threadIdx.x; e < n * kColumns; e += kDeltaThreads) {
    const int t = e / kColumns, c = e % kColumns;
    if (c0 + c < a.dv) __pipeline_memcpy_async(&s.v[t][c], a.v + (t0 + t) * a.v_stride + h * a.v_head + c0 + c, 4);
  }
  for (int t = threadIdx.x; t < n; t += kDeltaThreads) {
    __pipeline_memcpy_async(&s.decay[t], a.decay + (t0 + t) * a.decay_stride + h, 4);
    __pipeline_memcpy_async(&s.beta[t], a.beta + (t0 + t) * a.beta_stride + h, 4);
  }
}

// Eight threads have a column of the state in registers: thread p lanes p and p + 8 of the sixteen, so the first step
// of the tree is its own and three shuffles make the rest. N values a lane: dk <= 16 N.
template <int N>
__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(DeltaArgs a) {
  __shared__ DeltaStage<N> stage[2];
  begin_kernel();
  const int part = threadIdx.x & 7, column = threadIdx.x / 8, c0 = blockIdx.x * kColumns, c = c0 + column, h = blockIdx.y;
  const bool live = c < a.dv;
  const int kh = a.tiled ? h % a.n_k_heads : h / (a.n_v_heads / a.n_k_heads);
  stage_tokens<N>(a, h, kh, c0, 0, stage[0]);
  __pipeline_commit();
  float* state = a.state + (static_cast<std::int64_t>(h) * a.dv + (live ? c : 0)) * a.dk;
  float s0[N], s1[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int e = i * 16 + part;
    s0[i] = live && e < a.dk ? state[e] : 0.0f;
    s1[i] = live && e + 8 < a.dk ? state[e + 8] : 0.0f;
  }
  for (int t0 = 0, buffer = 0; t0 < a.n_tokens; t0 += kTokens, buffer ^= 1) {
    if (t0 + kTokens < a.n_tokens) stage_tokens<N>(a, h, kh, c0, t0 + kTokens, stage[buffer ^ 1]);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    const DeltaStage<N>& in = stage[buffer];
    const int n = min(kTokens, a.n_tokens - t0);
#pragma unroll 4
    for (int t = 0; t < n; ++t) {
      const float decay = in.decay[t], beta = in.beta[t], vc = in.v[t][column];
      float k0[N], k1[N], m0 = 0.0f, m1 = 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        k0[i] = in.k[t][i * 16 + part], k1[i] = in.k[t][i * 16 + part + 8];
        s0[i] = s0[i] * decay;
        s1[i] = s1[i] * decay;
        m0 = math::fma(k0[i], s0[i], m0);
        m1 = math::fma(k1[i], s1[i], m1);
      }
      const float m = tree8(m0 + m1);
      const float d = beta * (vc - m);
      float y0 = 0.0f, y1 = 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        s0[i] = math::fma(k0[i], d, s0[i]);
        s1[i] = math::fma(k1[i], d, s1[i]);
        y0 = math::fma(in.q[t][i * 16 + part], s0[i], y0);
        y1 = math::fma(in.q[t][i * 16 + part + 8], s1[i], y1);
      }
      const float y = tree8(y0 + y1);
      if (live && part == 0) a.y[(t0 + t) * a.y_stride + h * a.y_head + c] = y;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int e = i * 16 + part;
    if (live && e < a.dk) state[e] = s0[i];
    if (live && e + 8 < a.dk) state[e + 8] = s1[i];
  }
}

// Wider keys than any register file: the state stays in memory, sixteen threads a column.
__global__ void delta_wide_kernel(DeltaArgs a) {
  begin_kernel();
  const int lane = threadIdx.x & 15, c = blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16, h = blockIdx.y;
  const bool live = c < a.dv;
  const int kh = a.tiled ? h % a.n_k_heads : h / (a.n_v_heads / a.n_k_heads);
  float* s = a.state + (static_cast<std::int64_t>(h) * a.dv + (live ? c : 0)) * a.dk;
  for (int t = 0; t < a.n_tokens; ++t) {
    const float *q = a.q + kh * a.q_head + t * a.q_stride, *k = a.k + kh * a.k_head + t * a.k_stride;
    const float decay = a.decay[t * a.decay_stride + h], beta = a.beta[t * a.beta_stride + h];
    float m = 0.0f;
    for (int i = lane; live && i < a.dk; i += 16) {
      s[i] = s[i] * decay;
      m = math::fma(k[i], s[i], m);
    }
    m = tree16(m);
    const float d = beta * ((live ? a.v[t * a.v_stride + h * a.v_head + c] : 0.0f) - m);
    float y = 0.0f;
    for (int i = lane; live && i < a.dk; i += 16) {
      s[i] = math::fma(k[i], d, s[i]);
      y = math::fma(q[i], s[i], y);
    }
    y = tree16(y);
    if (live && lane == 0) a.y[t * a.y_stride + h * a.y_head + c] = y;
  }
}

}  // namespace

void CudaBackend::execute(Stream& stream, const CausalConv& op) {
  const ConvArgs a{op.u.f32(), op.w.f32(), op.state.f32(), op.y.f32(), op.u.stride(0), op.y.stride(0), static_cast<int>(op.u.dim(1)),
                   static_cast<int>(op.u.dim(0))};
  conv<1>(use(stream), a, static_cast<int>(op.w.dim(1)));
}

void CudaBackend::execute(Stream& stream, const DeltaGates& op) {
  const std::int64_t n = op.a.dim(0) * op.a.dim(1);
  if (n == 0) return;
  launch(use(stream), "DeltaGates", gates_kernel, static_cast<unsigned>(ceil_div(n, 128)), 128, 0, to_rows(op.a), to_rows(op.b), op.neg_exp_a.f32(),
         op.dt_bias.f32(), to_rows(op.decay), to_rows(op.beta), op.a.dim(0));
}

void CudaBackend::execute(Stream& stream, const GatedDelta& op) {
  DeltaArgs a{};
  a.q = op.q.f32(), a.k = op.k.f32(), a.v = op.v.f32(), a.decay = op.decay.f32(), a.beta = op.beta.f32();
  a.state = op.state.f32(), a.y = op.y.f32();
  a.q_stride = op.q.stride(0), a.q_head = op.q.stride(1), a.k_stride = op.k.stride(0), a.k_head = op.k.stride(1);
  a.v_stride = op.v.stride(0), a.v_head = op.v.stride(1), a.y_stride = op.y.stride(0), a.y_head = op.y.stride(1);
  a.decay_stride = op.decay.stride(0), a.beta_stride = op.beta.stride(0);
  a.n_tokens = static_cast<int>(op.q.dim(0)), a.n_k_heads = static_cast<int>(op.q.dim(1)), a.n_v_heads = static_cast<int>(op.v.dim(1));
  a.dk = static_cast<int>(op.q.dim(2)), a.dv = static_cast<int>(op.v.dim(2)), a.tiled = op.tiled_heads;
  CudaStream& s = use(stream);
  const auto heads = static_cast<unsigned>(a.n_v_heads);
  const dim3 grid(static_cast<unsigned>(ceil_div(a.dv, kColumns)), heads);
  if (a.dk <= 64)
    launch(s, "GatedDelta", delta_kernel<4>, grid, kDeltaThreads, 0, a);
  else if (a.dk <= 128)
    launch(s, "GatedDelta", delta_kernel<8>, grid, kDeltaThreads, 0, a);
  else
    launch(s, "GatedDelta", delta_wide_kernel, dim3(static_cast<unsigned>(ceil_div(a.dv, 8)), heads), 128, 0, a);
}

}  // namespace moeflux::backend::cuda
