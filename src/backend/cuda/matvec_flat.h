// Matrix times one token where no width of matvec.h divides the rows, 2880 or 1408 columns for instance. Only for CUDA sources.
//
// Rows lie one behind the other, so a block's rows are one piece of memory, and so are their factors: thread i takes the 16-byte units
// i, i + 256, .. of it, whatever row they belong to. A group is some neighbouring threads; it never reaches beyond a row or a warp.
#pragma once

#include "backend/cuda/matvec_parts.h"

namespace moeflux::backend::cuda {

template <Path P>
struct FlatMatvec {
  static constexpr Path kPath = P;
  static constexpr int kLoads = kFlatUnits / kMvThreads;
  static constexpr bool kAffine = P != Path::Mx;

  const Matrix& m;
  std::byte* const memory;
  int units, groups, shift, n_rows;  // of a row; log2 of the units of a group; rows of a block
  uint4 w[kLoads];
  std::uint16_t factors[kLoads];  // of an affine group: the even thread has the scale, the odd one the bias

  __device__ FlatMatvec(const Matrix& matrix, std::byte* at) : m(matrix), memory(at) {
    units = m.flat_units;
    shift = kAffine ? 31 - __clz(m.group * m.bits >> 7) : 0;
    groups = units >> shift;
    n_rows = m.flat_rows;
  }

  __host__ __device__ static std::size_t bytes(const Matrix& m) { return flat_bytes(m); }
  __device__ int block_rows() const { return n_rows; }

  // Whether the thread has a factor of its unit's group.
  __device__ bool has_factor() const { return !kAffine || (threadIdx.x & ((1u << shift) - 1)) < 2; }
  __device__ const std::uint8_t* codes_of(int row0) const { return m.data + static_cast<std::size_t>(row0) * m.row_bytes; }
  __device__ const std::uint8_t* factors_of(int row0) const {
    return (kAffine && (threadIdx.x & 1) ? m.biases : m.scales) + static_cast<std::size_t>(row0) * m.scale_row_bytes;
  }
  // Units of the block's rows from row0 on.
  __device__ int n_units(int row0) const { return min(n_rows, m.rows - row0) * units; }

  __device__ void fetch(int row0, int = 0) {
    const auto* codes = reinterpret_cast<const uint4*>(codes_of(row0));
    const std::uint8_t* from = factors_of(row0);
    const int n = n_units(row0);
    const bool mine = has_factor();
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kMvThreads;
      w[u] = i < n ? __ldcs(codes + i) : uint4{};
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kMvThreads;
      if (i >= n || !mine) continue;
      if constexpr (kAffine)
        factors[u] = reinterpret_cast<const std::uint16_t*>(from)[i >> shift];
      else
        factors[u] = from[i];
    }
  }

  // Stores what fetch(row0) has brought, `away` bytes from where it came from.
  __device__ void leave(int row0, std::int64_t away) const {
    auto* codes = reinterpret_cast<uint4*>(const_cast<std::uint8_t*>(codes_of(row0)) + away);
    std::uint8_t* to = const_cast<std::uint8_t*>(factors_of(row0)) + away;
    const int n = n_units(row0);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kMvThreads;
      if (i >= n) continue;
      codes[i] = w[u];
      if (!has_factor()) continue;
      if constexpr (kAffine)
        reinterpret_cast<std::uint16_t*>(to)[i >> shift] = factors[u];
      else
        to[i] = static_cast<std::uint8_t>(factors[u]);
    }
  }

  __device__ float factor_of(int u) const {
    if constexpr (!kAffine) return quant::e8m0_half_to_f32(static_cast<std::uint8_t>(factors[u]));
    return m.scale_dtype == DType::BF16 ? factor_value<true>(factors[u]) : factor_value<false>(factors[u]);
  }

  // Pairs of a value and its factor, to `step`.
  __device__ void multiply(const QuantizedX& q, int row0, float2* step) const {
    const int n = n_units(row0), stride = groups | 1;
    const bool mine = has_factor(), odd = threadIdx.x & 1;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kMvThreads;
      const int row = static_cast<int>(__umulhi(static_cast<unsigned>(i), m.flat_magic)), unit = i - row * units, g = unit >> shift;
      int s = Activations<P>(q.x8, m.cols, unit).dot(w[u]);
      if constexpr (kAffine)
        for (int part = 1; part < 1 << shift; part *= 2) s += __shfl_xor_sync(kAll, s, part);
      if (i >= n || !mine) continue;
      const int at = row * stride + g;
      step[kAffine ? at * 2 + (odd ? 1 : 0) : at] = make_float2(kAffine && odd ? q.sx[g] : static_cast<float>(s), factor_of(u) * q.d[g]);
    }
  }

  // As Matvec64::run().
  template <bool Leaves = false>
  __device__ void run(const QuantizedX& q, int tile, int tile_step, const float* bias, float* y, std::int64_t away = 0) {
    const int n_tiles = (m.rows + n_rows - 1) / n_rows, stride = groups | 1, walkers = (n_rows + kWarp - 1) / kWarp;
    std::byte* const steps = memory + steps_offset(m);
    int walker = 0;
    for (int which = 0; tile < n_tiles; which ^= 1) {
      const int row0 = tile * n_rows;
      std::byte* step = steps + which * flat_step_bytes(m);
      multiply(q, row0, reinterpret_cast<float2*>(step));
      if constexpr (Leaves)
        if (away != 0) leave(row0, away);
      tile += tile_step;
      if (tile < n_tiles) fetch(tile * n_rows);
      __syncthreads();
      const int r = static_cast<int>(threadIdx.x) - walker * kWarp, row = row0 + r;
      if (r >= 0 && r < n_rows && row < m.rows) {
        float acc = 0.0f;
        if constexpr (kAffine) {
          const float4* f = reinterpret_cast<const float4*>(step) + r * stride;
#pragma unroll 8
          for (int g = 0; g < groups; ++g) {
            const float4 v = f[g];
            acc = math::fma(v.x, v.y, acc);
            acc = math::fma(v.z, v.w, acc);
          }
        } else {
          const float2* f = reinterpret_cast<const float2*>(step) + r * stride;
#pragma unroll 8
          for (int g = 0; g < groups; ++g) {
            const float2 v = f[g];
            acc = math::fma(v.x, v.y, acc);
          }
        }
        if (Leaves && away != 0 && bias != nullptr) leave_bias(bias, row, away);
        y[row] = bias != nullptr ? acc + bias[row] : acc;
      }
      walker = walker + 2 * walkers > kMvWarps ? 0 : walker + walkers;
    }
  }
};

}  // namespace moeflux::backend::cuda
