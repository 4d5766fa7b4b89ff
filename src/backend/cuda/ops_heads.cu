// HeadMatMul: a small matrix per head, one chain of fmas per output in ascending inputs.
//
// A block has some outputs of one head. It brings the bytes of their weights to shared memory as they are, all at once and before the
// kernel before has ended; then every thread walks down its output and decodes on the way. Weights whose bytes are too many for that are
// decoded a piece at a time.
#include <algorithm>

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

__device__ void pass_on(const HeadArgs& a, int head, int first, int n_tokens) {
  for (int t = first; t < first + n_tokens; ++t)
    for (int p = threadIdx.x; p < a.n_passed; p += blockDim.x)
      a.y[t * a.y_token + head * a.y_head + a.n_out + p] = a.x[t * a.x_token + head * a.x_head + a.n_in + p];
}

// ---- the bytes of a block's weights at once

constexpr int kStageThreads = 128;
// Outputs of a block: stored one a row, so that a warp has a row a lane; or one a column, one a thread.
constexpr int kRowOutputs = 32, kColumnOutputs = 128;
constexpr int kGap = 16;          // bytes between rows in shared memory: lanes that walk down rows meet other banks
constexpr int kTokenRounds = 8;   // of a block, many tokens: what was brought serves them all
constexpr std::size_t kMostStaged = 64u << 10;

// A piece of the stored matrix, as it lies in shared memory.
struct Piece {
  int rows, cols, row_bytes, scale_bytes;  // bytes of a row without the gap
  std::size_t scales, biases, x;           // where they begin, then the end of weights
};

__host__ __device__ inline int scale_size(const Matrix& m) { return m.kind == quant::FormatKind::Mxfp4 ? 1 : m.scale_dtype == DType::F32 ? 4 : 2; }
__host__ __device__ inline Piece piece_of(const HeadArgs& a) {
  Piece p{};
  p.rows = a.inputs_first ? a.n_in : kRowOutputs;
  p.cols = a.inputs_first ? (a.n_out < kColumnOutputs ? a.n_out : kColumnOutputs) : a.n_in;
  p.row_bytes = (p.cols * a.w.bits + 7) / 8;
  if (a.w.group > 0) p.scale_bytes = (p.cols + a.w.group - 1) / a.w.group * scale_size(a.w);
  const auto align = [](std::size_t n) { return (n + 15) / 16 * 16; };
  p.scales = align(static_cast<std::size_t>(p.rows) * static_cast<std::size_t>(p.row_bytes + kGap));
  p.biases = p.scales + align(static_cast<std::size_t>(p.rows) * static_cast<std::size_t>(p.scale_bytes));
  p.x = p.biases + (a.w.kind == quant::FormatKind::Affine ? p.biases - p.scales : 0);
  return p;
}

// Whether a block's columns begin where groups and bytes do.
bool may_stage(const HeadArgs& a) {
  if (a.n_out == 0 || a.n_in == 0 || piece_of(a).x > kMostStaged) return false;
  return !a.inputs_first || a.n_out <= kColumnOutputs || (kColumnOutputs * a.w.bits % 8 == 0 && (a.w.group == 0 || kColumnOutputs % a.w.group == 0));
}

// Rows of `bytes` each, `from_stride` apart, to rows `to_stride` apart; sixteen bytes at a time where everything is aligned to that.
__device__ inline void stage_rows(const std::uint8_t* from, int from_stride, std::byte* to, int to_stride, int n_rows, int bytes) {
  if (((reinterpret_cast<std::uintptr_t>(from) | static_cast<unsigned>(from_stride) | static_cast<unsigned>(to_stride) | static_cast<unsigned>(bytes)) & 15) == 0) {
    const int pieces = bytes / 16;
#pragma unroll 8
    for (int e = threadIdx.x; e < n_rows * pieces; e += kStageThreads) {
      const int r = e / pieces, c = e - r * pieces;
      reinterpret_cast<uint4*>(to + r * to_stride)[c] = reinterpret_cast<const uint4*>(from + static_cast<std::size_t>(r) * from_stride)[c];
    }
    return;
  }
#pragma unroll 8
  for (int e = threadIdx.x; e < n_rows * bytes; e += kStageThreads) {
    const int r = e / bytes, c = e - r * bytes;
    to[r * to_stride + c] = static_cast<std::byte>(from[static_cast<std::size_t>(r) * from_stride + c]);
  }
}

