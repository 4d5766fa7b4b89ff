// What kernels share: matrices by value, decoding of single weights, lanes, quantized activations.
//
// Only for CUDA sources. Everything here computes the formulas of backend/ops.h to the CPU's bits: products and sums
// are separate roundings (-fmad=false) unless math::fma stands there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/ops.h"
#include "core/float_bits.h"
#include "core/scalar_math.h"
#include "quant/codes.h"
#include "quant/format.h"

namespace moeflux::backend::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAll = 0xffffffffu;

// A matrix as a kernel parameter. Memory of the device is aligned (allocations to 256 bytes, parts of a record to 64),
// rows are only as long as their format makes them.
struct Matrix {
  const std::uint8_t* data = nullptr;
  const std::uint8_t* scales = nullptr;
  const std::uint8_t* biases = nullptr;
  int rows = 0, cols = 0;
  int row_bytes = 0, scale_row_bytes = 0;
  int group = 0;
  quant::FormatKind kind = quant::FormatKind::F32;
  std::uint8_t bits = 0;
  DType scale_dtype = DType::F32;
  bool aligned = false;  // every row starts at a multiple of 16 bytes
  // How one token's kernels cut rows that no width of theirs divides (flat_cut in matvec_parts.h); units 0: they do not.
  std::uint16_t flat_units = 0, flat_rows = 0;  // 16-byte units of a row; rows of a block
  unsigned flat_magic = 0;                      // i / flat_units is the upper half of i * flat_magic
};

void flat_cut(Matrix& m);

inline Matrix to_device(const quant::MatrixView& v) {
  Matrix m;
  m.data = reinterpret_cast<const std::uint8_t*>(v.data);
  m.scales = reinterpret_cast<const std::uint8_t*>(v.scales);
  m.biases = reinterpret_cast<const std::uint8_t*>(v.biases);
  m.rows = static_cast<int>(v.rows);
  m.cols = static_cast<int>(v.cols);
  m.row_bytes = static_cast<int>(v.row_bytes());
  m.scale_row_bytes = static_cast<int>(v.scale_row_bytes());
  m.group = v.format.group;
  m.kind = v.format.kind;
  m.bits = v.format.bits;
  m.scale_dtype = v.format.scale_dtype;
  m.aligned = reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && m.row_bytes % 16 == 0;
  flat_cut(m);
  return m;
}

// Rows of f32 values of rank 2 or 3: row i starts at the returned pointer.
struct Rows {
  float* data = nullptr;
  std::int64_t outer = 0, inner_stride = 0;
  int inner = 1, width = 0;
  __device__ float* row(std::int64_t i) const {
    return inner == 1 ? data + i * outer : data + i / inner * outer + i % inner * inner_stride;
  }
};

inline Rows to_rows(const TensorView& v) {
  Rows r;
  r.data = v.f32();
  r.outer = v.stride(0);
  r.inner = v.rank == 3 ? static_cast<int>(v.dim(1)) : 1;
  r.inner_stride = v.rank == 3 ? v.stride(1) : 0;
  r.width = static_cast<int>(v.dim(v.rank - 1));
  return r;
}
inline std::int64_t n_rows(const TensorView& v) { return v.rank == 3 ? v.dim(0) * v.dim(1) : v.dim(0); }

// Kernels of a step may start while the one before still runs. wait_inputs() returns when everything before has completed;
// until then only weights, and what kernels before the last one wrote, may be read. release_next() lets the next kernel
// start; every kernel calls both, in this order.
__device__ inline void wait_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void begin_kernel() {
  wait_inputs();
  release_next();
}

