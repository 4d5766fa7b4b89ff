// Embed, Add, norms, gates, rope, cache writes: row by row.
#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/norms.h"

namespace moeflux::backend::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void embed_kernel(const std::int32_t* tokens, Matrix table, Rows y) {
  begin_kernel();
  const int t = blockIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col < table.cols) y.row(t)[col] = weight_at(table, tokens[t], col);
}

// f(row, column) for every element; grid.y strides over rows.
template <class F>
__global__ void map_kernel(std::int64_t n_rows, int width, F f) {
  begin_kernel();
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= width) return;
  for (std::int64_t row = blockIdx.y; row < n_rows; row += gridDim.y) f(row, col);
}

template <class F>
void map(CudaStream& s, std::int64_t n_rows, int width, F f) {
  const int threads = width < kThreads ? (width + 31) / 32 * 32 : kThreads;
  const dim3 grid(static_cast<unsigned>(ceil_div(width, threads)), static_cast<unsigned>(n_rows < 32768 ? n_rows : 32768));
  launch(s, "an elementwise kernel", map_kernel<F>, grid, threads, 0, n_rows, width, f);
}

// The elementwise ops as functions of a row and a column. y may be an input.
struct AddAt {
  Rows a, b, y;
  __device__ void operator()(std::int64_t r, int i) const { y.row(r)[i] = a.row(r)[i] + b.row(r)[i]; }
};
struct ClampAt {
  Rows x, y;
  float limit;
  __device__ void operator()(std::int64_t r, int i) const {
    const float v = x.row(r)[i], low = v < -limit ? -limit : v;
    y.row(r)[i] = low > limit ? limit : low;
  }
};
struct SigmoidGateAt {
  Rows x, gate, y;
  __device__ void operator()(std::int64_t r, int i) const { y.row(r)[i] = x.row(r)[i] * math::sigmoid(gate.row(r)[i]); }
};
// The same for one token whose result lies in one piece of n values, which go along in 8 bits. A thread has eight of them.
__global__ void gate_known_kernel(SigmoidGateAt f, int width, int n, std::byte* known) {
  begin_kernel();
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 8, r = i / width, c = i - r * width;
  float v[8] = {};
  if (i < n) {
    const float *x = f.x.row(r) + c, *gate = f.gate.row(r) + c;
    float g[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = x[k], g[k] = gate[k];
#pragma unroll
    for (int k = 0; k < 8; ++k) f.y.row(r)[c + k] = v[k] = v[k] * math::sigmoid(g[k]);
  }
  int code[8], sum;
  float d;
  quantize8(v, kKnownGroup / 8, code, d, sum);
  if (i >= n) return;
  const QuantizedX q = quantized_at(known, n, kKnownGroup);
  put_planes(q, n, i, code);
  if (i % kKnownGroup == 0) q.d[i / kKnownGroup] = d, q.sx[i / kKnownGroup] = static_cast<float>(sum);
}

struct GluAt {
  Rows gate, up, y;
  GluParams glu;
  __device__ void operator()(std::int64_t r, int i) const { y.row(r)[i] = glu(gate.row(r)[i], up.row(r)[i]); }
};
template <class T>
struct CacheWriteAt {
  Rows x;
  T* cache;
  std::int64_t stride;
  CudaStream::Position pos;
  __device__ void operator()(std::int64_t r, int i) const {
    T& out = cache[(pos.get() + r) * stride + i];
    if constexpr (sizeof(T) == 4)
      out = x.row(r)[i];
    else
      out = f32_to_f16(x.row(r)[i]);
  }
};

enum class NormKind { Rms, AddRms, Gated, L2 };

struct NormArgs {
  Rows x, other, y;  // other: delta (AddRms: x is h, written too) or gate
  const float* weight;
  float eps, scale;
  std::int64_t n_rows;
  std::byte* known;
};

// A row per block of `blockDim.x` threads; rows wait in shared memory, so that y may be x. Sixteen threads make the
// dot product.
template <NormKind Kind>
__global__ void norm_kernel(NormArgs a) {
  extern __shared__ float row[];
  __shared__ float factor;
  const std::int64_t r = blockIdx.x;
  const int n = a.x.width;
  constexpr int kEarly = 4;  // weights of a thread that are loaded before the inputs are there
  float weight[kEarly];
  if constexpr (Kind != NormKind::L2)
#pragma unroll
    for (int k = 0; k < kEarly; ++k) weight[k] = threadIdx.x + k * blockDim.x < n ? a.weight[threadIdx.x + k * blockDim.x] : 0.0f;
  begin_kernel();
  float* x = a.x.row(r);
  const float* other = Kind == NormKind::AddRms ? a.other.row(r) : nullptr;
  constexpr int kBatch = 4;  // loads under way
  for (int i0 = threadIdx.x; i0 < n; i0 += kBatch * static_cast<int>(blockDim.x)) {
    float v[kBatch], add[kBatch] = {};
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (const int i = i0 + k * static_cast<int>(blockDim.x); i < n) {
        v[k] = x[i];
        if constexpr (Kind == NormKind::AddRms) add[k] = other[i];
      }
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (const int i = i0 + k * static_cast<int>(blockDim.x); i < n) {
        if constexpr (Kind == NormKind::AddRms) x[i] = v[k] = v[k] + add[k];
        row[i] = v[k];
      }
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const float dot = square16(row, n, threadIdx.x & 15);
    if (threadIdx.x == 0)
      factor = Kind == NormKind::L2 ? a.scale / math::sqrt(dot + a.eps) : 1.0f / math::sqrt(dot / static_cast<float>(n) + a.eps);
  }
  __syncthreads();
  const float f = factor;
  float* y = a.y.row(r);
  const auto put = [&](int i, float w) {
    float v = row[i] * f;
    if constexpr (Kind != NormKind::L2) v = v * w;
    if constexpr (Kind == NormKind::Gated) v = v * math::silu(a.other.row(r)[i]);
    y[i] = row[i] = v;
  };
#pragma unroll
  for (int k = 0; k < kEarly; ++k)
    if (threadIdx.x + k * blockDim.x < n) put(threadIdx.x + k * blockDim.x, weight[k]);
  for (int i = threadIdx.x + kEarly * blockDim.x; i < n; i += blockDim.x) put(i, Kind != NormKind::L2 ? a.weight[i] : 0.0f);
  if (a.known == nullptr) return;
  __syncthreads();
  put_known(row, n, a.known);
}

// Narrow rows (heads): a warp each, eight to a block.
template <NormKind Kind>
__global__ void head_norm_kernel(NormArgs a) {
  begin_kernel();
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (r >= a.n_rows) return;
  const int lane = threadIdx.x % kWarp, n = a.x.width;
  const float* x = a.x.row(r);
  const float dot = square16(x, n, lane & 15);
  const float f = Kind == NormKind::L2 ? a.scale / math::sqrt(dot + a.eps) : 1.0f / math::sqrt(dot / static_cast<float>(n) + a.eps);
  float* y = a.y.row(r);
  for (int i = lane; i < n; i += kWarp) {
    float v = x[i] * f;
    if constexpr (Kind != NormKind::L2) v = v * a.weight[i];
    if constexpr (Kind == NormKind::Gated) v = v * math::silu(a.other.row(r)[i]);
    y[i] = v;
  }
}

constexpr int kHeadWidth = 512;  // rows up to here are a warp's

template <NormKind Kind>
void norm(CudaStream& s, const NormArgs& a) {
  const int n = a.x.width;
  if (Kind != NormKind::AddRms && n <= kHeadWidth) {
    const int warps = a.n_rows >= 1024 ? 8 : 2;
    return launch(s, "a norm", head_norm_kernel<Kind>, static_cast<unsigned>(ceil_div(a.n_rows, warps)), warps * kWarp, 0, a);
  }
  launch_large(s, "a norm", norm_kernel<Kind>, static_cast<unsigned>(a.n_rows), n >= 2048 ? 512 : n >= 512 ? 256 : 64, static_cast<std::size_t>(n) * 4, a);
}

struct RopeArgs {
  float* x;
  std::int64_t token_stride, head_stride;
  int n_heads, half;
  const float* inv_freq;
  CudaStream::Position pos;
  bool split;
  float magnitude;
};

// A thread has one frequency of one token and turns it in all heads.
__global__ void rope_kernel(RopeArgs a) {
  begin_kernel();
  const int i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
  if (i >= a.half) return;
  const auto v = math::sincos(static_cast<float>(static_cast<std::int64_t>(a.pos.get()) + t) * a.inv_freq[i]);
  const float c = v.cos * a.magnitude, sn = v.sin * a.magnitude;
  for (int h = blockIdx.z; h < a.n_heads; h += gridDim.z) {
    float* x = a.x + t * a.token_stride + h * a.head_stride;
    float& pa = x[a.split ? i : 2 * i];
    float& pb = x[a.split ? i + a.half : 2 * i + 1];
    const float a0 = pa, b0 = pb;
    pa = math::fma(a0, c, -(b0 * sn));
    pb = math::fma(b0, c, a0 * sn);
  }
}

}  // namespace