// What some tokens have added up; x [n_in][Tokens] is in shared memory.
template <int Tokens>
struct Sums {
  const float* x;
  float acc[Tokens] = {};
  __device__ void add(int i, float w) {
#pragma unroll
    for (int t = 0; t < Tokens; ++t) acc[t] = math::fma(x[i * Tokens + t], w, acc[t]);
  }
};

// Output `at` of the piece, for any format.
template <int Tokens>
__device__ inline void walk_any(const Matrix& m, int at, int n_in, bool inputs_first, Sums<Tokens>& sums) {
#pragma unroll 4
  for (int i = 0; i < n_in; ++i) sums.add(i, inputs_first ? weight_at(m, i, at) : weight_at(m, at, i));
}

// The same for affine 4-bit codes: outputs are rows, eight codes a load, or columns.
template <int Tokens>
__device__ inline void walk_rows4(const Matrix& m, int at, int n_in, Sums<Tokens>& sums) {
  const auto* words = reinterpret_cast<const unsigned*>(m.data + at * m.row_bytes);
  for (int first = 0, g = 0; first < n_in; first += m.group, ++g) {
    const float s = scale_of(m, at, g), b = bias_of(m, at, g);
#pragma unroll 2
    for (int i = first; i < first + m.group; i += 8) {
      const unsigned word = words[i / 8];
#pragma unroll
      for (int k = 0; k < 8; ++k) sums.add(i + k, math::fma(s, code_value(word >> 4 * k & 15u), b));
    }
  }
}
template <int Tokens>
__device__ inline void walk_columns4(const Matrix& m, int at, int n_in, Sums<Tokens>& sums) {
  const int g = groups_of(at, m.group), shift = (at & 1) * 4;
  const std::uint8_t* codes = m.data + (at >> 1);
#pragma unroll 8
  for (int i = 0; i < n_in; ++i) sums.add(i, math::fma(scale_of(m, i, g), code_value(static_cast<unsigned>(codes[i * m.row_bytes]) >> shift & 15u), bias_of(m, i, g)));
}

template <int Tokens, bool Four>
__global__ void __launch_bounds__(kStageThreads) head_stage_kernel(const __grid_constant__ HeadArgs a) {
  extern __shared__ __align__(16) std::byte memory[];
  const Piece p = piece_of(a);
  const int head = blockIdx.y, outputs = a.inputs_first ? kColumnOutputs : kRowOutputs, o0 = blockIdx.x * outputs;
  const int row0 = a.inputs_first ? head * a.n_in : head * a.n_out + o0, col0 = a.inputs_first ? o0 : 0;
  const int n_rows = a.inputs_first ? a.n_in : min(kRowOutputs, a.n_out - o0), n_cols = a.inputs_first ? min(p.cols, a.n_out - o0) : a.n_in;
  const int row_bytes = (n_cols * a.w.bits + 7) / 8;
  Matrix m = a.w;
  m.data = reinterpret_cast<const std::uint8_t*>(memory), m.row_bytes = p.row_bytes + kGap;
  stage_rows(a.w.data + static_cast<std::size_t>(row0) * a.w.row_bytes + static_cast<std::size_t>(col0) * a.w.bits / 8, a.w.row_bytes, memory, m.row_bytes, n_rows, row_bytes);
  if (a.w.group > 0) {
    const int size = scale_size(a.w), at = groups_of(col0, a.w.group) * size, bytes = (n_cols + a.w.group - 1) / a.w.group * size;
    m.scales = reinterpret_cast<const std::uint8_t*>(memory + p.scales), m.scale_row_bytes = p.scale_bytes;
    stage_rows(a.w.scales + static_cast<std::size_t>(row0) * a.w.scale_row_bytes + at, a.w.scale_row_bytes, memory + p.scales, p.scale_bytes, n_rows, bytes);
    if (a.w.kind == quant::FormatKind::Affine) {
      m.biases = reinterpret_cast<const std::uint8_t*>(memory + p.biases);
      stage_rows(a.w.biases + static_cast<std::size_t>(row0) * a.w.scale_row_bytes + at, a.w.scale_row_bytes, memory + p.biases, p.scale_bytes, n_rows, bytes);
    }
  }
  begin_kernel();
  auto* x = reinterpret_cast<float*>(memory + p.x);
  const int t_begin = blockIdx.z * Tokens * (Tokens == 1 ? 1 : kTokenRounds), t_end = min(a.n_tokens, t_begin + Tokens * (Tokens == 1 ? 1 : kTokenRounds));
  for (int first = t_begin; first < t_end; first += Tokens) {
    const int n_tokens = min(Tokens, t_end - first);
    for (int e = threadIdx.x; e < Tokens * a.n_in; e += kStageThreads) {
      const int t = e / a.n_in, i = e - t * a.n_in;
      x[i * Tokens + t] = t < n_tokens ? a.x[(first + t) * a.x_token + head * a.x_head + i] : 0.0f;
    }
    __syncthreads();
    if (const int o = threadIdx.x; o < outputs && o0 + o < a.n_out) {
      Sums<Tokens> sums{x};
      if constexpr (Four)
        a.inputs_first ? walk_columns4(m, o, a.n_in, sums) : walk_rows4(m, o, a.n_in, sums);
      else
        walk_any(m, o, a.n_in, a.inputs_first, sums);
#pragma unroll
      for (int t = 0; t < Tokens; ++t)
        if (t < n_tokens) a.y[(first + t) * a.y_token + head * a.y_head + o0 + o] = sums.acc[t];
    }
    if (blockIdx.x == 0) pass_on(a, head, first, n_tokens);
    __syncthreads();
  }
}

