// ExpertFfn and RoutedFfn: gate and up, glu, down, for every pair of a token and one of its experts.
//
// A few pairs: two launches, each block some rows of one pair's matrix; the glu and the quantization of its result
// happen where the second launch begins. Many: pairs sorted by expert, tiles of one expert's tokens on tensor cores.
#include <algorithm>
#include <vector>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/matmul.h"
#include "backend/cuda/matvec64.h"

namespace moeflux::backend::cuda {
namespace {

struct Ffn {
  Matrix gate, up, down;
  const float *gate_bias, *up_bias, *down_bias;
};

// Experts of a token have blocks enough, so a width that divides their rows is taken (flat_cut).
Matrix expert_matrix(const quant::MatrixView& v) {
  Matrix m = cuda::to_device(v);
  if (width_of(m) != 0) m.flat_units = 0;
  return m;
}
Ffn to_device(const FfnMatrices& m) {
  return {expert_matrix(m.gate), expert_matrix(m.up), expert_matrix(m.down), m.gate_bias.f32(), m.up_bias.f32(), m.down_bias.f32()};
}

enum Which { kGate, kUp, kDown };

// Where a pair's matrices are: in a table, or `stride` bytes a slot behind the first, in device memory or `host_offset` bytes away in
// main memory, which the device reads over the link.
struct FfnSource {
  Ffn first;
  std::int64_t stride, host_offset;
  const std::int32_t *slot_of, *chosen;  // chosen: slots of the only token's experts by rank; null: slot_of has them
  const Ffn* table;
  int n_experts, n_lent;

  __device__ static Matrix matrix(const Ffn& f, Which which, const float*& bias) {
    bias = which == kGate ? f.gate_bias : which == kUp ? f.up_bias : f.down_bias;
    return which == kGate ? f.gate : which == kUp ? f.up : f.down;
  }
  __device__ Matrix in_slot(int slot, Which which, const float*& bias) const {
    Matrix m = matrix(first, which, bias);
    const std::int64_t at = slot < 0 ? host_offset + stride * (-2 - slot) : stride * slot;
    m.data += at, m.scales += at, m.biases += at;
    if (bias != nullptr) bias = reinterpret_cast<const float*>(reinterpret_cast<const std::byte*>(bias) + at);
    return m;
  }
  __device__ Matrix matrix(int expert, Which which, const float*& bias) const {
    return table != nullptr ? matrix(table[expert], which, bias) : in_slot(slot_of != nullptr ? slot_of[expert] : expert, which, bias);
  }
  // Of the q-th of the only token's experts.
  __device__ int slot_at(const std::int32_t* ids, int q) const { return chosen != nullptr ? chosen[q] : slot_of[ids[q]]; }

  // Bytes from where the p-th of the token's experts is read, in main memory, to the slot it is to be left in; 0: none.
  __device__ std::int64_t way_to_lent(const std::int32_t* ids, int p) const {
    const int slot = slot_at(ids, p);
    if (slot >= 0) return 0;
    int before = 0;
    for (int q = 0; q < p; ++q) before += slot_at(ids, q) < 0 ? 1 : 0;
    const int lent = before < n_lent ? slot_of[n_experts + before] : -1;
    return lent < 0 ? 0 : stride * lent - (host_offset + stride * (-2 - slot));
  }
};

// Row `i` of what the host computes, to y, by a block that waits for it.
__device__ void take_host_row(const HostRows& h, int i, float* y) {
  constexpr std::uint64_t kPatience = 20'000'000'000;  // ns: then the step is given up
  if (threadIdx.x == 0) {
    const std::int32_t serial = *h.serial;
    const std::uint64_t start = global_ns();
    while (load_acquire(h.given) != serial) {
      if (load_acquire(h.forgiven) == serial) break;
      if (global_ns() - start > kPatience) {
        *const_cast<volatile std::int32_t*>(h.missing) = serial;
        break;
      }
      __nanosleep(100);
    }
  }
  __syncthreads();
  const float* from = h.rows + i * h.width;
  for (int c = threadIdx.x; c < h.width; c += blockDim.x) y[c] = __ldcv(from + c);
}

// The pairs of one op. Routed: pair p is token p / k and rank p mod k, then the shared expert's tokens. Listed: entries
// of {work, row, slot}.
struct Pairs {
  FfnSource source;
  Ffn shared;
  const std::int32_t* ids;
  std::int64_t ids_stride;
  int top_k, n_routed;
  const int4* list;

