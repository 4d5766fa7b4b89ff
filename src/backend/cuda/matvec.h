// Matrix times one token, by blocks of rows: the shape of decoding. Only for CUDA sources.
//
// Fast precision: a block takes 32 KiB of codes at a time. Their loads are issued first, then the block quantizes the
// activations itself (cheaper than a launch of its own) while they fly; warps make the integer dot products of groups
// and one thread a row walks the groups in ascending order with its two fmas, while the next codes fly. Exact precision:
// sixteen threads a row, one lane each.
#pragma once

#include "backend/cuda/matvec_flat.h"
#include "backend/cuda/matvec_parts.h"

namespace moeflux::backend::cuda {

// What a thread has on its way for one step.
template <int N>
struct Loads {
  uint4 w[N];
  uint4 scales, biases;  // 16 bytes of some row's, for those threads that carry any
};

template <Path P, int Width>
class Matvec {
 public:
  static constexpr int kLoads = loads_of(Width);
  static constexpr int kRows = kLoads * kWarp / Width;           // of a warp
  static constexpr int kSets = Width >= kWarp ? Width / kWarp : 1;  // columns a thread sees
  static constexpr int kScaleBits = P == Path::Mx ? 8 : 16;

  __device__ Matvec(const Matrix& matrix, std::byte* memory)
      : m(matrix), q(quantized_at(memory, matrix.cols, matrix.group)), layout(cut_of(matrix), kScaleBits), steps(reinterpret_cast<float*>(memory + steps_offset(matrix))) {
    shift = 31 - __clz(m.group * m.bits / 128);
    groups = Width >> shift;
  }
  __device__ int row_of(int u) const { return Width >= kWarp ? u / kSets : 2 * u + static_cast<int>(threadIdx.x) % kWarp / 16; }
  __device__ int unit_of(int u) const { return Width >= kWarp ? u % kSets * kWarp + static_cast<int>(threadIdx.x) % kWarp : static_cast<int>(threadIdx.x) % 16; }

  // Issues the loads of the block's rows from row0 on, units [c0, c0 + Width).
  __device__ void fetch(int row0, int c0, Loads<kLoads>& to) const {
    const int first = row0 + static_cast<int>(threadIdx.x) / kWarp * kRows;
    const std::uint8_t* base = m.data + static_cast<std::size_t>(first) * m.row_bytes + static_cast<std::size_t>(c0) * 16;
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      if (first + row_of(u) < m.rows) to.w[u] = __ldcs(reinterpret_cast<const uint4*>(base + row_of(u) * m.row_bytes) + unit_of(u));
    const int per_row = groups * kScaleBits / 128;  // 16-byte pieces, a power of two
    const int r = groups_of(static_cast<int>(threadIdx.x), per_row), row = row0 + r;
    if (r >= kRows * kMvWarps || row >= m.rows) return;
    const std::size_t at = static_cast<std::size_t>(row) * m.scale_row_bytes + static_cast<std::size_t>(c0 >> shift) * kScaleBits / 8 + (threadIdx.x & (per_row - 1)) * 16;
    to.scales = *reinterpret_cast<const uint4*>(m.scales + at);
    if constexpr (P != Path::Mx) to.biases = *reinterpret_cast<const uint4*>(m.biases + at);
  }

  __device__ float* buffer(int which) const { return steps + which * layout.words(); }

