// Matrix times one token, by blocks of rows: the shape of decoding. Only for CUDA sources.
//
// Fast precision: the block quantizes the activations itself (cheaper than a launch of its own), warps make the integer
// dot products of groups from 16-byte loads, and one thread a row walks the groups in ascending order with its two
// fmas. Exact precision: sixteen threads a row, one lane each.
#pragma once

#include "backend/cuda/device.h"

namespace moeflux::backend::cuda {

inline constexpr int kMvThreads = 256;
inline constexpr int kMvWarps = kMvThreads / kWarp;
inline constexpr int kSegment = 64;  // groups between two walks: bounds the shared memory of long rows

// How codes meet activations. Nibble, Byte, Mx: 16 bytes of codes a load. Any: a group at a time, byte by byte.
enum class Path : std::uint8_t { Nibble, Byte, Mx, Any };

__host__ __device__ inline Path path_of(const Matrix& m) {
  if (!m.aligned || m.group * m.bits % 128 != 0) return Path::Any;
  if (m.kind == quant::FormatKind::Mxfp4) return Path::Mx;
  return m.bits == 4 ? Path::Nibble : m.bits == 8 ? Path::Byte : Path::Any;
}

// Activations in shared memory: x8 and, per group, d and the sum of x8 as f32.
struct QuantizedX {
  std::int8_t* x8;
  float *d, *sx;
};

__host__ __device__ inline std::size_t quantized_bytes(int cols, int group) {
  return static_cast<std::size_t>(cols) + static_cast<std::size_t>(cols / group) * 8;
}
__device__ inline QuantizedX quantized_at(std::byte* memory, int cols, int group) {
  auto* d = reinterpret_cast<float*>(memory + cols);
  return {reinterpret_cast<std::int8_t*>(memory), d, d + cols / group};
}

__device__ inline int round_code(float x, float d) {
  const float r = ((x / d) + 12582912.0f) - 12582912.0f;
  const float low = r < 127.0f ? r : 127.0f;
  return __float2int_rn(low > -127.0f ? low : -127.0f);
}
__device__ inline unsigned pack4(int a, int b, int c, int d) {
  return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | static_cast<unsigned>(d & 255) << 24;
}

// Eight neighbours of a group that `lanes` threads share: their codes, the group's d and sum. All threads of the warp.
__device__ inline void quantize8(const float (&x)[8], int lanes, int (&code)[8], float& d, int& sum) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float v = fabsf(x[i]);
    top = v > top ? v : top;
  }
  for (int step = lanes / 2; step >= 1; step /= 2) {
    const float other = __shfl_xor_sync(kAll, top, step);
    top = other > top ? other : top;
  }
  d = top / 127.0f;
  sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    code[i] = d > 0.0f ? round_code(x[i], d) : 0;
    sum += code[i];
  }
  for (int step = lanes / 2; step >= 1; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
}

// load(i, out) gives values i .. i + 7. Nibble and Mx keep two planes, so that 16 bytes of codes meet 16 bytes of each
// without bank conflicts: even and odd codes (what masking a word leaves), or the halves of every eight.
template <class Load>
__device__ inline void quantize_block(const Load& load, int cols, int group, Path path, const QuantizedX& q) {
  const int lanes = group / 8, padded = (cols + 255) / 256 * 256;  // whole warps: shuffles need them
  for (int i = threadIdx.x * 8; i < padded; i += blockDim.x * 8) {
    float x[8] = {};
    if (i < cols) load(i, x);
    int c[8];
    float d;
    int sum;
    quantize8(x, lanes, c, d, sum);
    if (i >= cols) continue;
    if (i % group == 0) {
      q.d[i / group] = d;
      q.sx[i / group] = static_cast<float>(sum);
    }
    auto* words = reinterpret_cast<unsigned*>(q.x8);
    if (path == Path::Nibble) {
      words[i / 8] = pack4(c[0], c[2], c[4], c[6]);
      words[cols / 8 + i / 8] = pack4(c[1], c[3], c[5], c[7]);
    } else if (path == Path::Mx) {
      words[i / 8] = pack4(c[0], c[1], c[2], c[3]);
      words[cols / 8 + i / 8] = pack4(c[4], c[5], c[6], c[7]);
    } else {
      words[i / 4] = pack4(c[0], c[1], c[2], c[3]);
      words[i / 4 + 1] = pack4(c[4], c[5], c[6], c[7]);
    }
  }
}