void CudaBackend::execute(Stream& stream, const Embed& op) {
  CudaStream& s = use(stream);
  const std::int32_t* tokens = s.step_inputs + 1;
  if (s.step_tokens.data() != op.tokens.data() || s.step_tokens.size() != op.tokens.size()) {
    auto* copy = s.scratch_of<std::int32_t>(Scratch::Tokens, op.tokens.size());
    check_cuda(cudaMemcpyAsync(copy, op.tokens.data(), op.tokens.size_bytes(), cudaMemcpyHostToDevice, s.handle()), "copying tokens");
    tokens = copy;
  }
  const dim3 grid(static_cast<unsigned>(ceil_div(op.table.cols, kThreads)), static_cast<unsigned>(op.y.dim(0)));
  launch(s, "Embed", embed_kernel, grid, kThreads, 0, tokens, to_device(op.table), to_rows(op.y));
}

void CudaBackend::execute(Stream& stream, const Add& op) {
  const AddAt f{to_rows(op.a), to_rows(op.b), to_rows(op.y)};
  map(use(stream), op.y.dim(0), f.y.width, f);
}

void CudaBackend::execute(Stream& stream, const RmsNorm& op) {
  if (goes_along(stream, op)) return;
  CudaStream& s = use(stream);
  const bool whole_row = op.x.rank == 2 && op.x.dim(1) > kHeadWidth;  // narrower ones are heads' kernels, which write f32 alone
  norm<NormKind::Rms>(s, {to_rows(op.x), {}, to_rows(op.y), op.weight.f32(), op.eps, 1.0f, n_rows(op.x), whole_row ? s.know(op.y) : nullptr});
}

