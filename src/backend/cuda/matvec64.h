// Matrix times one token for the common format, 4-bit codes in groups of 64, and activations that are in 8 bits already. Only for CUDA
// sources.
//
// What matvec.h does for every format, with as little code as possible: a decoded token runs some four hundred kernels that alternate, so
// their instructions come from far away each time, and fetching them took longer than the weights.
#pragma once

#include "backend/cuda/matvec.h"

namespace moeflux::backend::cuda {

// Width: 16-byte units of a row in one step, as in matvec.h.
template <int Width, bool Bf16>
struct Matvec64 {
  static constexpr int kLoads = loads_of(Width);
  static constexpr int kRows = kLoads * kWarp / Width;  // of a warp
  static constexpr int kBlockRows = kRows * kMvWarps;
  static constexpr int kSets = Width >= kWarp ? Width / kWarp : 1;  // columns a thread sees
  static constexpr int kPieces = Width / 16;                        // 16-byte pieces of a row's scales in a step
  static constexpr int kStride = Width / 2 + 1;                     // float4 a row: rows of a walk lie in different banks
  static constexpr int kStep = kBlockRows * kStride;                // float4
  static constexpr int kWalkers = (kBlockRows + kWarp - 1) / kWarp;
  // Shared memory: x, factors as they come, then twice the steps.
  static constexpr std::size_t kFactorBytes = kMvThreads * 16;
  static constexpr Path kPath = Path::Nibble;
  __host__ __device__ static std::size_t bytes(const Matrix& m) { return static_cast<std::size_t>(m.cols) + m.cols / 8 + kFactorBytes + 2 * kStep * 16; }
  __device__ static int block_rows() { return kBlockRows; }

  const Matrix& m;
  std::byte* const memory;
  uint4 w[kLoads], factors;

  __device__ static int row_of(int u) { return Width >= kWarp ? u / kSets : 2 * u + static_cast<int>(threadIdx.x) % kWarp / 16; }
  __device__ static int unit_of(int u) { return Width >= kWarp ? u % kSets * kWarp + static_cast<int>(threadIdx.x) % kWarp : static_cast<int>(threadIdx.x) % 16; }

  // Issues the loads of the block's rows from row0 on, units [c0, c0 + Width). Rows behind the last one are the last one.
  __device__ void fetch(int row0, int c0) {
    const int first = row0 + static_cast<int>(threadIdx.x) / kWarp * kRows, lane = threadIdx.x % kWarp;
    const std::uint8_t* codes = m.data + static_cast<std::size_t>(c0) * 16;
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      w[u] = __ldcs(reinterpret_cast<const uint4*>(codes + static_cast<std::size_t>(min(first + row_of(u), m.rows - 1)) * m.row_bytes) + unit_of(u));
    const int row = lane / (2 * kPieces);
    if (row < kRows) {
      const std::uint8_t* from = (lane / kPieces & 1 ? m.biases : m.scales) + static_cast<std::size_t>(min(first + row, m.rows - 1)) * m.scale_row_bytes + c0;
      factors = *reinterpret_cast<const uint4*>(from + lane % kPieces * 16);
    }
  }

  // Stores what the last fetch() of the same place has brought, `away` bytes from where it came from.
  __device__ void leave(int row0, int c0, std::int64_t away) const {
    const int first = row0 + static_cast<int>(threadIdx.x) / kWarp * kRows, lane = threadIdx.x % kWarp;
    const auto there = [away](const std::uint8_t* from) { return reinterpret_cast<uint4*>(const_cast<std::uint8_t*>(from) + away); };
    const std::uint8_t* codes = m.data + static_cast<std::size_t>(c0) * 16;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) there(codes + static_cast<std::size_t>(min(first + row_of(u), m.rows - 1)) * m.row_bytes)[unit_of(u)] = w[u];
    const int row = lane / (2 * kPieces);
    if (row >= kRows) return;
    const std::uint8_t* from = (lane / kPieces & 1 ? m.biases : m.scales) + static_cast<std::size_t>(min(first + row, m.rows - 1)) * m.scale_row_bytes + c0;
    there(from)[lane % kPieces] = factors;
  }

