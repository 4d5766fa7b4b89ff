// MatMul: rows in blocks for a few tokens, tensor cores for many.
#include <algorithm>
#include <vector>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/matmul.h"
#include "backend/cuda/matvec64.h"

namespace moeflux::backend::cuda {
namespace {

constexpr int kMaxJobs = 8;

struct Job {
  Matrix w;
  const float* bias;
  float* y;
  std::int64_t y_stride;
  int first_block, n_blocks;
};
struct Jobs {
  Job job[kMaxJobs];
  int n;
  const float* x;
  std::int64_t x_stride;
  bool staged;  // exact: rows go through shared memory
  const uint4* known;  // x in 8 bits, of matvec64_kernel
};

__device__ const Job& job_of(const Jobs& jobs, int block) {
  int j = 0;
  while (j + 1 < jobs.n && block >= jobs.job[j + 1].first_block) ++j;
  return jobs.job[j];
}

__global__ void __launch_bounds__(kMvThreads, 3) matvec_fast_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ __align__(16) std::byte memory[];
  const Job& job = job_of(jobs, blockIdx.x);
  const std::int64_t t = blockIdx.y;
  cuda::matvec(job.w, RowLoad{jobs.x + t * jobs.x_stride}, memory, static_cast<int>(blockIdx.x) - job.first_block, job.n_blocks, job.bias,
         job.y + t * job.y_stride, true);
}

// Known: x is in 8 bits already; else every block makes it so.
template <class Mv, bool Known>
__global__ void __launch_bounds__(kMvThreads, 3) matvec64_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ __align__(16) std::byte memory[];
  const Job& job = job_of(jobs, blockIdx.x);
  const int tile = static_cast<int>(blockIdx.x) - job.first_block;
  Mv mv{job.w, memory};
  mv.fetch(tile * mv.block_rows(), 0);
  begin_kernel();
  const QuantizedX q = quantized_at(memory, job.w.cols, group_of(Mv::kPath));
  const std::int64_t t = blockIdx.y;
  if constexpr (Known)
    copy_known(jobs.known, job.w.cols, memory);
  else
    quantize_block(RowLoad{jobs.x + t * jobs.x_stride}, job.w.cols, group_of(Mv::kPath), order_of(Mv::kPath), q);
  __syncthreads();
  mv.run(q, tile, job.n_blocks, job.bias, job.y + t * job.y_stride);
}

template <Exact E>
__global__ void __launch_bounds__(kExactThreads) matvec_exact_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ __align__(16) std::byte memory[];
  const Job& job = job_of(jobs, blockIdx.x);
  const std::int64_t t = blockIdx.y;
  matvec_exact<E>(job.w, jobs.x + t * jobs.x_stride, memory, jobs.staged, (static_cast<int>(blockIdx.x) - job.first_block) * kExactRows, job.bias,
               job.y + t * job.y_stride, true);
}

template <Codes C>
__global__ void __launch_bounds__(kGemmThreads, 2) gemm_kernel(const __grid_constant__ GemmTile tile, int n_tokens) {
  extern __shared__ __align__(16) std::byte memory[];
  begin_kernel();
  GemmTile t = tile;
  t.first = blockIdx.y * kTileTokens;
  t.n = min(kTileTokens, n_tokens - t.first);
  run_tile<C>(memory, t, blockIdx.x * kTileRows);
}

__global__ void __launch_bounds__(kGemmThreads) gemm_exact_kernel(const __grid_constant__ ExactTile tile, int n_tokens) {
  __shared__ ExactShared shared;
  begin_kernel();
  ExactTile t = tile;
  t.first = blockIdx.y * kExactTile;
  t.n = min(kExactTile, n_tokens - t.first);
  exact_tile(shared, t, blockIdx.x * kExactTile);
}

__global__ void quantize_kernel(RowsSource source, int cols, int group, bool paired, std::int8_t* x8, float* d, float* sx) {
  begin_kernel();
  const std::int64_t t = blockIdx.x;
  const QuantizedX q{x8 + t * cols, d + t * (cols / group), sx + t * (cols / group)};
  const float* x = source.x + t * source.x_stride;
  if (source.up == nullptr)
    quantize_block(RowLoad{x}, cols, group, paired ? Order::Paired : Order::Natural, q);
  else
    quantize_block(GluLoad{x, source.up + t * source.x_stride, source.glu}, cols, group, paired ? Order::Paired : Order::Natural, q);
}

// A matrix as f32, for many tokens in exact precision: decoded once.
__global__ void decode_kernel(Matrix m, float* out) {
  begin_kernel();
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col < m.cols) out[static_cast<std::size_t>(blockIdx.y) * m.cols + col] = weight_at(m, blockIdx.y, col);
}