void CudaBackend::execute(Stream& stream, const AddRmsNorm& op) {
  CudaStream& s = use(stream);
  norm<NormKind::AddRms>(s, {to_rows(op.h), to_rows(op.delta), to_rows(op.y), op.weight.f32(), op.eps, 1.0f, op.h.dim(0), s.know(op.y)});
}

void CudaBackend::execute(Stream& stream, const GatedRmsNorm& op) {
  norm<NormKind::Gated>(use(stream), {to_rows(op.x), to_rows(op.gate), to_rows(op.y), op.weight.f32(), op.eps, 1.0f, n_rows(op.x), nullptr});
}

void CudaBackend::execute(Stream& stream, const L2Norm& op) {
  norm<NormKind::L2>(use(stream), {to_rows(op.x), {}, to_rows(op.y), nullptr, op.eps, op.scale, n_rows(op.x), nullptr});
}

void CudaBackend::execute(Stream& stream, const Clamp& op) {
  const ClampAt f{to_rows(op.x), to_rows(op.y), op.limit};
  map(use(stream), op.x.dim(0), f.y.width, f);
}

void CudaBackend::execute(Stream& stream, const SigmoidGate& op) {
  const SigmoidGateAt f{to_rows(op.x), to_rows(op.gate), to_rows(op.y)};
  CudaStream& s = use(stream);
  std::byte* const known = s.know(op.y);
  if (known == nullptr) return map(s, n_rows(op.x), f.y.width, f);
  const auto n = static_cast<int>(n_rows(op.x) * f.y.width);
  launch(s, "SigmoidGate", gate_known_kernel, static_cast<unsigned>(ceil_div(n, 8 * 128)), 128, 0, f, f.y.width, n, known);
}

void CudaBackend::execute(Stream& stream, const Glu& op) {
  const GluAt f{to_rows(op.gate), to_rows(op.up), to_rows(op.y), {op.kind, op.limit, op.alpha}};
  map(use(stream), op.y.dim(0), f.y.width, f);
}

void CudaBackend::execute(Stream& stream, const Rope& op) {
  CudaStream& s = use(stream);
  const int half = static_cast<int>(op.inv_freq.dim(0)), n_heads = static_cast<int>(op.x.dim(1));
  if (half == 0) return;
  const std::int64_t n = op.x.dim(0);
  const dim3 grid(static_cast<unsigned>(ceil_div(half, 64)), static_cast<unsigned>(n), n < 16 ? static_cast<unsigned>(n_heads) : 1u);
  for (std::int64_t t = 0; t < n; t += 32768) {  // grid.y ends at 65535
    RopeArgs a{op.x.f32() + t * op.x.stride(0), op.x.stride(0), op.x.stride(1), n_heads, half, op.inv_freq.f32(), s.position(op.pos0 + t),
               op.style == RopeStyle::HalfSplit, op.magnitude};
    launch(s, "Rope", rope_kernel, dim3(grid.x, static_cast<unsigned>(n - t < 32768 ? n - t : 32768), grid.z), 64, 0, a);
  }
}

void CudaBackend::execute(Stream& stream, const CacheWrite& op) {
  CudaStream& s = use(stream);
  const Rows x = to_rows(op.x);
  const auto pos = s.position(op.pos0);
  if (op.cache.dtype == DType::F32)
    map(s, op.x.dim(0), x.width, CacheWriteAt<float>{x, op.cache.f32(), op.cache.stride(0), pos});
  else
    map(s, op.x.dim(0), x.width, CacheWriteAt<std::uint16_t>{x, op.cache.u16(), op.cache.stride(0), pos});
}

}  // namespace moeflux::backend::cuda