  // Dot products and scales of the step, to shared memory.
  __device__ void multiply(int c0, const Loads<kLoads>& from, int which) const {
    float* dots = buffer(which);
    const int lane = threadIdx.x % kWarp, warp_row = static_cast<int>(threadIdx.x) / kWarp * kRows, per_group = 1 << shift;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const Activations<P> x(q.x8, m.cols, c0 + unit_of(set));
#pragma unroll
      for (int u = set; u < kLoads; u += kSets) {
        int s = x.dot(from.w[u]);
        for (int step = 1; step < per_group; step *= 2) s += __shfl_xor_sync(kAll, s, step);
        if ((lane & (per_group - 1)) == 0) dots[(warp_row + row_of(u)) * layout.dot_stride + (unit_of(u) >> shift)] = static_cast<float>(s);
      }
    }
    const int per_row = groups * kScaleBits / 128, r = groups_of(static_cast<int>(threadIdx.x), per_row);
    if (r >= kRows * kMvWarps) return;
    auto* scales = reinterpret_cast<unsigned*>(dots + layout.dots) + r * layout.scale_stride + (threadIdx.x & (per_row - 1)) * 4;
    scales[0] = from.scales.x, scales[1] = from.scales.y, scales[2] = from.scales.z, scales[3] = from.scales.w;
    if constexpr (P != Path::Mx) {
      unsigned* biases = scales + layout.scales;
      biases[0] = from.biases.x, biases[1] = from.biases.y, biases[2] = from.biases.z, biases[3] = from.biases.w;
    }
  }

  // The step's groups in ascending order, for row r of the block.
  __device__ void walk(int c0, int r, int which, float& acc) const {
    const float* dots = buffer(which) + r * layout.dot_stride;
    const auto* scales = reinterpret_cast<const unsigned*>(buffer(which) + layout.dots) + r * layout.scale_stride;
    const float *d = q.d + (c0 >> shift), *sx = q.sx + (c0 >> shift);
    if constexpr (P == Path::Mx) {
#pragma unroll 8
      for (int g = 0; g < groups; ++g)
        acc = math::fma(dots[g], quant::e8m0_half_to_f32(static_cast<std::uint8_t>(scales[g / 4] >> g % 4 * 8)) * d[g], acc);
    } else {
      const unsigned* biases = scales + layout.scales;
      const bool bf16 = m.scale_dtype == DType::BF16;
#pragma unroll 4
      for (int g = 0; g < groups; g += 2) {
        const unsigned s = scales[g / 2], b = biases[g / 2];
        const float s0 = bf16 ? __uint_as_float(s << 16) : f16_to_f32(static_cast<std::uint16_t>(s)), s1 = bf16 ? __uint_as_float(s & 0xffff0000u) : f16_to_f32(static_cast<std::uint16_t>(s >> 16));
        const float b0 = bf16 ? __uint_as_float(b << 16) : f16_to_f32(static_cast<std::uint16_t>(b)), b1 = bf16 ? __uint_as_float(b & 0xffff0000u) : f16_to_f32(static_cast<std::uint16_t>(b >> 16));
        acc = math::fma(dots[g], s0 * d[g], acc);
        acc = math::fma(sx[g], b0 * d[g], acc);
        acc = math::fma(dots[g + 1], s1 * d[g + 1], acc);
        acc = math::fma(sx[g + 1], b1 * d[g + 1], acc);
      }
    }
  }

  const Matrix& m;
  const QuantizedX q;
  const StepLayout layout;
  float* const steps;
  int shift, groups;  // log2 of the units of a group; groups of a row and step
};

// Blocks `tile`, `tile` + `tile_step`, .. of W's rows times x; y and bias are indexed by row. `load` as for quantize_block.
// `early`: the matrix is known without the kernel before, so its codes may be on their way before wait_inputs(). One warp
// walks a block of rows while the others are at the next.
template <Path P, int Width, class Load>
__device__ inline void matvec_path(const Matrix& m, const Load& load, std::byte* memory, int tile, int tile_step, const float* bias, float* y, bool early) {
  const Matvec<P, Width> mv(m, memory);
  constexpr int kRows = Matvec<P, Width>::kRows * kMvWarps, kWalkers = (kRows + kWarp - 1) / kWarp;
  const int n_tiles = (m.rows + kRows - 1) / kRows, units = row_units(m);
  Loads<loads_of(Width)> loads;
  mv.fetch(tile * kRows, 0, loads);
  if (early) begin_kernel();
  quantize_block(load, m.cols, m.group, order_of(P), mv.q);
  __syncthreads();
  float acc = 0.0f;
  int walker = 0;
  for (int c0 = 0, which = 0; tile < n_tiles; which ^= 1) {
    const int row0 = tile * kRows, at = c0;
    mv.multiply(c0, loads, which);
    c0 += Width;
    const bool end_of_rows = c0 >= units;
    if (end_of_rows) c0 = 0, tile += tile_step;
    if (tile < n_tiles) mv.fetch(tile * kRows, c0, loads);
    __syncthreads();
    const int r = static_cast<int>(threadIdx.x) - walker * kWarp;
    if (r >= 0 && r < kRows && row0 + r < m.rows) {
      mv.walk(at, r, which, acc);
      if (end_of_rows) {
        y[row0 + r] = bias != nullptr ? acc + bias[row0 + r] : acc;
        acc = 0.0f;
      }
    }
    if (end_of_rows) walker = (walker + kWalkers) % kMvWarps;
  }
}