// Enough blocks for three on each of some hundred processors; more only take turns.
constexpr int kMostBlocks = 396;

// Whether blocks of the widths that divide rows are enough for the chip (flat_cut).
bool fills_chip(const MatMul& op) {
  int blocks = 0;
  for (const MatMulPart& p : op.parts)
    if (const Matrix m = to_device(p.w); is_fast(p.w, op.precision) && width_of(m) != 0) blocks += ceil_div(m.rows, cut_of(m).rows * kMvWarps);
  return blocks >= kMostBlocks / 3;
}

void add_job(Jobs& jobs, const MatMulPart& p, int& blocks, bool fast, bool by_width) {
  Job& j = jobs.job[jobs.n++];
  j.w = to_device(p.w);
  if (fast && by_width && width_of(j.w) != 0) j.w.flat_units = 0;
  j.bias = p.bias.f32();
  j.y = p.y.f32();
  j.y_stride = p.y.stride(0);
  j.first_block = blocks;
  j.n_blocks = fast ? std::min(kMostBlocks, ceil_div(j.w.rows, block_rows(j.w))) : ceil_div(j.w.rows, kExactRows);
  blocks += j.n_blocks;
}

// The parts of one precision in as few launches as possible.
void run_matvec(CudaStream& s, const MatMul& op, bool fast) {
  Jobs jobs{};
  int blocks = 0;
  const bool by_width = fast && fills_chip(op);
  const auto flush = [&] {
    if (jobs.n == 0) return;
    jobs.x = op.x.f32();
    jobs.x_stride = op.x.stride(0);
    jobs.staged = true;
    jobs.known = fast && op.x.dim(0) == 1 ? reinterpret_cast<const uint4*>(s.known_of(jobs.x, op.x.dim(1))) : nullptr;
    std::size_t bytes = 0;
    Exact exact = exact_of(jobs.job[0].w);
    bool alike = fast;
    for (int j = 0; j < jobs.n; ++j) {
      bytes = std::max(bytes, fast ? matvec_bytes(jobs.job[j].w) : exact_bytes(jobs.job[j].w));
      jobs.staged = jobs.staged && exact_bytes(jobs.job[j].w) > 0;
      alike = alike && same_matvec64(jobs.job[0].w, jobs.job[j].w);
      if (exact_of(jobs.job[j].w) != exact) exact = Exact::Any;
    }
    if (!fast && !jobs.staged) bytes = 0;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(op.x.dim(0)));
    if (alike) {
      with_matvec64(jobs.job[0].w, [&]<class Mv>() {
        const bool known = jobs.known != nullptr && Mv::kPath == Path::Nibble;
        launch_large(s, "MatMul", known ? matvec64_kernel<Mv, true> : matvec64_kernel<Mv, false>, grid, kMvThreads, Mv::bytes(jobs.job[0].w), jobs);
      });
    } else if (fast) {
      launch_large(s, "MatMul", matvec_fast_kernel, grid, kMvThreads, bytes, jobs);
    } else {
      const auto kernel = !jobs.staged || exact == Exact::Any ? matvec_exact_kernel<Exact::Any> : exact == Exact::Bf16 ? matvec_exact_kernel<Exact::Bf16>
                          : exact == Exact::Byte                            ? matvec_exact_kernel<Exact::Byte>
                                                                            : matvec_exact_kernel<Exact::Nibble>;
      launch_large(s, "MatMul", kernel, grid, kExactThreads, bytes, jobs);
    }
    jobs = {};
    blocks = 0;
  };
  for (const MatMulPart& p : op.parts) {
    if (is_fast(p.w, op.precision) != fast || p.w.rows == 0) continue;
    add_job(jobs, p, blocks, fast, by_width);
    if (jobs.n == kMaxJobs) flush();
  }
  flush();
}

}  // namespace

// Every row of a block has a thread. Where a width divides the rows its kernels are faster, unless rows take many of its steps and there are
// few of them: then the caller has a choice.
constexpr int kManySteps = 128;  // units
void flat_cut(Matrix& m) {
  const Path path = path_of(m);
  if (path == Path::Any) return;
  const int units = row_units(m), per_group = m.group * m.bits / 128, width = width_of(m);
  if (width > 16 || (width == 16 && units < kManySteps)) return;
  if (units < 2 || units > kFlatUnits || m.cols * m.bits % 128 != 0) return;
  if (path == Path::Mx ? m.scale_row_bytes != units : per_group < 2 || m.scale_row_bytes != units / per_group * 2) return;
  m.flat_units = static_cast<std::uint16_t>(units);
  m.flat_rows = static_cast<std::uint16_t>(std::min(kMvThreads, kFlatUnits / units));
  m.flat_magic = 0xffffffffu / static_cast<unsigned>(units) + 1;
}