  // A group is two lanes: the even one has its dot product and scale, the odd one the sum of x8 and the bias.
  __device__ void multiply(const QuantizedX& q, int c0, float4* step) const {
    const int lane = threadIdx.x % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    auto* staged = reinterpret_cast<uint4*>(memory + m.cols + m.cols / 8) + warp * kWarp;
    __syncwarp();
    staged[lane] = factors;
    __syncwarp();
    const auto* halves = reinterpret_cast<const std::uint16_t*>(staged) + (lane & 1) * kPieces * 8;
    auto* out = reinterpret_cast<float2*>(step) + warp * kRows * 2 * kStride;
    const bool odd = lane & 1;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int unit = c0 + unit_of(set);
      const int4 even_x = reinterpret_cast<const int4*>(q.x8)[unit], odd_x = reinterpret_cast<const int4*>(q.x8 + m.cols / 2)[unit];
      const float d = q.d[unit >> 1], sum = q.sx[unit >> 1];
#pragma unroll
      for (int u = set; u < kLoads; u += kSets) {
        int low = 0, high = 0;  // high: sixteen times what it stands for, which spares shifting every word
        add(w[u].x, even_x.x, odd_x.x, low, high);
        add(w[u].y, even_x.y, odd_x.y, low, high);
        add(w[u].z, even_x.z, odd_x.z, low, high);
        add(w[u].w, even_x.w, odd_x.w, low, high);
        int s = low + (high >> 4);
        s += __shfl_xor_sync(kAll, s, 1);
        const float factor = factor_value<Bf16>(halves[row_of(u) * kPieces * 16 + (unit_of(u) >> 1)]);
        out[row_of(u) * 2 * kStride + unit_of(u)] = {odd ? sum : static_cast<float>(s), factor * d};
      }
    }
  }
  __device__ static void add(unsigned word, int even_x, int odd_x, int& low, int& high) {
    low = __dp4a(static_cast<int>(word & 0x0f0f0f0fu), even_x, low);
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(high) : "r"(word & 0xf0f0f0f0u), "r"(odd_x));
  }

  // The groups of a row in order; the next ones are on their way while some are added.
  __device__ static float walk(const float4* f, float acc) {
    constexpr int kBatch = 4, kGroups = Width / 2;
    static_assert(kGroups % (2 * kBatch) == 0);
    float4 v[2][kBatch];
    const auto load = [f](int g, float4(&to)[kBatch]) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) to[i] = f[g + i];
    };
    const auto sum = [&acc](const float4(&from)[kBatch]) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        acc = math::fma(from[i].x, from[i].y, acc);
        acc = math::fma(from[i].z, from[i].w, acc);
      }
    };
    load(0, v[0]);
#pragma unroll 1
    for (int g = 0; g < kGroups; g += 2 * kBatch) {
      load(g + kBatch, v[1]);
      sum(v[0]);
      if (g + 2 * kBatch < kGroups) load(g + 2 * kBatch, v[0]);
      sum(v[1]);
    }
    return acc;
  }

  // Blocks `tile`, `tile` + `tile_step`, .. of the rows; q stands at `memory` and is synchronized; fetch() of the first is under way.
  // Leaves: everything is also stored `away` bytes from where it came from, unless that is 0.
  template <bool Leaves = false>
  __device__ void run(const QuantizedX& q, int tile, int tile_step, const float* bias, float* y, std::int64_t away = 0) {
    auto* steps = reinterpret_cast<float4*>(memory + m.cols + m.cols / 8 + kFactorBytes);
    const int n_tiles = (m.rows + kBlockRows - 1) / kBlockRows, units = m.cols / 32;
    float acc = 0.0f;
    int walker = 0;
    for (int c0 = 0, which = 0; tile < n_tiles; which ^= 1) {
      const int row0 = tile * kBlockRows;
      float4* step = steps + which * kStep;
      multiply(q, c0, step);
      if constexpr (Leaves)
        if (away != 0) leave(row0, c0, away);
      c0 += Width;
      const bool end_of_rows = c0 >= units;
      if (end_of_rows) c0 = 0, tile += tile_step;
      if (tile < n_tiles) fetch(tile * kBlockRows, c0);
      __syncthreads();
      const int r = static_cast<int>(threadIdx.x) - walker * kWarp;
      if (r >= 0 && r < kBlockRows && row0 + r < m.rows) {
        acc = walk(step + r * kStride, acc);
        if (end_of_rows) {
          if (Leaves && away != 0 && bias != nullptr) leave_bias(bias, row0 + r, away);
          y[row0 + r] = bias != nullptr ? acc + bias[row0 + r] : acc;
          acc = 0.0f;
        }
      }
      if (end_of_rows) walker = (walker + kWalkers) % kMvWarps;
    }
  }
};

// Whether there is such a kernel: 4-bit codes in groups of 64, or Mxfp4 where rows are cut flat.
inline bool has_matvec64(const Matrix& m) { return may_know(m) || (path_of(m) == Path::Mx && is_flat(m)); }
__host__ __device__ constexpr int group_of(Path path) { return path == Path::Mx ? 32 : kKnownGroup; }
// f.template operator()<Mv>() with what multiplies it.
template <class F>
void with_matvec64(const Matrix& m, F&& f) {
  if (path_of(m) == Path::Mx) return f.template operator()<FlatMatvec<Path::Mx>>();
  if (is_flat(m)) return f.template operator()<FlatMatvec<Path::Nibble>>();
  const bool bf16 = m.scale_dtype == DType::BF16;
  switch (width_of(m)) {
    case 16:
      return bf16 ? f.template operator()<Matvec64<16, true>>() : f.template operator()<Matvec64<16, false>>();
    case 64:
      return bf16 ? f.template operator()<Matvec64<64, true>>() : f.template operator()<Matvec64<64, false>>();
    default:
      return bf16 ? f.template operator()<Matvec64<128, true>>() : f.template operator()<Matvec64<128, false>>();
  }
}
// Whether one instantiation fits both; their columns may differ.
inline bool same_matvec64(const Matrix& a, const Matrix& b) {
  return has_matvec64(a) && has_matvec64(b) && path_of(a) == path_of(b) && is_flat(a) == is_flat(b) && width_of(a) == width_of(b) && a.scale_dtype == b.scale_dtype;
}

}  // namespace moeflux::backend::cuda