template <Path P, class Load>
__device__ inline void matvec_flat(const Matrix& m, const Load& load, std::byte* memory, int tile, int tile_step, const float* bias, float* y, bool early) {
  FlatMatvec<P> mv(m, memory);
  mv.fetch(tile * mv.block_rows());
  if (early) begin_kernel();
  const QuantizedX q = quantized_at(memory, m.cols, m.group);
  quantize_block(load, m.cols, m.group, order_of(P), q);
  __syncthreads();
  mv.run(q, tile, tile_step, bias, y);
}

// Any format and width: a warp a row, a lane a group, then one lane walks them 32 at a time.
template <class Load>
__device__ inline void matvec_any(const Matrix& m, const Load& load, std::byte* memory, int tile, int tile_step, const float* bias, float* y, bool early) {
  if (early) begin_kernel();
  const QuantizedX q = quantized_at(memory, m.cols, m.group);
  quantize_block(load, m.cols, m.group, Order::Natural, q);
  __syncthreads();
  const int lane = threadIdx.x % kWarp, n_groups = m.cols / m.group;
  const bool affine = m.kind == quant::FormatKind::Affine;
  for (int row = tile * kMvWarps + threadIdx.x / kWarp; row < m.rows; row += tile_step * kMvWarps) {
    float acc = 0.0f;
    for (int g0 = 0; g0 < n_groups; g0 += kWarp) {
      const int g = g0 + lane;
      float dot = 0.0f, sd = 0.0f, bd = 0.0f, sx = 0.0f;
      if (g < n_groups) {
        dot = static_cast<float>(dot_group(m, m.data + static_cast<std::size_t>(row) * m.row_bytes, q.x8, g));
        sd = scale_of(m, row, g) * q.d[g];
        sx = q.sx[g];
        if (affine) bd = bias_of(m, row, g) * q.d[g];
      }
      const int n = min(kWarp, n_groups - g0);
      for (int i = 0; i < n; ++i) {
        acc = math::fma(__shfl_sync(kAll, dot, i), __shfl_sync(kAll, sd, i), acc);
        if (affine) acc = math::fma(__shfl_sync(kAll, sx, i), __shfl_sync(kAll, bd, i), acc);
      }
    }
    if (lane == 0) y[row] = bias != nullptr ? acc + bias[row] : acc;
    if (tile_step >= 1 << 20) break;
  }
}

// Whether a matvec of this matrix takes activations that were quantized before (matvec64.h): groups of kKnownGroup, even and odd planes.
inline constexpr int kKnownGroup = 64;
inline bool may_know(const Matrix& m) { return path_of(m) == Path::Nibble && m.group == kKnownGroup && (width_of(m) != 0 || is_flat(m)); }

// Activations that some kernel before has quantized, as quantized_at() lays them out: to shared memory.
__device__ inline void copy_known(const uint4* known, int cols, std::byte* memory) {
  for (int i = threadIdx.x; i < (cols + cols / 8 + 15) / 16; i += kMvThreads) reinterpret_cast<uint4*>(memory)[i] = __ldcg(known + i);
}