QuantizedRows quantize_rows(CudaStream& s, Scratch where, const RowsSource& source, std::int64_t n, const Matrix& w) {
  const auto count = static_cast<std::size_t>(n), groups = static_cast<std::size_t>(w.cols / w.group);
  const std::size_t codes = (count * static_cast<std::size_t>(w.cols) + 255) / 256 * 256;
  std::byte* memory = s.scratch(where, codes + count * groups * 8);
  auto* x8 = reinterpret_cast<std::int8_t*>(memory);
  auto* d = reinterpret_cast<float*>(memory + codes);
  float* sx = d + count * groups;
  launch(s, "quantizing activations", quantize_kernel, static_cast<unsigned>(n), std::min(256, (w.cols / 8 + 31) / 32 * 32), 0, source, w.cols, w.group,
         packed_nibbles(w), x8, d, sx);
  return {x8, d, sx};
}

void gemm(CudaStream& s, const Matrix& w, const QuantizedRows& x, const float* bias, float* y, std::int64_t y_stride, std::int64_t n) {
  const GemmTile tile{w, x, nullptr, nullptr, 0, 0, bias, y, y_stride};
  const dim3 grid(static_cast<unsigned>(ceil_div(w.rows, kTileRows)), static_cast<unsigned>(ceil_div(n, kTileTokens)));
  with_codes(w, [&]<Codes C>() { launch_large(s, "MatMul", gemm_kernel<C>, grid, kGemmThreads, tile_bytes<C>(), tile, static_cast<int>(n)); });
}

void gemm_exact(CudaStream& s, const Matrix& w, const float* x, std::int64_t x_stride, const float* bias, float* y, std::int64_t y_stride, std::int64_t n) {
  Matrix plain = w;
  if (w.kind != quant::FormatKind::F32) {
    plain.kind = quant::FormatKind::F32;
    float* out = s.scratch_of<float>(Scratch::Decoded, static_cast<std::size_t>(w.rows) * static_cast<std::size_t>(w.cols));
    for (int row = 0; row < w.rows; row += 32768) {
      Matrix part = w;
      part.data += static_cast<std::size_t>(row) * w.row_bytes, part.scales += static_cast<std::size_t>(row) * w.scale_row_bytes;
      part.biases += static_cast<std::size_t>(row) * w.scale_row_bytes;
      launch(s, "decoding a matrix", decode_kernel, dim3(static_cast<unsigned>(ceil_div(w.cols, 256)), static_cast<unsigned>(std::min(32768, w.rows - row))), 256, 0,
             part, out + static_cast<std::size_t>(row) * static_cast<std::size_t>(w.cols));
    }
    plain.data = reinterpret_cast<const std::uint8_t*>(out);
  }
  const ExactTile tile{plain, x, x_stride, nullptr, nullptr, 0, 0, bias, y, y_stride};
  const dim3 grid(static_cast<unsigned>(ceil_div(w.rows, kExactTile)), static_cast<unsigned>(ceil_div(n, kExactTile)));
  launch(s, "MatMul", gemm_exact_kernel, grid, kGemmThreads, 0, tile, static_cast<int>(n));
}

void CudaBackend::execute(Stream& stream, const MatMul& op) {
  CudaStream& s = use(stream, Known::Stays);
  const std::int64_t n = op.x.dim(0);
  if (n <= kMatvecTokens) {
    run_matvec(s, op, true);
    run_matvec(s, op, false);
    return;
  }
  // Activations are quantized once for each group size and order that occurs.
  for (const int group : {32, 64, 128})
    for (const bool paired : {false, true}) {
      QuantizedRows x{};
      for (const MatMulPart& p : op.parts) {
        const Matrix w = to_device(p.w);
        if (!is_fast(p.w, op.precision) || w.group != group || packed_nibbles(w) != paired || w.rows == 0) continue;
        if (x.x8 == nullptr) x = quantize_rows(s, Scratch::Quantized, {op.x.f32(), nullptr, op.x.stride(0), {}}, n, w);
        gemm(s, w, x, p.bias.f32(), p.y.f32(), p.y.stride(0), n);
      }
    }
  MatMul thin = op;  // a row or two: not worth a tile
  std::vector<MatMulPart> thin_parts;
  for (const MatMulPart& p : op.parts) {
    if (is_fast(p.w, op.precision) || p.w.rows == 0) continue;
    if (p.w.rows < 8 && n <= 32768)
      thin_parts.push_back(p);
    else
      gemm_exact(s, to_device(p.w), op.x.f32(), op.x.stride(0), p.bias.f32(), p.y.f32(), p.y.stride(0), n);
  }
  thin.parts = thin_parts;
  run_matvec(s, thin, false);
}

}  // namespace moeflux::backend::cuda