// What the host has written at p, and everything it wrote before that.
__device__ inline std::int32_t load_acquire(const std::int32_t* p) {
  std::int32_t v;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline std::uint64_t global_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ inline float minus_inf() { return -__int_as_float(0x7f800000); }

// Unaligned 16-bit values are read byte by byte; scales of the device are aligned to their size.
__device__ inline float load_scale(const Matrix& m, const std::uint8_t* row, int g) {
  if (m.kind == quant::FormatKind::Mxfp4) return quant::e8m0_half_to_f32(row[g]);
  if (m.scale_dtype == DType::F32) return reinterpret_cast<const float*>(row)[g];
  const std::uint16_t v = reinterpret_cast<const std::uint16_t*>(row)[g];
  return m.scale_dtype == DType::BF16 ? bf16_to_f32(v) : f16_to_f32(v);
}
__device__ inline float scale_of(const Matrix& m, int row, int g) {
  return load_scale(m, m.scales + static_cast<std::size_t>(row) * m.scale_row_bytes, g);
}
__device__ inline float bias_of(const Matrix& m, int row, int g) {
  return load_scale(m, m.biases + static_cast<std::size_t>(row) * m.scale_row_bytes, g);
}

// Twice the value of an e2m1 code.
__device__ inline int e2m1_twice(unsigned code) {
  const unsigned magnitude = __byte_perm(0x03020100u, 0x0c080604u, code & 7u) & 0xffu;
  return code & 8u ? -static_cast<int>(magnitude) : static_cast<int>(magnitude);
}

// Code `col` of a row: unsigned for affine formats.
__device__ inline unsigned code_at(const std::uint8_t* row, int bits, int col) {
  if (bits == 8) return row[col];
  if (bits == 4) return row[col >> 1] >> (col & 1) * 4 & 15u;
  const int bit = col * bits, shift = bit & 7;
  unsigned word = row[bit >> 3];
  if (shift + bits > 8) word |= static_cast<unsigned>(row[(bit >> 3) + 1]) << 8;
  return word >> shift & ((1u << bits) - 1u);
}

// One weight as f32, as quant::decode_row gives it.
__device__ inline float weight_at(const Matrix& m, int row, int col) {
  const std::uint8_t* p = m.data + static_cast<std::size_t>(row) * m.row_bytes;
  switch (m.kind) {
    case quant::FormatKind::F32:
      return reinterpret_cast<const float*>(p)[col];
    case quant::FormatKind::F16:
      return f16_to_f32(reinterpret_cast<const std::uint16_t*>(p)[col]);
    case quant::FormatKind::BF16:
      return bf16_to_f32(reinterpret_cast<const std::uint16_t*>(p)[col]);
    case quant::FormatKind::Fp8:
      return quant::e4m3_to_f32(p[col]) * scale_of(m, row, col / m.group);
    case quant::FormatKind::Mxfp4:
      return math::fma(scale_of(m, row, col / 32), static_cast<float>(e2m1_twice(code_at(p, 4, col))), 0.0f);
    case quant::FormatKind::Affine:
      return math::fma(scale_of(m, row, col / m.group), static_cast<float>(code_at(p, m.bits, col)),
                       bias_of(m, row, col / m.group));
  }
  return 0.0f;
}

// A code as f32: conversions of integers are slow on the device, a sum is not. 2^23 has room for it in its last bits.
__device__ inline float code_value(unsigned code) { return __uint_as_float(code | 0x4b000000u) - 8388608.0f; }

// The tree of dot16 over sixteen neighbouring threads: every one gets the sum.
__device__ inline float tree16(float v) {
  for (int step = 8; step >= 1; step /= 2) v = v + __shfl_xor_sync(kAll, v, step);
  return v;
}

// Its last three steps, for eight neighbours that have each done the first one by themselves.
__device__ inline float tree8(float v) {
#pragma unroll
  for (int step = 4; step >= 1; step /= 2) v = v + __shfl_xor_sync(kAll, v, step);
  return v;
}

// dot16(x, x) by sixteen threads, `lane` the number of this one; all of the warp take part.
__device__ inline float square16(const float* x, int n, int lane) {
  float acc = 0.0f;
#pragma unroll 16
  for (int i = lane; i < n; i += 16) acc = math::fma(x[i], x[i], acc);
  return tree16(acc);
}

// A lane of dot16 by each of sixteen threads, without the tree. Loads are a batch ahead of the fmas: the compiler does not move them
// past a loop's test. term(i, a, b) reads the factors at i; behind the end 0 times 0 changes nothing.
template <int Batch, class Term>
__device__ inline float lane16(int n, int lane, const Term& term) {
  float a[2][Batch], b[2][Batch], acc = 0.0f;
  const auto load = [&](int first, float(&to_a)[Batch], float(&to_b)[Batch]) {
#pragma unroll
    for (int k = 0; k < Batch; ++k) {
      to_a[k] = to_b[k] = 0.0f;
      if (const int i = first + k * 16 + lane; i < n) term(i, to_a[k], to_b[k]);
    }
  };
  const auto add = [&](const float(&from_a)[Batch], const float(&from_b)[Batch]) {
#pragma unroll
    for (int k = 0; k < Batch; ++k) acc = math::fma(from_a[k], from_b[k], acc);
  };
  load(0, a[0], b[0]);
#pragma unroll 1
  for (int first = 0; first < n; first += 32 * Batch) {
    load(first + 16 * Batch, a[1], b[1]);
    add(a[0], b[0]);
    load(first + 32 * Batch, a[0], b[0]);
    add(a[1], b[1]);
  }
  return acc;
}

__device__ inline float clamped_glu(float g, float u, float limit, float alpha) {
  const float gc = g < limit ? g : limit;
  const float low = u < limit ? u : limit;
  const float uc = low > 0.0f - limit ? low : 0.0f - limit;
  return (uc + 1.0f) * (gc * math::sigmoid(alpha * gc));
}

struct GluParams {
  GluKind kind = GluKind::Silu;
  float limit = 0.0f, alpha = 0.0f;
  __device__ float operator()(float g, float u) const {
    return kind == GluKind::Silu ? math::silu(g) * u : clamped_glu(g, u, limit, alpha);
  }
};

// cols / group for a group that is a power of two, as all are: divisions by what only runs know are dear on the device.
__host__ __device__ inline int groups_of(int cols, int group) {
#ifdef __CUDA_ARCH__
  return cols >> (31 - __clz(group));
#else
  return cols / group;
#endif
}

inline int ceil_div(std::int64_t a, std::int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace moeflux::backend::cuda
