// MatMul: rows in blocks for a few tokens, tensor cores for many.
#include <algorithm>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/matmul.h"

namespace moeflux::backend::cuda {
namespace {

constexpr int kMaxJobs = 8;

struct Job {
  Matrix w;
  const float* bias;
  float* y;
  std::int64_t y_stride;
  int first_block, rows_per_warp;
};
struct Jobs {
  Job job[kMaxJobs];
  int n;
  const float* x;
  std::int64_t x_stride;
};

__device__ const Job& job_of(const Jobs& jobs, int block) {
  int j = 0;
  while (j + 1 < jobs.n && block >= jobs.job[j + 1].first_block) ++j;
  return jobs.job[j];
}

__global__ void __launch_bounds__(kMvThreads) matvec_fast_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ __align__(16) std::byte memory[];
  const Job& job = job_of(jobs, blockIdx.x);
  const std::int64_t t = blockIdx.y;
  const QuantizedX q = quantized_at(memory, job.w.cols, job.w.group);
  quantize_block(RowLoad{jobs.x + t * jobs.x_stride}, job.w.cols, job.w.group, path_of(job.w), q);
  __syncthreads();
  const int row0 = (static_cast<int>(blockIdx.x) - job.first_block) * job.rows_per_warp * kMvWarps;
  matvec_block(job.w, q, terms_at(memory, job.w), row0, job.rows_per_warp, job.bias, job.y + t * job.y_stride);
}

constexpr int kExactRows = 8;  // of a block of 128 threads

__global__ void __launch_bounds__(128) matvec_exact_kernel(const __grid_constant__ Jobs jobs) {
  const Job& job = job_of(jobs, blockIdx.x);
  const std::int64_t t = blockIdx.y;
  const int row = (static_cast<int>(blockIdx.x) - job.first_block) * kExactRows + threadIdx.x / 16;
  const bool live = row < job.w.rows;
  const float v = exact_row(job.w, live ? row : 0, jobs.x + t * jobs.x_stride, threadIdx.x & 15);
  if (live && (threadIdx.x & 15) == 0) job.y[t * job.y_stride + row] = job.bias != nullptr ? v + job.bias[row] : v;
}

template <bool Signed>
__global__ void __launch_bounds__(kGemmThreads) gemm_kernel(const __grid_constant__ GemmTile tile, int n_tokens) {
  extern __shared__ __align__(16) std::byte memory[];
  GemmTile t = tile;
  t.first = blockIdx.y * kTileTokens;
  t.n = min(kTileTokens, n_tokens - t.first);
  gemm_tile<Signed>(*reinterpret_cast<GemmShared*>(memory), t, blockIdx.x * kTileRows);
}

__global__ void __launch_bounds__(kGemmThreads) gemm_exact_kernel(const __grid_constant__ ExactTile tile, int n_tokens) {
  __shared__ ExactShared shared;
  ExactTile t = tile;
  t.first = blockIdx.y * kExactTile;
  t.n = min(kExactTile, n_tokens - t.first);
  exact_tile(shared, t, blockIdx.x * kExactTile);
}

__global__ void quantize_kernel(RowsSource source, int cols, int group, std::int8_t* x8, float* d, float* sx) {
  const std::int64_t t = blockIdx.x;
  const QuantizedX q{x8 + t * cols, d + t * (cols / group), sx + t * (cols / group)};
  const float* x = source.x + t * source.x_stride;
  if (source.up == nullptr) {
    quantize_block(RowLoad{x}, cols, group, Path::Any, q);
  } else {
    const float* up = source.up + t * source.x_stride;
    const GluParams glu = source.glu;
    quantize_block(
        [=](int i, float(&out)[8]) {
#pragma unroll
          for (int k = 0; k < 8; ++k) out[k] = glu(x[i + k], up[i + k]);
        },
        cols, group, Path::Any, q);
  }
}

void add_job(Jobs& jobs, const MatMulPart& p, int& blocks, bool fast, std::size_t& bytes) {
  Job& j = jobs.job[jobs.n++];
  j.w = to_device(p.w);
  j.bias = p.bias.f32();
  j.y = p.y.f32();
  j.y_stride = p.y.stride(0);
  j.first_block = blocks;
  j.rows_per_warp = rows_per_warp(j.w);
  blocks += fast ? ceil_div(j.w.rows, j.rows_per_warp * kMvWarps) : ceil_div(j.w.rows, kExactRows);
  if (fast) bytes = std::max(bytes, matvec_bytes(j.w, j.rows_per_warp));
}

// The parts of one precision in as few launches as possible.
void matvec(CudaStream& s, const MatMul& op, bool fast) {
  Jobs jobs{};
  int blocks = 0;
  std::size_t bytes = 0;
  const auto flush = [&] {
    if (jobs.n == 0) return;
    jobs.x = op.x.f32();
    jobs.x_stride = op.x.stride(0);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(op.x.dim(0)));
    if (fast) {
      allow_shared(matvec_fast_kernel, bytes);
      matvec_fast_kernel<<<grid, kMvThreads, bytes, s.handle()>>>(jobs);
    } else {
      matvec_exact_kernel<<<grid, 128, 0, s.handle()>>>(jobs);
    }
    launched("MatMul");
    jobs = {};
    blocks = 0;
    bytes = 0;
  };
  for (const MatMulPart& p : op.parts) {
    if (is_fast(p.w, op.precision) != fast || p.w.rows == 0) continue;
    add_job(jobs, p, blocks, fast, bytes);
    if (jobs.n == kMaxJobs) flush();
  }
  flush();
}

}  // namespace