// ---- a piece at a time

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
    if (o0 + tid < a.n_out) a.y[(t0 + t) * a.y_token + h * a.y_head + o0 + tid] = acc[t];
  }
  if (blockIdx.x == 0) pass_on(a, h, t0, min(kTokens, a.n_tokens - t0));
}

template <int Tokens>
void run_staged(CudaStream& s, const HeadArgs& a, int n_heads) {
  const bool four = a.w.kind == quant::FormatKind::Affine && a.w.bits == 4;
  const int outputs = a.inputs_first ? kColumnOutputs : kRowOutputs, rounds = Tokens == 1 ? 1 : kTokenRounds;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.n_out, outputs)), static_cast<unsigned>(n_heads), static_cast<unsigned>(ceil_div(a.n_tokens, Tokens * rounds)));
  const std::size_t bytes = piece_of(a).x + static_cast<std::size_t>(Tokens) * static_cast<std::size_t>(a.n_in) * 4;
  launch_large(s, "HeadMatMul", four ? head_stage_kernel<Tokens, true> : head_stage_kernel<Tokens, false>, grid, kStageThreads, bytes, a);
}

}  // namespace

void CudaBackend::execute(Stream& stream, const HeadMatMul& op) {
  HeadArgs a{};
  a.w = to_device(op.w);
  a.x = op.x.f32(), a.y = op.y.f32();
  a.x_token = op.x.stride(0), a.x_head = op.x.stride(1), a.y_token = op.y.stride(0), a.y_head = op.y.stride(1);
  a.n_in = static_cast<int>(op.n_inputs()), a.n_out = static_cast<int>(op.n_outputs()), a.n_passed = static_cast<int>(op.n_passed());
  a.n_tokens = static_cast<int>(op.x.dim(0)), a.inputs_first = op.inputs_first;
  if (a.n_tokens == 0) return;
  CudaStream& s = use(stream);
  const auto n_heads = static_cast<int>(op.x.dim(1));
  if (may_stage(a)) return a.n_tokens == 1 ? run_staged<1>(s, a, n_heads) : run_staged<8>(s, a, n_heads);
  const dim3 grid(static_cast<unsigned>(ceil_div(a.n_out, kOutputs)), static_cast<unsigned>(n_heads), static_cast<unsigned>(ceil_div(a.n_tokens, kTokens)));
  launch(s, "HeadMatMul", head_matmul_kernel, grid, kOutputs, 0, a);
}

}  // namespace moeflux::backend::cuda