__device__ inline unsigned prmt(unsigned a, unsigned b, unsigned selector) {
  unsigned out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

// Eight e2m1 codes of a word as twice their values, four to a register.
__device__ inline void expand_mx(unsigned w, unsigned& low, unsigned& high) {
  const unsigned magnitude = w & 0x77777777u, signs = w & 0x88888888u;
  const unsigned a = prmt(0x03020100u, 0x0c080604u, magnitude), b = prmt(0x03020100u, 0x0c080604u, magnitude >> 16);
  // A byte of ones for every negative code: selector 8 spreads the sign of byte 0, which is set, selector 1 takes a zero.
  const unsigned selectors = signs | (0x11111111u ^ (signs >> 3));
  const unsigned sa = prmt(0x80u, 0u, selectors), sb = prmt(0x80u, 0u, selectors >> 16);
  low = __vsub4(a ^ sa, sa);
  high = __vsub4(b ^ sb, sb);
}

// The integer dot product of 16 bytes of codes, chunk c of a row, with its activations.
template <Path P>
__device__ inline int dot_chunk(uint4 w, const std::int8_t* x8, int cols, int c) {
  int s = 0;
  if constexpr (P == Path::Byte) {
    const int4 x = reinterpret_cast<const int4*>(x8)[c];
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(s) : "r"(w.x), "r"(x.x));
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(s) : "r"(w.y), "r"(x.y));
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(s) : "r"(w.z), "r"(x.z));
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(s) : "r"(w.w), "r"(x.w));
    return s;
  }
  const int4 xa = reinterpret_cast<const int4*>(x8)[c], xb = reinterpret_cast<const int4*>(x8 + cols / 2)[c];
  const unsigned words[4] = {w.x, w.y, w.z, w.w};
  const int a[4] = {xa.x, xa.y, xa.z, xa.w}, b[4] = {xb.x, xb.y, xb.z, xb.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (P == Path::Nibble) {
      s = __dp4a(static_cast<int>(words[i] & 0x0f0f0f0fu), a[i], s);
      s = __dp4a(static_cast<int>(words[i] >> 4 & 0x0f0f0f0fu), b[i], s);
    } else {
      unsigned low, high;
      expand_mx(words[i], low, high);
      s = __dp4a(static_cast<int>(low), a[i], s);
      s = __dp4a(static_cast<int>(high), b[i], s);
    }
  }
  return s;
}

// A whole group, byte by byte.
__device__ inline int dot_group(const Matrix& m, const std::uint8_t* row, const std::int8_t* x8, int g) {
  int s = 0;
  for (int i = g * m.group; i < (g + 1) * m.group; ++i) {
    const unsigned code = code_at(row, m.bits, i);
    s += (m.kind == quant::FormatKind::Mxfp4 ? e2m1_twice(code) : static_cast<int>(code)) * x8[i];
  }
  return s;
}

// What a row's walk needs of every group: the dot product as f32, s * d and b * d.
struct Terms {
  float* memory;
  int stride;  // odd: rows of a warp lie in different banks
  __device__ float* row(int r, int what) const { return memory + (r * 3 + what) * stride; }
};

__host__ __device__ inline int terms_stride(int n_groups) { return (n_groups < kSegment ? n_groups : kSegment) | 1; }

__device__ inline void put_terms(const Matrix& m, const QuantizedX& q, const Terms& terms, int r, int row, int g, int at, int idot) {
  terms.row(r, 0)[at] = static_cast<float>(idot);
  terms.row(r, 1)[at] = scale_of(m, row, g) * q.d[g];
  if (m.kind == quant::FormatKind::Affine) terms.row(r, 2)[at] = bias_of(m, row, g) * q.d[g];
}

// Dot products of a warp's rows over the groups [g0, g1).
template <Path P, int Unroll>
__device__ inline void warp_dots(const Matrix& m, const QuantizedX& q, const Terms& terms, int first_row, int n_rows, int r0, int g0, int g1) {
  const int lane = threadIdx.x % kWarp;
  const int per_group = P == Path::Any ? 1 : m.group * m.bits / 128;  // units: 16 bytes, or a group
  const int c0 = g0 * per_group, width = (g1 - g0) * per_group, units = n_rows * width;
  for (int base = 0; base < units; base += kWarp * Unroll) {
    uint4 w[Unroll];
    int row[Unroll], c[Unroll];
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      const int i = base + u * kWarp + lane;
      row[u] = i < units ? i / width : -1;
      c[u] = c0 + i - i / width * width;
      if constexpr (P != Path::Any)
        if (row[u] >= 0)
          w[u] = __ldcs(reinterpret_cast<const uint4*>(m.data + static_cast<std::size_t>(first_row + row[u]) * m.row_bytes) + c[u]);
    }
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      int s = 0;
      if constexpr (P == Path::Any) {
        if (row[u] >= 0) s = dot_group(m, m.data + static_cast<std::size_t>(first_row + row[u]) * m.row_bytes, q.x8, c[u]);
      } else {
        if (row[u] >= 0) s = dot_chunk<P>(w[u], q.x8, m.cols, c[u]);
        for (int step = 1; step < per_group; step *= 2) s += __shfl_xor_sync(kAll, s, step);
      }
      const int g = c[u] / per_group;
      if (row[u] >= 0 && c[u] % per_group == 0) put_terms(m, q, terms, r0 + row[u], first_row + row[u], g, g - g0, s);
    }
  }
}