QuantizedRows quantize_rows(CudaStream& s, Scratch where, const RowsSource& source, std::int64_t n, int cols, int group) {
  const auto count = static_cast<std::size_t>(n), groups = static_cast<std::size_t>(cols / group);
  const std::size_t codes = (count * static_cast<std::size_t>(cols) + 255) / 256 * 256;
  std::byte* memory = s.scratch(where, codes + count * groups * 8);
  auto* x8 = reinterpret_cast<std::int8_t*>(memory);
  auto* d = reinterpret_cast<float*>(memory + codes);
  float* sx = d + count * groups;
  const int threads = std::min(256, (cols / 8 + 31) / 32 * 32);
  quantize_kernel<<<static_cast<unsigned>(n), threads, 0, s.handle()>>>(source, cols, group, x8, d, sx);
  launched("quantizing activations");
  return {x8, d, sx};
}

void gemm(CudaStream& s, const Matrix& w, const QuantizedRows& x, const float* bias, float* y, std::int64_t y_stride, std::int64_t n) {
  const GemmTile tile{w, x, nullptr, nullptr, 0, 0, bias, y, y_stride};
  const dim3 grid(static_cast<unsigned>(ceil_div(w.rows, kTileRows)), static_cast<unsigned>(ceil_div(n, kTileTokens)));
  if (w.kind == quant::FormatKind::Mxfp4) {
    allow_shared(gemm_kernel<true>, sizeof(GemmShared));
    gemm_kernel<true><<<grid, kGemmThreads, sizeof(GemmShared), s.handle()>>>(tile, static_cast<int>(n));
  } else {
    allow_shared(gemm_kernel<false>, sizeof(GemmShared));
    gemm_kernel<false><<<grid, kGemmThreads, sizeof(GemmShared), s.handle()>>>(tile, static_cast<int>(n));
  }
  launched("MatMul");
}

void gemm_exact(CudaStream& s, const Matrix& w, const float* x, std::int64_t x_stride, const float* bias, float* y, std::int64_t y_stride, std::int64_t n) {
  const ExactTile tile{w, x, x_stride, nullptr, nullptr, 0, 0, bias, y, y_stride};
  const dim3 grid(static_cast<unsigned>(ceil_div(w.rows, kExactTile)), static_cast<unsigned>(ceil_div(n, kExactTile)));
  gemm_exact_kernel<<<grid, kGemmThreads, 0, s.handle()>>>(tile, static_cast<int>(n));
  launched("MatMul");
}

void CudaBackend::execute(Stream& stream, const MatMul& op) {
  CudaStream& s = use(stream);
  const std::int64_t n = op.x.dim(0);
  if (n <= kMatvecTokens) {
    matvec(s, op, true);
    matvec(s, op, false);
    return;
  }
  for (const int group : {32, 64, 128}) {
    QuantizedRows x{};
    for (const MatMulPart& p : op.parts) {
      if (!is_fast(p.w, op.precision) || p.w.format.group != group || p.w.rows == 0) continue;
      if (x.x8 == nullptr)
        x = quantize_rows(s, Scratch::Quantized, {op.x.f32(), nullptr, op.x.stride(0), {}}, n, static_cast<int>(op.x.dim(1)), group);
      gemm(s, to_device(p.w), x, p.bias.f32(), p.y.f32(), p.y.stride(0), n);
    }
  }
  for (const MatMulPart& p : op.parts)
    if (!is_fast(p.w, op.precision) && p.w.rows > 0)
      gemm_exact(s, to_device(p.w), op.x.f32(), op.x.stride(0), p.bias.f32(), p.y.f32(), p.y.stride(0), n);
}

}  // namespace moeflux::backend::cuda