template <class Load>
__device__ inline void matvec(const Matrix& m, const Load& load, std::byte* memory, int tile, int tile_step, const float* bias, float* y, bool early) {
  const int width = width_of(m);
  const Path path = path_of(m);
  if (is_flat(m)) {
    if (path == Path::Byte) return matvec_flat<Path::Byte>(m, load, memory, tile, tile_step, bias, y, early);
    if (path == Path::Mx) return matvec_flat<Path::Mx>(m, load, memory, tile, tile_step, bias, y, early);
    return matvec_flat<Path::Nibble>(m, load, memory, tile, tile_step, bias, y, early);
  }
  if (width == 0) return matvec_any(m, load, memory, tile, tile_step, bias, y, early);
  if (path == Path::Byte) return matvec_path<Path::Byte, 64>(m, load, memory, tile, tile_step, bias, y, early);
  if (path == Path::Mx) return matvec_path<Path::Mx, 64>(m, load, memory, tile, tile_step, bias, y, early);
  if (width == 16) return matvec_path<Path::Nibble, 16>(m, load, memory, tile, tile_step, bias, y, early);
  if (width == 64) return matvec_path<Path::Nibble, 64>(m, load, memory, tile, tile_step, bias, y, early);
  return matvec_path<Path::Nibble, 128>(m, load, memory, tile, tile_step, bias, y, early);
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

// The same of glu(gate, up).
struct GluLoad {
  const float *gate, *up;
  GluParams glu;
  __device__ void operator()(int i, float (&out)[8]) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) out[k] = glu(gate[i + k], up[i + k]);
  }
};

// ---- exact

inline constexpr int kExactRows = 2;        // of a block: one warp makes its dot products
inline constexpr int kExactThreads = 128;   // all of them decode

// Shared memory of matvec_exact: the decoded rows and the activations. 0: too much, decoded on the way.
inline std::size_t exact_bytes(const Matrix& m) {
  const std::size_t bytes = static_cast<std::size_t>(m.cols) * 4 * (kExactRows + 1);
  return bytes <= 64u << 10 ? bytes : 0;
}