// Rows [row0, row0 + rows_per_block) of W times the quantized activations; y and bias are indexed by row.
// All threads of the block; shared memory as matvec_bytes says.
__device__ inline void matvec_block(const Matrix& m, const QuantizedX& q, float* terms_memory, int row0, int rows_per_warp, const float* bias, float* y) {
  const int n_groups = m.cols / m.group, block_rows = rows_per_warp * kMvWarps;
  const Terms terms{terms_memory, terms_stride(n_groups)};
  const int warp = threadIdx.x / kWarp, first = row0 + warp * rows_per_warp;
  const int n = min(rows_per_warp, m.rows - first);
  const Path path = path_of(m);
  float acc = 0.0f;
  for (int g0 = 0; g0 < n_groups; g0 += kSegment) {
    const int g1 = min(g0 + kSegment, n_groups);
    if (n > 0) {
      if (path == Path::Nibble)
        warp_dots<Path::Nibble, 8>(m, q, terms, first, n, warp * rows_per_warp, g0, g1);
      else if (path == Path::Byte)
        warp_dots<Path::Byte, 8>(m, q, terms, first, n, warp * rows_per_warp, g0, g1);
      else if (path == Path::Mx)
        warp_dots<Path::Mx, 4>(m, q, terms, first, n, warp * rows_per_warp, g0, g1);
      else
        warp_dots<Path::Any, 1>(m, q, terms, first, n, warp * rows_per_warp, g0, g1);
    }
    __syncthreads();
    if (threadIdx.x < block_rows && row0 + static_cast<int>(threadIdx.x) < m.rows) {
      const float *idot = terms.row(threadIdx.x, 0), *sd = terms.row(threadIdx.x, 1), *bd = terms.row(threadIdx.x, 2);
      const bool affine = m.kind == quant::FormatKind::Affine;
#pragma unroll 4
      for (int g = g0; g < g1; ++g) {
        acc = math::fma(idot[g - g0], sd[g - g0], acc);
        if (affine) acc = math::fma(q.sx[g], bd[g - g0], acc);
      }
    }
    __syncthreads();
  }
  const int row = row0 + threadIdx.x;
  if (threadIdx.x < block_rows && row < m.rows) y[row] = bias != nullptr ? acc + bias[row] : acc;
}

// Rows a warp takes: enough 16-byte loads in flight, enough blocks for the chip.
inline int rows_per_warp(const Matrix& m) {
  const int loads = m.row_bytes / 16;  // of a row
  return loads >= 64 ? 4 : loads >= 32 ? 8 : 16;
}

inline std::size_t matvec_bytes(const Matrix& m, int per_warp) {
  return (quantized_bytes(m.cols, m.group) + 15) / 16 * 16 +
         static_cast<std::size_t>(per_warp * kMvWarps * 3 * terms_stride(m.cols / m.group)) * 4;
}
__device__ inline float* terms_at(std::byte* memory, const Matrix& m) {
  return reinterpret_cast<float*>(memory + (quantized_bytes(m.cols, m.group) + 15) / 16 * 16);
}

// Eight values of a row of f32, whatever its alignment.
struct RowLoad {
  const float* x;
  __device__ void operator()(int i, float (&out)[8]) const {
    if (reinterpret_cast<std::uintptr_t>(x) % 16 == 0) {
      const float4 a = reinterpret_cast<const float4*>(x + i)[0], b = reinterpret_cast<const float4*>(x + i)[1];
      out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) out[k] = x[i + k];
    }
  }
};

// dot16 of row `row` with x by sixteen threads; all of the warp take part.
__device__ inline float exact_row(const Matrix& m, int row, const float* x, int lane) {
  float acc = 0.0f;
  const std::uint8_t* p = m.data + static_cast<std::size_t>(row) * m.row_bytes;
  if (m.kind == quant::FormatKind::BF16) {
    const auto* w = reinterpret_cast<const std::uint16_t*>(p);
#pragma unroll 8
    for (int i = lane; i < m.cols; i += 16) acc = math::fma(x[i], bf16_to_f32(w[i]), acc);
  } else if (m.kind == quant::FormatKind::Affine) {
    for (int g = 0; g < m.cols / m.group; ++g) {
      const float s = scale_of(m, row, g), b = bias_of(m, row, g);
#pragma unroll 4
      for (int i = g * m.group + lane; i < (g + 1) * m.group; i += 16)
        acc = math::fma(x[i], math::fma(s, static_cast<float>(code_at(p, m.bits, i)), b), acc);
    }
  } else {
#pragma unroll 4
    for (int i = lane; i < m.cols; i += 16) acc = math::fma(x[i], weight_at(m, row, i), acc);
  }
  return tree16(acc);
}

}  // namespace moeflux::backend::cuda