  struct Pair {
    Matrix w;
    const float* bias;
    std::int64_t row, slot;  // of x and of y
    bool shared;
  };
  __device__ Pair pair(int p, Which which) const {
    Pair out;
    out.shared = list == nullptr && p >= n_routed;
    if (list != nullptr) {
      const int4 e = list[p];
      out.row = e.y, out.slot = e.z;
      out.w = source.matrix(e.x, which, out.bias);
    } else if (out.shared) {
      out.row = out.slot = p - n_routed;
      out.w = which == kGate ? shared.gate : which == kUp ? shared.up : shared.down;
      out.bias = nullptr;
    } else {
      out.row = p / top_k, out.slot = p;
      out.w = source.chosen != nullptr ? source.in_slot(source.chosen[p], which, out.bias)
                                       : source.matrix(ids[out.row * ids_stride + p % top_k], which, out.bias);
    }
    return out;
  }
};

struct FfnArgs {
  Pairs pairs;
  const float* x;
  std::int64_t x_stride;
  float *y, *shared_y;
  std::int64_t y_stride, shared_stride;
  float* inner;            // per pair gate and up: [pairs, 2, inner_dim]
  std::int64_t inner_dim;  // the largest
  GluParams glu;
  bool fast;
  const uint4* known;      // x of the only token in 8 bits: ffn_up64_kernel of 4-bit codes
  HostRows host;           // of ffn_up64_kernel and ffn_down64_kernel

  // Which one of the host's the p-th pair is; -1: none.
  __device__ int host_row(int p) const {
    if (host.rows == nullptr || p >= pairs.n_routed) return -1;
    const std::int32_t slot = pairs.source.chosen[p];
    return slot < kByHost + static_cast<std::int32_t>(UnitRunner::kMostShared) ? slot - kByHost : -1;
  }
};

__device__ bool multiplies_integers(const Matrix& m, bool fast) {
  return fast && (m.kind == quant::FormatKind::Affine || m.kind == quant::FormatKind::Mxfp4);
}

// Rows of a block of the fast kernels in exact precision.
__device__ void exact_rows(const Matrix& m, const float* x, int row0, int n, const float* bias, float* y) {
  for (int r = threadIdx.x / 16; r < n; r += kMvThreads / 16) {
    const int row = row0 + r;
    const float v = exact_row(m, min(row, m.rows - 1), x, threadIdx.x & 15);
    if (row < m.rows && (threadIdx.x & 15) == 0) y[row] = bias != nullptr ? v + bias[row] : v;
  }
}

constexpr int kExactBlock = 32;  // rows

__device__ int rows_of(const Matrix& m, bool fast) { return multiplies_integers(m, fast) ? block_rows(m) : kExactBlock; }

__global__ void __launch_bounds__(kMvThreads, 3) ffn_up_kernel(const __grid_constant__ FfnArgs a) {
  extern __shared__ __align__(16) std::byte memory[];
  begin_kernel();  // which expert it is, the kernel before says
  const int p = blockIdx.y, halves = gridDim.x / 2;
  const bool up = static_cast<int>(blockIdx.x) >= halves;
  const auto pair = a.pairs.pair(p, up ? kUp : kGate);
  const int tile = static_cast<int>(blockIdx.x) - (up ? halves : 0), row0 = tile * rows_of(pair.w, a.fast);
  if (row0 >= pair.w.rows) return;
  const float* x = a.x + pair.row * a.x_stride;
  float* y = a.inner + (static_cast<std::int64_t>(p) * 2 + up) * a.inner_dim;
  if (!multiplies_integers(pair.w, a.fast)) return exact_rows(pair.w, x, row0, kExactBlock, pair.bias, y);
  matvec(pair.w, RowLoad{x}, memory, tile, 1 << 20, pair.bias, y, false);
}

// The choice of experts is older than the kernel before, which waited for it: codes may fly at once.
__global__ void __launch_bounds__(kMvThreads, 3) ffn_down_kernel(const __grid_constant__ FfnArgs a) {
  extern __shared__ __align__(16) std::byte memory[];
  const int p = blockIdx.y;
  const auto pair = a.pairs.pair(p, kDown);
  const int tile = blockIdx.x, row0 = tile * rows_of(pair.w, a.fast);
  float* y = pair.shared ? a.shared_y + pair.slot * a.shared_stride : a.y + pair.slot * a.y_stride;
  const float *gate = a.inner + static_cast<std::int64_t>(p) * 2 * a.inner_dim, *up = gate + a.inner_dim;
  if (row0 >= pair.w.rows) return begin_kernel();
  if (!multiplies_integers(pair.w, a.fast)) {
    begin_kernel();
    return exact_rows(pair.w, gate, row0, kExactBlock, pair.bias, y);
  }
  matvec(pair.w, GluLoad{gate, up, pair.shared ? GluParams{} : a.glu}, memory, tile, 1 << 20, pair.bias, y, true);
}

// The two for one token where all matrices have 4-bit codes in groups of 64, or Mxfp4 (matvec64.h). Leaves: RoutedFfn::n_lent.
template <class Mv, bool Leaves>
__global__ void __launch_bounds__(kMvThreads, 3) ffn_up64_kernel(const __grid_constant__ FfnArgs a) {
  extern __shared__ __align__(16) std::byte memory[];
  begin_kernel();  // which expert it is, the kernel before says
  const int p = blockIdx.y, halves = gridDim.x / 2;
  if constexpr (Leaves)
    if (a.host_row(p) >= 0) return;
  const bool up = static_cast<int>(blockIdx.x) >= halves;
  const auto pair = a.pairs.pair(p, up ? kUp : kGate);
  Mv mv{pair.w, memory};
  const int tile = static_cast<int>(blockIdx.x) - (up ? halves : 0);
  if (tile * mv.block_rows() >= pair.w.rows) return;
  mv.fetch(tile * mv.block_rows(), 0);
  const QuantizedX q = quantized_at(memory, pair.w.cols, group_of(Mv::kPath));
  if constexpr (Mv::kPath == Path::Nibble)
    copy_known(a.known, pair.w.cols, memory);
  else
    quantize_block(RowLoad{a.x}, pair.w.cols, group_of(Mv::kPath), order_of(Mv::kPath), q);
  std::int64_t away = 0;
  if constexpr (Leaves)
    if (!pair.shared) away = a.pairs.source.way_to_lent(a.pairs.ids, p);
  __syncthreads();
  mv.template run<Leaves>(q, tile, 1 << 20, pair.bias, a.inner + (static_cast<std::int64_t>(p) * 2 + up) * a.inner_dim, away);
}

template <class Mv, bool Leaves>
__global__ void __launch_bounds__(kMvThreads, 3) ffn_down64_kernel(const __grid_constant__ FfnArgs a) {
  extern __shared__ __align__(16) std::byte memory[];
  const int p = blockIdx.y, tile = blockIdx.x;
  if constexpr (Leaves)
    if (const int row = a.host_row(p); row >= 0) {
      begin_kernel();
      if (tile == 0) take_host_row(a.host, row, a.y + p * a.y_stride);
      return;
    }
  const auto pair = a.pairs.pair(p, kDown);  // older than the kernel before: see ffn_down_kernel
  Mv mv{pair.w, memory};
  const int cols = pair.w.cols;
  if (tile * mv.block_rows() < pair.w.rows) mv.fetch(tile * mv.block_rows(), 0);
  std::int64_t away = 0;
  if constexpr (Leaves)
    if (!pair.shared) away = a.pairs.source.way_to_lent(a.pairs.ids, p);
  begin_kernel();
  if (tile * mv.block_rows() >= pair.w.rows) return;
  const GluParams glu = pair.shared ? GluParams{} : a.glu;
  const float *gate = a.inner + static_cast<std::int64_t>(p) * 2 * a.inner_dim, *up = gate + a.inner_dim;
  auto* row = reinterpret_cast<float*>(memory + Mv::bytes(pair.w));
#pragma unroll 2
  for (int i = threadIdx.x; i < cols; i += kMvThreads) row[i] = glu(gate[i], up[i]);
  __syncthreads();
  const QuantizedX q = quantized_at(memory, cols, group_of(Mv::kPath));
  quantize_block(RowLoad{row}, cols, group_of(Mv::kPath), order_of(Mv::kPath), q);
  __syncthreads();
  mv.template run<Leaves>(q, tile, 1 << 20, pair.bias, pair.shared ? a.shared_y + pair.slot * a.shared_stride : a.y + pair.slot * a.y_stride, away);
}

// gate = glu(gate, up) where down sees f32 activations.
__global__ void ffn_glu_kernel(const __grid_constant__ FfnArgs a) {
  begin_kernel();
  const int p = blockIdx.y;
  const auto pair = a.pairs.pair(p, kDown);
  if (multiplies_integers(pair.w, a.fast)) return;
  const GluParams glu = pair.shared ? GluParams{} : a.glu;
  float *gate = a.inner + static_cast<std::int64_t>(p) * 2 * a.inner_dim, *up = gate + a.inner_dim;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pair.w.cols; i += gridDim.x * blockDim.x) gate[i] = glu(gate[i], up[i]);
}

// What the launches need to know of a set of matrices.
struct Shapes {
  int inner = 0, up_blocks = 0, down_blocks = 0;
  std::size_t up_bytes = 0, down_bytes = 0;
  bool glu_apart = false;

