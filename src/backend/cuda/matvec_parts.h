// What matvecs of one token share: how codes meet activations, activations in 8 bits, how rows are cut. Only for CUDA sources.
#pragma once

#include "backend/cuda/device.h"

namespace moeflux::backend::cuda {

inline constexpr int kMvThreads = 256;
inline constexpr int kMvWarps = kMvThreads / kWarp;
// 16-byte loads of a thread in a step: enough in flight, and enough blocks for the chip where rows are short.
__host__ __device__ constexpr int loads_of(int width) { return width == 16 ? 4 : 8; }

// How codes meet activations. Nibble, Byte, Mx: 16 bytes of codes a load. Any: a group at a time, byte by byte.
enum class Path : std::uint8_t { Nibble, Byte, Mx, Any };

__host__ __device__ inline Path path_of(const Matrix& m) {
  if (!m.aligned || m.group * m.bits % 128 != 0 || m.scale_dtype == DType::F32) return Path::Any;
  if (m.kind == quant::FormatKind::Mxfp4) return Path::Mx;
  return m.bits == 4 ? Path::Nibble : m.bits == 8 ? Path::Byte : Path::Any;
}

// Activations in shared memory: x8 and, per group, d and the sum of x8 as f32.
struct QuantizedX {
  std::int8_t* x8;
  float *d, *sx;
};

__host__ __device__ inline std::size_t quantized_bytes(int cols, int group) {
  return static_cast<std::size_t>(cols) + static_cast<std::size_t>(groups_of(cols, group)) * 8;
}
__device__ inline QuantizedX quantized_at(std::byte* memory, int cols, int group) {
  auto* d = reinterpret_cast<float*>(memory + cols);
  return {reinterpret_cast<std::int8_t*>(memory), d, d + groups_of(cols, group)};
}

// rint(x / d) clamped to +-127. `inverse` is 1 / d rounded, or 0 where that or a product with it could leave the normal
// range. With it the quotient is made by one correction of x * inverse, which gives the rounded quotient (Markstein) unless
// that underflows: then the code is 0 either way.
__device__ inline float quotient_of(float x, float d, float inverse) {
  const float guess = x * inverse;
  return math::fma(math::fma(-guess, d, x), inverse, guess);
}
__device__ inline int round_code(float quotient) {
  const float r = (quotient + 12582912.0f) - 12582912.0f;
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
  const float inverse = d > 0x1p-60f && d < 0x1p60f ? 1.0f / d : 0.0f;
  sum = 0;
  if (inverse != 0.0f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) code[i] = round_code(quotient_of(x[i], d, inverse));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) code[i] = d > 0.0f ? round_code(x[i] / d) : 0;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += code[i];
  for (int step = lanes / 2; step >= 1; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
}

// Codes of columns [i, i + 8) of `cols`, even and odd ones in planes.
__device__ inline void put_planes(const QuantizedX& q, int cols, int i, const int (&code)[8]) {
  auto* words = reinterpret_cast<unsigned*>(q.x8);
  words[i / 8] = pack4(code[0], code[2], code[4], code[6]);
  words[cols / 8 + i / 8] = pack4(code[1], code[3], code[5], code[7]);
}

// load(i, out) gives values i .. i + 7. Matvecs keep two planes, so that 16 bytes of codes meet 16 bytes of each without
// bank conflicts: even and odd codes (what masking a word leaves), or the halves of every eight. Paired: the even and the
// odd ones of every eight side by side.
enum class Order : std::uint8_t { Natural, EvenOddPlanes, HalfPlanes, Paired };
__device__ inline Order order_of(Path path) { return path == Path::Nibble ? Order::EvenOddPlanes : path == Path::Mx ? Order::HalfPlanes : Order::Natural; }

template <class Load>
__device__ inline void quantize_block(const Load& load, int cols, int group, Order order, const QuantizedX& q) {
  const int lanes = group / 8, padded = (cols + 255) / 256 * 256;  // whole warps: shuffles need them
  for (int i = threadIdx.x * 8; i < padded; i += blockDim.x * 8) {
    float x[8] = {};
    if (i < cols) load(i, x);
    int c[8];
    float d;
    int sum;
    quantize8(x, lanes, c, d, sum);
    if (i >= cols) continue;
    if ((i & (group - 1)) == 0) {
      q.d[groups_of(i, group)] = d;
      q.sx[groups_of(i, group)] = static_cast<float>(sum);
    }
    auto* words = reinterpret_cast<unsigned*>(q.x8);
    if (order == Order::Paired) {
      words[i / 4] = pack4(c[0], c[2], c[4], c[6]);
      words[i / 4 + 1] = pack4(c[1], c[3], c[5], c[7]);
    } else if (order == Order::EvenOddPlanes) {
      put_planes(q, cols, i, c);
    } else if (order == Order::HalfPlanes) {
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

// A whole group, byte by byte.
__device__ inline int dot_group(const Matrix& m, const std::uint8_t* row, const std::int8_t* x8, int g) {
  int s = 0;
  for (int i = g * m.group; i < (g + 1) * m.group; ++i) {
    const unsigned code = code_at(row, m.bits, i);
    s += (m.kind == quant::FormatKind::Mxfp4 ? e2m1_twice(code) : static_cast<int>(code)) * x8[i];
  }
  return s;
}

// How a matrix is cut. A warp's step is `rows` rows by `width` units (16 bytes of codes; a whole group on path Any),
// loads_of(width) a thread. Long rows take several steps.
struct Cut {
  int rows, width, per_group, groups;  // per_group: units of a group; groups: of a row and step
};

__host__ __device__ inline int row_units(const Matrix& m) { return path_of(m) == Path::Any ? groups_of(m.cols, m.group) : m.cols * m.bits / 128; }

// Widths with code of their own; 0: path Any.
__host__ __device__ inline int width_of(const Matrix& m) {
  const Path path = path_of(m);
  const int units = row_units(m);
  if (path == Path::Any) return 0;
  if (path == Path::Nibble) return units % 128 == 0 ? 128 : units % 64 == 0 ? 64 : units % 16 == 0 && m.group <= 64 ? 16 : 0;
  return units % 64 == 0 ? 64 : 0;
}

__host__ __device__ inline Cut cut_of(const Matrix& m) {
  const int width = width_of(m);
  if (width == 0) return {1, kWarp, 1, kWarp};
  const int per_group = m.group * m.bits / 128;  // a power of two
  return {loads_of(width) * kWarp / width, width, per_group, groups_of(width, per_group)};
}

// Rows that no width divides are cut without regard to where one ends (matvec_flat.h), so many units a block. Divisions by what only runs
// know are dear on the device, so flat_cut(), on the host, says how.
inline constexpr int kFlatUnits = 8 * kMvThreads;
__host__ __device__ inline bool is_flat(const Matrix& m) { return m.flat_units != 0; }
// Of a block.
__host__ __device__ inline int block_rows(const Matrix& m) { return is_flat(m) ? m.flat_rows : cut_of(m).rows * kMvWarps; }

// Shared memory behind the activations, twice: per row and group of a step the dot product as f32, then scales and biases
// as they are. Odd strides: rows of a walk lie in different banks.
struct StepLayout {
  int dot_stride, scale_stride, dots, scales;  // words
  __host__ __device__ StepLayout(const Cut& c, int scale_bits) {
    dot_stride = c.groups | 1;
    scale_stride = (c.groups * scale_bits / 32) | 1;
    dots = c.rows * kMvWarps * dot_stride;
    scales = c.rows * kMvWarps * scale_stride;
  }
  __host__ __device__ int words() const { return dots + 2 * scales; }
};
__host__ __device__ inline int scale_bits(const Matrix& m) { return width_of(m) == 0 ? 32 : m.kind == quant::FormatKind::Mxfp4 ? 8 : 16; }
__host__ __device__ inline std::size_t steps_offset(const Matrix& m) { return (quantized_bytes(m.cols, m.group) + 15) / 16 * 16; }
// Per row and group of a flat block: what is added times its factor, once (Mxfp4) or twice. An odd stride, as above.
__host__ __device__ inline std::size_t flat_step_bytes(const Matrix& m) {
  return static_cast<std::size_t>(m.flat_rows) * (groups_of(m.cols, m.group) | 1) * (m.kind == quant::FormatKind::Mxfp4 ? 8 : 16);
}
__host__ __device__ inline std::size_t flat_bytes(const Matrix& m) { return steps_offset(m) + 2 * flat_step_bytes(m); }
inline std::size_t matvec_bytes(const Matrix& m) {
  if (is_flat(m)) return flat_bytes(m);
  const bool any = width_of(m) == 0;
  return steps_offset(m) + static_cast<std::size_t>(any ? 0 : 2 * StepLayout(cut_of(m), scale_bits(m)).words()) * 4;
}

// f16 or bf16 bits as f32.
template <bool Bf16>
__device__ inline float factor_value(std::uint16_t bits) {
  if constexpr (Bf16) return __uint_as_float(static_cast<unsigned>(bits) << 16);
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

// An expert's bias goes with it where its matrix does.
__device__ inline void leave_bias(const float* bias, int row, std::int64_t away) {
  *reinterpret_cast<float*>(reinterpret_cast<std::byte*>(const_cast<float*>(bias + row)) + away) = bias[row];
}

// The activations that meet 16 bytes of codes.
template <Path P>
struct Activations {
  int4 a, b;
  __device__ Activations(const std::int8_t* x8, int cols, int c) {
    a = reinterpret_cast<const int4*>(x8)[c];
    if constexpr (P != Path::Byte) b = reinterpret_cast<const int4*>(x8 + cols / 2)[c];
  }
  __device__ int dot(const uint4& w) const {
    int s = 0;
    const unsigned words[4] = {w.x, w.y, w.z, w.w};
    const int xa[4] = {a.x, a.y, a.z, a.w}, xb[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (P == Path::Byte) {
        asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(s) : "r"(words[i]), "r"(xa[i]));
      } else if constexpr (P == Path::Nibble) {
        s = __dp4a(static_cast<int>(words[i] & 0x0f0f0f0fu), xa[i], s);
        s = __dp4a(static_cast<int>(words[i] >> 4 & 0x0f0f0f0fu), xb[i], s);
      } else {
        unsigned low, high;
        expand_mx(words[i], low, high);
        s = __dp4a(static_cast<int>(low), xa[i], s);
        s = __dp4a(static_cast<int>(high), xb[i], s);
      }
    }
    return s;
  }
};

}  // namespace moeflux::backend::cuda