// dot16 of row `row` with x by sixteen threads; all of the warp take part.
__device__ inline float exact_row(const Matrix& m, int row, const float* x, int lane) {
  float acc = 0.0f;
  const std::uint8_t* p = m.data + static_cast<std::size_t>(row) * m.row_bytes;
  if (m.kind == quant::FormatKind::BF16) {
    const auto* w = reinterpret_cast<const std::uint16_t*>(p);
#pragma unroll 8
    for (int i = lane; i < m.cols; i += 16) acc = math::fma(x[i], bf16_to_f32(w[i]), acc);
  } else if (m.kind == quant::FormatKind::Affine && m.bits == 8) {
    const int per_group = m.group;
#pragma unroll 2
    for (int g = 0; g < m.cols / per_group; ++g) {
      const float s = scale_of(m, row, g), b = bias_of(m, row, g);
#pragma unroll 4
      for (int i = g * per_group + lane; i < (g + 1) * per_group; i += 16) acc = math::fma(x[i], math::fma(s, static_cast<float>(p[i]), b), acc);
    }
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

// What the exact kernels have code of their own for: rows that start at multiples of 16 bytes and have whole eights of weights.
enum class Exact : std::uint8_t { Any, Bf16, Byte, Nibble };
inline Exact exact_of(const Matrix& m) {
  if (!m.aligned || m.cols % 8 != 0) return Exact::Any;
  if (m.kind == quant::FormatKind::BF16) return Exact::Bf16;
  if (m.kind != quant::FormatKind::Affine || m.scale_dtype != DType::BF16) return Exact::Any;
  return m.bits == 8 ? Exact::Byte : m.bits == 4 ? Exact::Nibble : Exact::Any;
}

// Eight weights of a row from column c (a multiple of 8) on.
__device__ inline void decode8_bf16(const std::uint8_t* p, float (&out)[8]) {
  const uint4 w = *reinterpret_cast<const uint4*>(p);
  const unsigned words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) out[2 * i] = __uint_as_float(words[i] << 16), out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
}
__device__ inline void decode8_byte(const std::uint8_t* p, float s, float b, float (&out)[8]) {
  const uint2 w = *reinterpret_cast<const uint2*>(p);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = math::fma(s, static_cast<float>((i < 4 ? w.x : w.y) >> i % 4 * 8 & 255u), b);
}
__device__ inline void decode8_nibble(const std::uint8_t* p, float s, float b, float (&out)[8]) {
  const unsigned w = *reinterpret_cast<const unsigned*>(p);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = math::fma(s, code_value(w >> 4 * i & 15u), b);
}
template <Exact E>
__device__ inline void decode8(const Matrix& m, int row, int c, float (&out)[8]) {
  const std::uint8_t* p = m.data + static_cast<std::size_t>(row) * m.row_bytes;
  if constexpr (E == Exact::Byte || E == Exact::Nibble) {
    const std::size_t at = static_cast<std::size_t>(row) * m.scale_row_bytes + static_cast<std::size_t>(groups_of(c, m.group)) * 2;
    const float s = bf16_to_f32(*reinterpret_cast<const std::uint16_t*>(m.scales + at)), b = bf16_to_f32(*reinterpret_cast<const std::uint16_t*>(m.biases + at));
    E == Exact::Byte ? decode8_byte(p + c, s, b, out) : decode8_nibble(p + c / 2, s, b, out);
  } else if constexpr (E == Exact::Bf16) {
    decode8_bf16(p + 2 * c, out);
  } else if (m.kind == quant::FormatKind::BF16 && m.aligned && c + 8 <= m.cols) {
    decode8_bf16(p + 2 * c, out);
  } else if (m.kind == quant::FormatKind::Affine && m.bits == 8 && m.aligned) {
    decode8_byte(p + c, scale_of(m, row, c / m.group), bias_of(m, row, c / m.group), out);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = c + i < m.cols ? weight_at(m, row, c + i) : 0.0f;
  }
}

// Rows [row0, row0 + kExactRows) times x; y and bias by row. `staged`: shared memory of exact_bytes is there; always for E other than Any.
template <Exact E>
__device__ inline void matvec_exact(const Matrix& m, const float* x, std::byte* memory, bool staged, int row0, const float* bias, float* y, bool early) {
  const int n = min(kExactRows, m.rows - row0), r = threadIdx.x / 16;
  auto* w = reinterpret_cast<float*>(memory);
  float* xs = w + kExactRows * m.cols;
  if (E != Exact::Any || staged) {
    const int per_row = (m.cols + 7) / 8;
#pragma unroll(E == Exact::Any ? 1 : 4)
    for (int e = threadIdx.x; e < n * per_row; e += kExactThreads) {
      const int row = e >= per_row ? 1 : 0, c = (e - row * per_row) * 8;
      float v[8];
      decode8<E>(m, row0 + row, c, v);
      if constexpr (E != Exact::Any) {
        auto* to = reinterpret_cast<float4*>(&w[row * m.cols + c]);
        to[0] = {v[0], v[1], v[2], v[3]}, to[1] = {v[4], v[5], v[6], v[7]};
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (c + i < m.cols) w[row * m.cols + c + i] = v[i];
      }
    }
  }
  if (early) begin_kernel();
  if (E != Exact::Any || staged) {
    if (m.cols % 4 == 0 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0) {
#pragma unroll 4
      for (int i = threadIdx.x * 4; i < m.cols; i += kExactThreads * 4) *reinterpret_cast<float4*>(xs + i) = *reinterpret_cast<const float4*>(x + i);
    } else {
      for (int i = threadIdx.x; i < m.cols; i += kExactThreads) xs[i] = x[i];
    }
    __syncthreads();
  }
  if (r >= kExactRows) return;
  const int row = min(r, n - 1), lane = threadIdx.x & 15;
  float v = 0.0f;
  if (E != Exact::Any || staged) {
    v = tree16(lane16<12>(m.cols, lane, [&](int i, float& a, float& b) { a = xs[i], b = w[row * m.cols + i]; }));
  } else {
    v = exact_row(m, row0 + row, x, lane);
  }
  if (r < n && lane == 0) y[row0 + r] = bias != nullptr ? v + bias[row0 + r] : v;
}

}  // namespace moeflux::backend::cuda