  void add(const FfnMatrices& m, Precision precision) {
    inner = std::max(inner, static_cast<int>(m.gate.rows));
    glu_apart = glu_apart || !is_fast(m.down, precision);
    for (const quant::MatrixView* w : {&m.gate, &m.up}) add(*w, precision, up_blocks, up_bytes);
    add(m.down, precision, down_blocks, down_bytes);
  }
  void add(const quant::MatrixView& w, Precision precision, int& blocks, std::size_t& bytes) {
    const Matrix m = expert_matrix(w);
    const bool fast = is_fast(w, precision);
    blocks = std::max(blocks, ceil_div(m.rows, fast ? block_rows(m) : kExactBlock));
    if (fast) bytes = std::max(bytes, matvec_bytes(m));
  }
};

void run_pairs(CudaStream& s, FfnArgs a, const Shapes& shapes, std::int64_t n_pairs) {
  a.inner_dim = shapes.inner;
  a.inner = s.scratch_of<float>(Scratch::Inner, static_cast<std::size_t>(n_pairs) * 2 * static_cast<std::size_t>(shapes.inner));
  const auto n = static_cast<unsigned>(n_pairs);
  launch_large(s, "ExpertFfn: gate and up", ffn_up_kernel, dim3(2 * static_cast<unsigned>(shapes.up_blocks), n), kMvThreads, shapes.up_bytes, a);
  if (shapes.glu_apart) launch(s, "ExpertFfn: glu", ffn_glu_kernel, dim3(4, n), 128, 0, a);
  launch_large(s, "ExpertFfn: down", ffn_down_kernel, dim3(static_cast<unsigned>(shapes.down_blocks), n), kMvThreads, shapes.down_bytes, a);
}

bool all_matvec64(const RoutedFfn& op, bool shared) {
  const auto alike = [&](const quant::MatrixView& a, const quant::MatrixView& b) { return same_matvec64(expert_matrix(a), expert_matrix(b)); };
  const FfnMatrices &f = op.first, &s = op.shared;
  return alike(f.gate, f.gate) && alike(f.gate, f.up) && alike(f.down, f.down) &&
         (!shared || (alike(f.gate, s.gate) && alike(f.gate, s.up) && alike(f.down, s.down)));
}

// The activations of down are computed where it begins.
std::size_t down_bytes(std::size_t matvec, const Matrix& m) { return matvec + static_cast<std::size_t>(m.cols) * 4; }

template <bool Leaves>
void run_pairs64(CudaStream& s, FfnArgs a, const RoutedFfn& op, const Shapes& shapes, std::int64_t n_pairs) {
  const Matrix gate = expert_matrix(op.first.gate), down = expert_matrix(op.first.down);
  a.inner_dim = shapes.inner;
  a.inner = s.scratch_of<float>(Scratch::Inner, static_cast<std::size_t>(n_pairs) * 2 * static_cast<std::size_t>(shapes.inner));
  const auto n = static_cast<unsigned>(n_pairs);
  with_matvec64(gate, [&]<class Mv>() {
    launch_large(s, "ExpertFfn: gate and up", ffn_up64_kernel<Mv, Leaves>, dim3(2 * static_cast<unsigned>(shapes.up_blocks), n), kMvThreads, Mv::bytes(gate), a);
  });
  with_matvec64(down, [&]<class Mv>() {
    launch_large(s, "ExpertFfn: down", ffn_down64_kernel<Mv, Leaves>, dim3(static_cast<unsigned>(shapes.down_blocks), n), kMvThreads,
                 std::max(down_bytes(Mv::bytes(down), down), op.shared.gate.empty() ? 0 : down_bytes(Mv::bytes(a.pairs.shared.down), a.pairs.shared.down)), a);
  });
}

// ---- many tokens

struct Tile {
  std::int32_t expert, first, n;
};

// Pairs sorted by expert, cut into tiles of one expert.
struct Lists {
  std::int32_t *rows, *slots;  // of every entry
  Tile* tiles;
  int max_tiles;
};

struct GroupedArgs {
  FfnSource source;
  Lists lists;
  QuantizedRows x;
  const float* xf;
  std::int64_t x_stride, y_stride;
  float *inner, *y;
  int inner_dim;
};

template <Codes C, bool Down>
__global__ void __launch_bounds__(kGemmThreads, 2) grouped_kernel(const __grid_constant__ GroupedArgs a) {
  extern __shared__ __align__(16) std::byte memory[];
  begin_kernel();
  const Tile tile = a.lists.tiles[blockIdx.y];
  if (tile.n == 0) return;
  GemmTile t;
  int row_tile = blockIdx.x;
  t.first = tile.first, t.n = tile.n, t.x = a.x;
  if constexpr (Down) {
    t.w = a.source.matrix(tile.expert, kDown, t.bias);
    t.rows = nullptr, t.slots = a.lists.slots;
    t.y = a.y, t.y_stride = a.y_stride;
  } else {
    const int halves = gridDim.x / 2;
    const bool up = row_tile >= halves;
    if (up) row_tile -= halves;
    t.w = a.source.matrix(tile.expert, up ? kUp : kGate, t.bias);
    t.rows = a.lists.rows, t.slots = nullptr;
    t.y = a.inner + (up ? a.inner_dim : 0), t.y_stride = 2 * a.inner_dim;
  }
  run_tile<C>(memory, t, row_tile * kTileRows);
}

template <bool Down>
__global__ void __launch_bounds__(kGemmThreads) grouped_exact_kernel(const __grid_constant__ GroupedArgs a) {
  __shared__ ExactShared shared;
  begin_kernel();
  const Tile tile = a.lists.tiles[blockIdx.y];
  if (tile.n == 0) return;
  ExactTile t;
  int row_tile = blockIdx.x;
  t.first = tile.first, t.n = tile.n, t.x = a.xf, t.x_stride = a.x_stride;
  if constexpr (Down) {
    t.w = a.source.matrix(tile.expert, kDown, t.bias);
    t.rows = nullptr, t.slots = a.lists.slots;
    t.y = a.y, t.y_stride = a.y_stride;
  } else {
    const int halves = gridDim.x / 2;
    const bool up = row_tile >= halves;
    if (up) row_tile -= halves;
    t.w = a.source.matrix(tile.expert, up ? kUp : kGate, t.bias);
    t.rows = a.lists.rows, t.slots = nullptr;
    t.y = a.inner + (up ? a.inner_dim : 0), t.y_stride = 2 * a.inner_dim;
  }
  for (int first = t.first, end = t.first + t.n; first < end; first += kExactTile) {
    t.first = first;
    t.n = min(kExactTile, end - first);
    exact_tile(shared, t, row_tile * kExactTile);
    __syncthreads();
  }
}

__global__ void glu_rows_kernel(float* inner, int inner_dim, GluParams glu) {
  begin_kernel();
  float *gate = inner + static_cast<std::int64_t>(blockIdx.y) * 2 * inner_dim, *up = gate + inner_dim;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < inner_dim; i += gridDim.x * blockDim.x) gate[i] = glu(gate[i], up[i]);
}

// Sorts the router's choice by expert, one block. The order inside an expert does not matter: every entry's result goes
// to its own row.
__global__ void __launch_bounds__(1024) sort_kernel(const std::int32_t* ids, std::int64_t ids_stride, int n_tokens, int top_k, int n_experts, Lists lists) {
  extern __shared__ int counts[];  // [n_experts + 1] starts, then [n_experts] cursors
  int *start = counts, *cursor = counts + n_experts + 1;
  __shared__ int n_tiles;
  begin_kernel();
  const int tid = threadIdx.x, n = n_tokens * top_k;
  for (int e = tid; e <= n_experts; e += blockDim.x) start[e] = 0;
  __syncthreads();
  constexpr int kBatch = 8;  // loads of a thread under way
  const auto each_pair = [&](auto&& f) {
    for (int i0 = tid; i0 < n; i0 += kBatch * static_cast<int>(blockDim.x)) {
      int expert[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = i0 + k * static_cast<int>(blockDim.x);
        expert[k] = i < n ? ids[i / top_k * ids_stride + i % top_k] : -1;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        if (expert[k] >= 0) f(i0 + k * static_cast<int>(blockDim.x), expert[k]);
    }
  };
  each_pair([&](int, int expert) { atomicAdd(&start[expert + 1], 1); });
  __syncthreads();
  if (tid == 0) {  // starts of experts, and of their tiles (kept in cursor until they are written)
    int tiles = 0;
    for (int e = 0; e < n_experts; ++e) {
      const int count = start[e + 1];
      start[e + 1] += start[e];
      cursor[e] = tiles;
      tiles += (count + kTileTokens - 1) / kTileTokens;
    }
    n_tiles = tiles;
  }
  __syncthreads();
  for (int e = tid; e < n_experts; e += blockDim.x) {
    const int count = start[e + 1] - start[e], first = cursor[e];
    for (int at = 0; at < count; at += kTileTokens) lists.tiles[first + at / kTileTokens] = {e, start[e] + at, min(kTileTokens, count - at)};
    cursor[e] = start[e];
  }
  __syncthreads();
  for (int i = n_tiles + tid; i < lists.max_tiles; i += blockDim.x) lists.tiles[i] = {0, 0, 0};
  each_pair([&](int i, int expert) {
    const int at = atomicAdd(&cursor[expert], 1);
    lists.rows[at] = i / top_k;
    lists.slots[at] = i;
  });
}

Lists lists_at(CudaStream& s, std::int64_t n_entries, int max_tiles) {
  const auto n = (static_cast<std::size_t>(n_entries) + 63) / 64 * 64;
  auto* memory = s.scratch_of<std::int32_t>(Scratch::Lists, 2 * n + static_cast<std::size_t>(max_tiles) * 3);
  return {memory, memory + n, reinterpret_cast<Tile*>(memory + 2 * n), max_tiles};
}

// inner[.., 0] = glu(inner[.., 0], inner[.., 1]) over n rows.
void glu_rows(CudaStream& s, float* inner, std::int64_t inner_dim, std::int64_t n, const GluParams& glu) {
  for (std::int64_t at = 0; at < n; at += 32768)
    launch(s, "ExpertFfn: glu", glu_rows_kernel, dim3(2, static_cast<unsigned>(std::min<std::int64_t>(n - at, 32768))), 128, 0, inner + at * 2 * inner_dim,
           static_cast<int>(inner_dim), glu);
}

template <bool Down>
void launch_grouped(CudaStream& s, const GroupedArgs& a, const quant::MatrixView& like, Precision precision) {
  const auto tiles = static_cast<unsigned>(a.lists.max_tiles), parts = Down ? 1u : 2u;
  if (!is_fast(like, precision))
    return launch(s, "ExpertFfn", grouped_exact_kernel<Down>, dim3(parts * static_cast<unsigned>(ceil_div(like.rows, kExactTile)), tiles), kGemmThreads, 0, a);
  const dim3 grid(parts * static_cast<unsigned>(ceil_div(like.rows, kTileRows)), tiles);
  with_codes(cuda::to_device(like), [&]<Codes C>() { launch_large(s, "ExpertFfn", grouped_kernel<C, Down>, grid, kGemmThreads, tile_bytes<C>(), a); });
}

// gate and up, glu, down over sorted pairs; all experts have the formats of `like`. a.x is x in 8 bits where they want it.
void run_grouped(CudaStream& s, GroupedArgs a, const FfnMatrices& like, const GluParams& glu, Precision precision, std::int64_t n_entries, const float* x) {
  const std::int64_t inner = like.gate.rows;
  a.inner_dim = static_cast<int>(inner);
  a.inner = s.scratch_of<float>(Scratch::Inner, static_cast<std::size_t>(n_entries * 2 * inner));
  a.xf = x;
  launch_grouped<false>(s, a, like.gate, precision);
  if (is_fast(like.down, precision)) {
    a.x = quantize_rows(s, Scratch::Quantized2, {a.inner, a.inner + inner, 2 * inner, glu}, n_entries, cuda::to_device(like.down));
  } else {
    glu_rows(s, a.inner, inner, n_entries, glu);
    a.xf = a.inner, a.x_stride = 2 * inner;
  }
  launch_grouped<true>(s, a, like.down, precision);
}

bool same_input(const Matrix& a, const Matrix& b) { return a.cols == b.cols && a.group == b.group && packed_nibbles(a) == packed_nibbles(b); }

// Every token through one set of matrices. xq, where given, is x in 8 bits as the gate wants it.
void run_dense(CudaStream& s, const FfnMatrices& m, const TensorView& x, const TensorView& y, const GluParams& glu, Precision precision, const QuantizedRows* xq) {
  const std::int64_t n = x.dim(0), inner = m.gate.rows;
  auto* memory = s.scratch_of<float>(Scratch::Inner, static_cast<std::size_t>(n * 2 * inner));
  const Matrix gate = cuda::to_device(m.gate), down = cuda::to_device(m.down);
  QuantizedRows q = xq != nullptr ? *xq : QuantizedRows{};
  const auto half = [&](const quant::MatrixView& view, const TensorView& bias, float* to) {
    const Matrix w = cuda::to_device(view);
    if (!is_fast(view, precision)) return gemm_exact(s, w, x.f32(), x.stride(0), bias.f32(), to, 2 * inner, n);
    if (q.x8 == nullptr || !same_input(w, gate)) q = quantize_rows(s, Scratch::Quantized, {x.f32(), nullptr, x.stride(0), {}}, n, w);
    gemm(s, w, q, bias.f32(), to, 2 * inner, n);
  };
  half(m.gate, m.gate_bias, memory);
  half(m.up, m.up_bias, memory + inner);
  if (is_fast(m.down, precision)) {
    const QuantizedRows z = quantize_rows(s, Scratch::Quantized2, {memory, memory + inner, 2 * inner, glu}, n, down);
    gemm(s, down, z, m.down_bias.f32(), y.f32(), y.stride(0), n);
  } else {
    glu_rows(s, memory, inner, n, glu);
    gemm_exact(s, down, memory, 2 * inner, m.down_bias.f32(), y.f32(), y.stride(0), n);
  }
}

bool identity(std::span<const std::int32_t> list, std::int64_t n) {
  if (static_cast<std::int64_t>(list.size()) != n) return false;
  for (std::size_t i = 0; i < list.size(); ++i)
    if (list[i] != static_cast<std::int32_t>(i)) return false;
  return true;
}

bool same_shape(const quant::MatrixView& a, const quant::MatrixView& b) { return a.format == b.format && a.rows == b.rows && a.cols == b.cols; }

bool alike(std::span<const ExpertWork> works) {
  for (const ExpertWork& w : works) {
    const FfnMatrices &a = works[0].m, &b = w.m;
    if (!same_shape(a.gate, b.gate) || !same_shape(a.up, b.up) || !same_shape(a.down, b.down)) return false;
  }
  const FfnMatrices& m = works[0].m;
  return m.gate.format == m.up.format;
}

const Ffn* upload_table(CudaStream& s, std::span<const ExpertWork> works) {
  std::vector<Ffn> table;
  for (const ExpertWork& w : works) table.push_back(to_device(w.m));
  auto* out = s.scratch_of<Ffn>(Scratch::Tables, table.size());
  check_cuda(cudaMemcpyAsync(out, table.data(), table.size() * sizeof(Ffn), cudaMemcpyHostToDevice, s.handle()), "copying the work table");
  return out;
}

void run_listed_pairs(CudaStream& s, const ExpertFfn& op, std::int64_t n_pairs) {
  Shapes shapes;
  for (const ExpertWork& w : op.works) shapes.add(w.m, op.precision);
  FfnArgs a{};
  a.x = op.x.f32(), a.x_stride = op.x.stride(0), a.y = op.y.f32(), a.y_stride = op.y.stride(0);
  a.glu = {op.glu, op.limit, op.alpha}, a.fast = op.precision == Precision::Fast;
  if (op.works.size() == 1 && n_pairs == 1) {  // as parameters: nothing to copy, so a step can be recorded
    const ExpertWork& w = op.works[0];
    a.pairs.source.first = to_device(w.m);
    a.x += w.rows[0] * a.x_stride, a.y += w.slots[0] * a.y_stride;
    a.pairs.shared = a.pairs.source.first;
    a.pairs.n_routed = 0, a.pairs.top_k = 1;
    a.shared_y = a.y, a.shared_stride = a.y_stride;
    if (op.glu == GluKind::Silu && w.m.gate_bias.empty() && w.m.up_bias.empty() && w.m.down_bias.empty()) return run_pairs(s, a, shapes, 1);
    a = FfnArgs{};
    a.x = op.x.f32(), a.x_stride = op.x.stride(0), a.y = op.y.f32(), a.y_stride = op.y.stride(0);
    a.glu = {op.glu, op.limit, op.alpha}, a.fast = op.precision == Precision::Fast;
  }
  a.pairs.source.table = upload_table(s, op.works);
  std::vector<int4> list;
  for (std::size_t w = 0; w < op.works.size(); ++w)
    for (std::size_t i = 0; i < op.works[w].rows.size(); ++i) list.push_back({static_cast<int>(w), op.works[w].rows[i], op.works[w].slots[i], 0});
  auto* device_list = s.scratch_of<int4>(Scratch::Lists, list.size());
  check_cuda(cudaMemcpyAsync(device_list, list.data(), list.size() * sizeof(int4), cudaMemcpyHostToDevice, s.handle()), "copying the work list");
  a.pairs.list = device_list;
  for (std::int64_t at = 0; at < n_pairs; at += 32768) {
    a.pairs.list = device_list + at;
    run_pairs(s, a, shapes, std::min<std::int64_t>(n_pairs - at, 32768));
  }
}

void run_listed_groups(CudaStream& s, const ExpertFfn& op, std::int64_t n_pairs) {
  std::vector<std::int32_t> rows, slots;
  std::vector<Tile> tiles;
  for (std::size_t w = 0; w < op.works.size(); ++w) {
    const auto first = static_cast<int>(rows.size()), n = static_cast<int>(op.works[w].rows.size());
    rows.insert(rows.end(), op.works[w].rows.begin(), op.works[w].rows.end());
    slots.insert(slots.end(), op.works[w].slots.begin(), op.works[w].slots.end());
    for (int at = 0; at < n; at += kTileTokens) tiles.push_back({static_cast<int>(w), first + at, std::min(kTileTokens, n - at)});
  }
  GroupedArgs a{};
  a.lists = lists_at(s, n_pairs, static_cast<int>(tiles.size()));
  const auto put = [&](void* to, const void* from, std::size_t bytes) { check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, s.handle()), "copying the work list"); };
  put(a.lists.rows, rows.data(), rows.size() * 4);
  put(a.lists.slots, slots.data(), slots.size() * 4);
  put(a.lists.tiles, tiles.data(), tiles.size() * sizeof(Tile));
  a.source.table = upload_table(s, op.works);
  const FfnMatrices& like = op.works[0].m;
  if (is_fast(like.gate, op.precision))
    a.x = quantize_rows(s, Scratch::Quantized, {op.x.f32(), nullptr, op.x.stride(0), {}}, op.x.dim(0), cuda::to_device(like.gate));
  a.x_stride = op.x.stride(0), a.y = op.y.f32(), a.y_stride = op.y.stride(0);
  run_grouped(s, a, like, {op.glu, op.limit, op.alpha}, op.precision, n_pairs, op.x.f32());
}

}  // namespace

void CudaBackend::execute(Stream& stream, const ExpertFfn& op) {
  CudaStream& s = use(stream);
  std::int64_t n_pairs = 0;
  for (const ExpertWork& w : op.works) n_pairs += static_cast<std::int64_t>(w.rows.size());
  if (n_pairs == 0) return;
  const std::int64_t n = op.x.dim(0);
  if (op.works.size() == 1 && n > kMatvecTokens && op.y.dim(0) == n && identity(op.works[0].rows, n) && identity(op.works[0].slots, n))
    run_dense(s, op.works[0].m, op.x, op.y, {op.glu, op.limit, op.alpha}, op.precision, nullptr);
  else if (n_pairs > kMatvecTokens * static_cast<std::int64_t>(op.works.size()) && alike(op.works))
    run_listed_groups(s, op, n_pairs);
  else
    run_listed_pairs(s, op, n_pairs);
}

namespace {

// Whether one token's experts go to the small kernels; `known`: its x in 8 bits, for those of 4-bit codes.
bool small_kernels(const RoutedFfn& op, const std::byte* known) {
  if (op.x.dim(0) != 1 || op.precision != Precision::Fast || !all_matvec64(op, !op.shared.gate.empty())) return false;
  return op.first.gate.format.kind == quant::FormatKind::Mxfp4 || known != nullptr;
}

}  // namespace

bool takes_host_rows(const CudaStream& s, const RoutedFfn& op) {
  return op.n_lent > 0 && op.slot_of != nullptr && op.ids.dim(1) <= kWarp && s.units.shares.width == op.x.dim(1) && op.y.dim(1) == op.x.dim(1) &&
         small_kernels(op, s.known_of(op.x.f32(), op.x.dim(1)));
}

// As run_routed() for one token wants it, and ExpertFfn for any part of its experts.
void CudaUnits::reserve(Stream& stream, const RoutedFfn& op) {
  CudaStream& s = use(stream);
  const auto top_k = static_cast<std::size_t>(op.ids.dim(1));
  Shapes shapes;
  shapes.add(op.first, op.precision);
  if (!op.shared.gate.empty()) shapes.add(op.shared, op.precision);
  s.scratch_of<float>(Scratch::Inner, (top_k + 1) * 2 * static_cast<std::size_t>(shapes.inner));
  s.scratch_of<Ffn>(Scratch::Tables, top_k);
  s.scratch_of<int4>(Scratch::Lists, top_k);
  s.units.reserve_shares(op.x.dim(1));
}

bool CudaBackend::run_routed(Stream& stream, const RoutedFfn& op) {
  CudaStream& s = use(stream, Known::Stays);
  const std::int64_t n = op.x.dim(0), top_k = op.ids.dim(1);
  if (n == 0) return false;
  const bool shared = !op.shared.gate.empty();
  const FfnSource source{to_device(op.first), static_cast<std::int64_t>(op.stride), op.host_offset, op.slot_of, s.units.chosen_slots(op.ids.i32(), op.slot_of), nullptr,
                         static_cast<int>(op.n_experts), static_cast<int>(op.n_lent)};
  const GluParams glu{op.glu, op.limit, op.alpha};
  if (n <= kMatvecTokens) {
    Shapes shapes;
    shapes.add(op.first, op.precision);
    if (shared) shapes.add(op.shared, op.precision);
    FfnArgs a{};
    a.pairs.source = source;
    if (shared) a.pairs.shared = to_device(op.shared);
    a.pairs.ids = op.ids.i32(), a.pairs.ids_stride = op.ids.stride(0);
    a.pairs.top_k = static_cast<int>(top_k), a.pairs.n_routed = static_cast<int>(n * top_k);
    a.x = op.x.f32(), a.x_stride = op.x.stride(0), a.y = op.y.f32(), a.y_stride = op.y.stride(0);
    a.shared_y = op.shared_y.f32(), a.shared_stride = op.shared_y.stride(0);
    a.glu = glu, a.fast = op.precision == Precision::Fast;
    const std::byte* const known = s.known_of(a.x, op.x.dim(1));
    if (!small_kernels(op, known)) {
      run_pairs(s, a, shapes, n * top_k + (shared ? n : 0));
      return false;
    }
    a.known = reinterpret_cast<const uint4*>(known);
    const bool leaves = op.n_lent > 0 && op.slot_of != nullptr;
    if (leaves && source.chosen != nullptr) a.host = s.units.host_rows;
    leaves ? run_pairs64<true>(s, a, op, shapes, top_k + (shared ? 1 : 0)) : run_pairs64<false>(s, a, op, shapes, top_k + (shared ? 1 : 0));
    return leaves;
  }
  const std::int64_t n_pairs = n * top_k;
  const int max_tiles = ceil_div(n_pairs, kTileTokens) + static_cast<int>(std::min<std::int64_t>(op.n_experts, n_pairs));
  GroupedArgs a{};
  a.source = source;
  a.lists = lists_at(s, n_pairs, max_tiles);
  const auto bytes = static_cast<std::size_t>(2 * op.n_experts + 1) * 4;
  launch_large(s, "sorting by expert", sort_kernel, 1, 1024, bytes, op.ids.i32(), op.ids.stride(0), static_cast<int>(n), static_cast<int>(top_k),
               static_cast<int>(op.n_experts), a.lists);
  if (is_fast(op.first.gate, op.precision))
    a.x = quantize_rows(s, Scratch::Quantized, {op.x.f32(), nullptr, op.x.stride(0), {}}, n, cuda::to_device(op.first.gate));
  a.x_stride = op.x.stride(0), a.y = op.y.f32(), a.y_stride = op.y.stride(0);
  run_grouped(s, a, op.first, glu, op.precision, n_pairs, op.x.f32());
  if (!shared) return false;
  const bool known = a.x.x8 != nullptr && same_input(cuda::to_device(op.shared.gate), cuda::to_device(op.first.gate));
  run_dense(s, op.shared, op.x, op.shared_y, {}, op.precision, known ? &a.x : nullptr);
  return false;
}

}  // namespace moeflux::backend::cuda
