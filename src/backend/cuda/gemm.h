// Matrix times many tokens. Only for CUDA sources.
//
// Fast precision: int8 tensor cores make the integer dot products of a group, which are exact, then every output gets
// its two fmas a group in ascending order: the same bits as matvec.h. Exact precision: sixteen small products side by
// side, one a lane, each thread a tile of 8 x 8 outputs of its lane; the tree adds the lanes at the end.
#pragma once

#include "backend/cuda/matvec.h"

namespace moeflux::backend::cuda {

inline constexpr int kTileRows = 128, kTileTokens = 64, kTileK = 64;
inline constexpr int kTileStride = kTileK + 16;  // bytes between rows of a tile: eight rows of four words hit all banks
inline constexpr int kGemmThreads = 256;

// Quantized activations in global memory: in natural order, or `paired` for packed_nibbles.
struct QuantizedRows {
  const std::int8_t* x8;  // [n, cols]
  const float *d, *sx;    // [n, cols / group]
};

struct GemmTile {
  Matrix w;
  QuantizedRows x;
  const std::int32_t* rows;   // token of each entry; null: the entry itself
  const std::int32_t* slots;  // row of y of each entry; null: the entry itself
  int first, n;               // entries of this tile: [first, first + n)
  const float* bias;
  float* y;
  std::int64_t y_stride;
};

struct alignas(16) GemmShared {
  std::uint8_t a[2][kTileRows * kTileStride];
  std::uint8_t b[2][kTileTokens * kTileStride];
  float s[2][2][kTileRows], bd[2][2][kTileRows];      // scale and bias by group of the step (32-wide groups: two)
  float d[2][2][kTileTokens], sx[2][2][kTileTokens];
};

template <bool Signed>
__device__ inline void mma(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (Signed)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 32 codes of row `row` from column k on, as bytes; zeros outside of the matrix.
__device__ inline void unpack32(const Matrix& m, int row, int k, unsigned (&out)[8]) {
  if (row >= m.rows || k >= m.cols) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = 0;
    return;
  }
  const std::uint8_t* p = m.data + static_cast<std::size_t>(row) * m.row_bytes;
  if (m.bits == 4 && m.aligned) {
    const uint4 w = *reinterpret_cast<const uint4*>(p + k / 2);
    const unsigned words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (m.kind == quant::FormatKind::Mxfp4) {
        expand_mx(words[i], out[2 * i], out[2 * i + 1]);
      } else {
        const unsigned even = words[i] & 0x0f0f0f0fu, odd = words[i] >> 4 & 0x0f0f0f0fu;
        out[2 * i] = __byte_perm(even, odd, 0x5140);
        out[2 * i + 1] = __byte_perm(even, odd, 0x7362);
      }
    }
  } else if (m.bits == 8 && m.aligned) {
    const uint4 a = *reinterpret_cast<const uint4*>(p + k), b = *reinterpret_cast<const uint4*>(p + k + 16);
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int c[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned code = code_at(p, m.bits, k + 4 * i + j);
        c[j] = m.kind == quant::FormatKind::Mxfp4 ? e2m1_twice(code) : static_cast<int>(code);
      }
      out[i] = pack4(c[0], c[1], c[2], c[3]);
    }
  }
}

// What a thread carries from global to shared memory for one step.
struct GemmStep {
  unsigned a[8];
  uint4 b;
  float s, bias, d, sx;
};

__device__ inline void gemm_fetch(const GemmTile& t, int row0, int k0, GemmStep& st) {
  const int tid = threadIdx.x, n_groups = t.w.cols / t.w.group;
  unpack32(t.w, row0 + tid / 2, k0 + tid % 2 * 32, st.a);
  const int entry = tid / 4, k = k0 + tid % 4 * 16;
  const bool live = entry < t.n;
  const std::int64_t token = live ? (t.rows != nullptr ? t.rows[t.first + entry] : t.first + entry) : 0;
  st.b = live && k < t.w.cols ? *reinterpret_cast<const uint4*>(t.x.x8 + token * t.w.cols + k) : uint4{0, 0, 0, 0};
  // Scales: thread r < 128 of group 0, the others of group 1 of the step.
  const int g = k0 / t.w.group + (t.w.group == 32 ? tid / kTileRows : 0), row = row0 + tid % kTileRows;
  const bool has = row < t.w.rows && g < n_groups;
  st.s = has ? scale_of(t.w, row, g) : 0.0f;
  st.bias = has && t.w.kind == quant::FormatKind::Affine ? bias_of(t.w, row, g) : 0.0f;
  // d and sx: 64 tokens x 2 groups by the first 128 threads.
  const int e = tid % kTileTokens, gd = k0 / t.w.group + (t.w.group == 32 ? tid / kTileTokens % 2 : 0);
  const bool known = e < t.n && gd < n_groups;
  const std::int64_t from = known ? (t.rows != nullptr ? t.rows[t.first + e] : t.first + e) : 0;
  st.d = known ? t.x.d[from * n_groups + gd] : 0.0f;
  st.sx = known ? t.x.sx[from * n_groups + gd] : 0.0f;
}

__device__ inline void gemm_put(GemmShared& sh, int buffer, const GemmStep& st) {
  const int tid = threadIdx.x;
  auto* a = reinterpret_cast<uint4*>(&sh.a[buffer][tid / 2 * kTileStride + tid % 2 * 32]);
  a[0] = {st.a[0], st.a[1], st.a[2], st.a[3]};
  a[1] = {st.a[4], st.a[5], st.a[6], st.a[7]};
  *reinterpret_cast<uint4*>(&sh.b[buffer][tid / 4 * kTileStride + tid % 4 * 16]) = st.b;
  sh.s[buffer][tid / kTileRows][tid % kTileRows] = st.s;
  sh.bd[buffer][tid / kTileRows][tid % kTileRows] = st.bias;
  if (tid < 2 * kTileTokens) {
    sh.d[buffer][tid / kTileTokens][tid % kTileTokens] = st.d;
    sh.sx[buffer][tid / kTileTokens][tid % kTileTokens] = st.sx;
  }
}

// A warp's 32 x 32 part of the tile: integer sums of the group under way and the outputs so far.
struct WarpTile {
  int c[2][4][4];
  float acc[2][4][4];
};

// One group is complete: acc = fma(idot, s * d, acc), acc = fma(sx, b * d, acc).
__device__ inline void finish_group(const GemmShared& sh, int buffer, int g, int wm, int wn, bool affine, WarpTile& w) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int n = wn + j * 8 + lane % 4 * 2;
    const float2 d = *reinterpret_cast<const float2*>(&sh.d[buffer][g][n]), sx = *reinterpret_cast<const float2*>(&sh.sx[buffer][g][n]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = wm + i * 16 + half * 8 + lane / 4;
        const float s = sh.s[buffer][g][row], b = sh.bd[buffer][g][row];
        float &y0 = w.acc[i][j][half * 2], &y1 = w.acc[i][j][half * 2 + 1];
        int &c0 = w.c[i][j][half * 2], &c1 = w.c[i][j][half * 2 + 1];
        y0 = math::fma(static_cast<float>(c0), s * d.x, y0);
        y1 = math::fma(static_cast<float>(c1), s * d.y, y1);
        if (affine) {
          y0 = math::fma(sx.x, b * d.x, y0);
          y1 = math::fma(sx.y, b * d.y, y1);
        }
        c0 = 0, c1 = 0;
      }
    }
  }
}

template <bool Signed>
__device__ inline void multiply32(const GemmShared& sh, int buffer, int k, int wm, int wn, WarpTile& w) {
  const int lane = threadIdx.x % kWarp;
  unsigned a[2][4], b[4][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint8_t* p = &sh.a[buffer][(wm + i * 16 + lane / 4) * kTileStride + k + lane % 4 * 4];
    a[i][0] = *reinterpret_cast<const unsigned*>(p);
    a[i][1] = *reinterpret_cast<const unsigned*>(p + 8 * kTileStride);
    a[i][2] = *reinterpret_cast<const unsigned*>(p + 16);
    a[i][3] = *reinterpret_cast<const unsigned*>(p + 8 * kTileStride + 16);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint8_t* p = &sh.b[buffer][(wn + j * 8 + lane / 4) * kTileStride + k + lane % 4 * 4];
    b[j][0] = *reinterpret_cast<const unsigned*>(p);
    b[j][1] = *reinterpret_cast<const unsigned*>(p + 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) mma<Signed>(w.c[i][j], a[i], b[j]);
}

__device__ inline void store_tile(const GemmTile& t, int row0, int wm, int wn, const WarpTile& w) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int n = wn + j * 8 + lane % 4 * 2 + e;
      if (n >= t.n) continue;
      float* y = t.y + (t.slots != nullptr ? t.slots[t.first + n] : t.first + n) * t.y_stride;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row0 + wm + i * 16 + half * 8 + lane / 4;
          const float v = w.acc[i][j][half * 2 + e];
          if (row < t.w.rows) y[row] = t.bias != nullptr ? v + t.bias[row] : v;
        }
    }
}

// 128 rows from row0 on times the tile's tokens. All 256 threads.
template <bool Signed>
__device__ inline void gemm_tile(GemmShared& sh, const GemmTile& t, int row0) {
  const int warp = threadIdx.x / kWarp, wm = warp / 2 * 32, wn = warp % 2 * 32;
  const int group = t.w.group, n_groups = t.w.cols / group;
  const bool affine = t.w.kind == quant::FormatKind::Affine;
  WarpTile w{};
  GemmStep st;
  gemm_fetch(t, row0, 0, st);
  gemm_put(sh, 0, st);
  __syncthreads();
  int buffer = 0;
  for (int k0 = 0; k0 < t.w.cols; k0 += kTileK) {
    const bool more = k0 + kTileK < t.w.cols;
    if (more) gemm_fetch(t, row0, k0 + kTileK, st);
    multiply32<Signed>(sh, buffer, 0, wm, wn, w);
    if (group == 32) finish_group(sh, buffer, 0, wm, wn, affine, w);
    multiply32<Signed>(sh, buffer, 32, wm, wn, w);
    if (group == 32) {
      if (k0 / 32 + 1 < n_groups) finish_group(sh, buffer, 1, wm, wn, affine, w);
    } else if ((k0 + kTileK) % group == 0) {
      finish_group(sh, buffer, 0, wm, wn, affine, w);
    }
    if (more) {
      buffer ^= 1;
      gemm_put(sh, buffer, st);
      __syncthreads();
    }
  }
  store_tile(t, row0, wm, wn, w);
}

// ---- 4-bit codes: packed to the multiplier
//
// A tile's codes and activations come in steps of 64 columns through kStages buffers; codes stay packed in shared memory.
// A thread's share of a row and step is one word pair: the low and high nibbles of a word are codes 0, 2, 4, 6 and
// 1, 3, 5, 7, and activations lie in that order (quantize_rows with `paired`), so masks make the operands. Which columns
// meet in one instruction does not matter: the sum over a group is an integer.

inline constexpr int kStages = 4;
inline constexpr int kScaleGroups = 32;  // groups whose scales are in shared memory at a time

struct alignas(16) NibbleShared {
  std::uint8_t a[kStages][kTileRows * 32];
  std::int8_t b[kStages][kTileTokens * 64];
  unsigned sb[kTileRows][kScaleGroups + 1];           // scale | bias << 16
  float2 dx[kTileTokens][kScaleGroups + 1];           // d, sum
};

__device__ inline void copy16(void* to, const void* from, bool live) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(live ? 16 : 0) : "memory");
}

struct NibbleSource {
  const std::uint8_t* a;
  const std::int8_t* b;
  bool a_live, b_live;
};

__device__ inline void nibble_fetch(NibbleShared& sh, const GemmTile& t, const NibbleSource& from, int step) {
  const int tid = threadIdx.x, k = step * kTileK;
  const bool a_live = from.a_live && k + tid % 2 * 32 < t.w.cols, b_live = from.b_live && k + tid % 4 * 16 < t.w.cols;
  copy16(&sh.a[step % kStages][tid * 16], a_live ? from.a + k / 2 : t.w.data, a_live);
  copy16(&sh.b[step % kStages][tid * 16], b_live ? reinterpret_cast<const void*>(from.b + k) : t.w.data, b_live);
}

// Scales of groups [g0, g0 + kScaleGroups) of the tile's rows and tokens.
__device__ inline void nibble_scales(NibbleShared& sh, const GemmTile& t, int row0, int g0) {
  const int n_groups = t.w.cols / t.w.group, n = min(kScaleGroups, n_groups - g0);
  for (int e = threadIdx.x; e < kTileRows * kScaleGroups; e += kGemmThreads) {
    const int r = e / kScaleGroups, g = e % kScaleGroups;
    if (g >= n) continue;
    const std::size_t at = static_cast<std::size_t>(min(row0 + r, t.w.rows - 1)) * t.w.scale_row_bytes;
    sh.sb[r][g] = reinterpret_cast<const std::uint16_t*>(t.w.scales + at)[g0 + g] |
                  static_cast<unsigned>(reinterpret_cast<const std::uint16_t*>(t.w.biases + at)[g0 + g]) << 16;
  }
  for (int e = threadIdx.x; e < kTileTokens * kScaleGroups; e += kGemmThreads) {
    const int i = e / kScaleGroups, g = e % kScaleGroups;
    if (g >= n || i >= t.n) continue;
    const std::int64_t token = t.rows != nullptr ? t.rows[t.first + i] : t.first + i;
    sh.dx[i][g] = {t.x.d[token * n_groups + g0 + g], t.x.sx[token * n_groups + g0 + g]};
  }
}

template <bool Bf16>
__device__ inline void nibble_finish(const NibbleShared& sh, int g, int wm, int wn, WarpTile& w) {
  const int lane = threadIdx.x % kWarp;
  float s[4], b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned raw = sh.sb[wm + i * 8 + lane / 4][g];
    s[i] = Bf16 ? __uint_as_float(raw << 16) : f16_to_f32(static_cast<std::uint16_t>(raw));
    b[i] = Bf16 ? __uint_as_float(raw & 0xffff0000u) : f16_to_f32(static_cast<std::uint16_t>(raw >> 16));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2 dx = sh.dx[wn + j * 8 + lane % 4 * 2 + e][g];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& y = w.acc[i / 2][j][i % 2 * 2 + e];
        int& c = w.c[i / 2][j][i % 2 * 2 + e];
        y = math::fma(static_cast<float>(c), s[i] * dx.x, y);
        y = math::fma(dx.y, b[i] * dx.x, y);
        c = 0;
      }
    }
  }
}

// Columns of a step: 64 (one word pair a thread), or the half `half` of 32 (one word) where groups are that small.
__device__ inline void nibble_multiply64(const NibbleShared& sh, int stage, int wm, int wn, WarpTile& w) {
  const int lane = threadIdx.x % kWarp;
  uint2 a[4];
  uint4 b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const uint2*>(&sh.a[stage][(wm + i * 8 + lane / 4) * 32 + lane % 4 * 8]);
#pragma unroll
  for (int j = 0; j < 4; ++j) b[j] = *reinterpret_cast<const uint4*>(&sh.b[stage][(wn + j * 8 + lane / 4) * 64 + lane % 4 * 16]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint2 r0 = a[2 * i], r1 = a[2 * i + 1];
    const unsigned a0[4] = {r0.x & 0x0f0f0f0fu, r1.x & 0x0f0f0f0fu, r0.x >> 4 & 0x0f0f0f0fu, r1.x >> 4 & 0x0f0f0f0fu};
    const unsigned a1[4] = {r0.y & 0x0f0f0f0fu, r1.y & 0x0f0f0f0fu, r0.y >> 4 & 0x0f0f0f0fu, r1.y >> 4 & 0x0f0f0f0fu};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const unsigned b0[2] = {b[j].x, b[j].y}, b1[2] = {b[j].z, b[j].w};
      mma<true>(w.c[i][j], a0, b0);
      mma<true>(w.c[i][j], a1, b1);
    }
  }
}

__device__ inline void nibble_multiply32(const NibbleShared& sh, int stage, int half, int wm, int wn, WarpTile& w) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned r0 = *reinterpret_cast<const unsigned*>(&sh.a[stage][(wm + i * 16 + lane / 4) * 32 + half * 16 + lane % 4 * 4]);
    const unsigned r1 = *reinterpret_cast<const unsigned*>(&sh.a[stage][(wm + i * 16 + 8 + lane / 4) * 32 + half * 16 + lane % 4 * 4]);
    const unsigned a[4] = {r0 & 0x0f0f0f0fu, r1 & 0x0f0f0f0fu, r0 >> 4 & 0x0f0f0f0fu, r1 >> 4 & 0x0f0f0f0fu};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint2 x = *reinterpret_cast<const uint2*>(&sh.b[stage][(wn + j * 8 + lane / 4) * 64 + half * 32 + lane % 4 * 8]);
      const unsigned b[2] = {x.x, x.y};
      mma<true>(w.c[i][j], a, b);
    }
  }
}

// Which matrices nibble_tile takes.
__host__ __device__ inline bool packed_nibbles(const Matrix& m) {
  return m.kind == quant::FormatKind::Affine && m.bits == 4 && m.aligned && m.scale_dtype != DType::F32;
}

template <bool Bf16>
__device__ inline void nibble_tile(NibbleShared& sh, const GemmTile& t, int row0) {
  const int warp = threadIdx.x / kWarp, wm = warp / 2 * 32, wn = warp % 2 * 32, tid = threadIdx.x;
  const int group = t.w.group, n_steps = (t.w.cols + kTileK - 1) / kTileK;
  NibbleSource from;
  from.a_live = row0 + tid / 2 < t.w.rows, from.b_live = tid / 4 < t.n;
  from.a = t.w.data + static_cast<std::size_t>(from.a_live ? row0 + tid / 2 : 0) * t.w.row_bytes + tid % 2 * 16;
  const std::int64_t token = from.b_live ? (t.rows != nullptr ? t.rows[t.first + tid / 4] : t.first + tid / 4) : 0;
  from.b = t.x.x8 + token * t.w.cols + tid % 4 * 16;
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < n_steps) nibble_fetch(sh, t, from, s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  WarpTile w{};
  for (int step = 0; step < n_steps; ++step) {
    const int g = step * kTileK / group;
    if (step * kTileK % (group * kScaleGroups) == 0) {
      __syncthreads();  // the walk over the groups before has ended
      nibble_scales(sh, t, row0, g);
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    if (step + kStages - 1 < n_steps) nibble_fetch(sh, t, from, step + kStages - 1);
    asm volatile("cp.async.commit_group;" ::: "memory");
    const int stage = step % kStages, at = g % kScaleGroups;
    if (group == 32) {
      nibble_multiply32(sh, stage, 0, wm, wn, w);
      nibble_finish<Bf16>(sh, at, wm, wn, w);
      if (step * kTileK + 32 < t.w.cols) {
        nibble_multiply32(sh, stage, 1, wm, wn, w);
        nibble_finish<Bf16>(sh, at + 1, wm, wn, w);
      }
    } else {
      nibble_multiply64(sh, stage, wm, wn, w);
      if ((step + 1) * kTileK % group == 0) nibble_finish<Bf16>(sh, at, wm, wn, w);
    }
  }
  store_tile(t, row0, wm, wn, w);
}

// ---- exact

inline constexpr int kExactTile = 32;  // rows and tokens of a block
inline constexpr int kExactK = 64;     // columns of a step

struct ExactTile {
  Matrix w;
  const float* x;
  std::int64_t x_stride;
  const std::int32_t* rows;
  const std::int32_t* slots;
  int first, n;
  const float* bias;
  float* y;
  std::int64_t y_stride;
};

// Strides: eight rows apart is half the banks away, so the two halves of a warp do not meet.
struct alignas(16) ExactShared {
  float w[kExactTile][kExactK + 4];  // one row for both halves
  float x[kExactTile][kExactK + 2];
};

// Sums over the sixteen lanes of a warp's half, v[64] each: thread l keeps the four outputs 4 l' with l' its number in
// bit-reversed order; every addition is that of the tree.
template <int N, int Values>
__device__ inline void tree_level(float (&v)[Values], int lane, int step) {
  const bool upper = (lane & step) != 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float give = upper ? v[i] : v[i + N], keep = upper ? v[i + N] : v[i];
    v[i] = keep + __shfl_xor_sync(kAll, give, step);
  }
}
__device__ inline void tree_scatter(float (&v)[64], int lane) {
  tree_level<32>(v, lane, 8);
  tree_level<16>(v, lane, 4);
  tree_level<8>(v, lane, 2);
  tree_level<4>(v, lane, 1);
}
// The first of the four outputs that tree_scatter leaves in thread `lane`.
__device__ inline int scattered_at(int lane) { return (lane & 8 ? 32 : 0) + (lane & 4 ? 16 : 0) + (lane & 2 ? 8 : 0) + (lane & 1 ? 4 : 0); }

__device__ inline void exact_tile(ExactShared& sh, const ExactTile& t, int row0) {
  const int tid = threadIdx.x, lane = tid & 15, part = tid / 16;
  const int r0 = part / 4 * 8, n0 = part % 4 * 8;
  const float* plain = t.w.kind == quant::FormatKind::F32 ? reinterpret_cast<const float*>(t.w.data) : nullptr;
  const bool vectors = plain != nullptr && t.w.cols % 4 == 0 && t.x_stride % 4 == 0 && (reinterpret_cast<std::uintptr_t>(plain) | reinterpret_cast<std::uintptr_t>(t.x)) % 16 == 0;
  float acc[64] = {};
  for (int k0 = 0; k0 < t.w.cols; k0 += kExactK) {
    __syncthreads();
    if (vectors && k0 + kExactK <= t.w.cols) {
#pragma unroll
      for (int e = tid; e < kExactTile * kExactK / 4; e += kGemmThreads) {
        const int i = e / (kExactK / 4), k = e % (kExactK / 4) * 4;
        const float4 zero{0.0f, 0.0f, 0.0f, 0.0f};
        *reinterpret_cast<float4*>(&sh.w[i][k]) =
            row0 + i < t.w.rows ? *reinterpret_cast<const float4*>(plain + static_cast<std::size_t>(row0 + i) * t.w.cols + k0 + k) : zero;
        const std::int64_t token = i < t.n ? (t.rows != nullptr ? t.rows[t.first + i] : t.first + i) : 0;
        const float4 v = i < t.n ? *reinterpret_cast<const float4*>(t.x + token * t.x_stride + k0 + k) : zero;
        *reinterpret_cast<float2*>(&sh.x[i][k]) = {v.x, v.y};
        *reinterpret_cast<float2*>(&sh.x[i][k + 2]) = {v.z, v.w};
      }
    } else
    for (int e = tid; e < kExactTile * kExactK; e += kGemmThreads) {
      const int i = e / kExactK, k = k0 + e % kExactK;
      sh.w[i][e % kExactK] = row0 + i < t.w.rows && k < t.w.cols ? (plain ? plain[static_cast<std::size_t>(row0 + i) * t.w.cols + k] : weight_at(t.w, row0 + i, k)) : 0.0f;
      const std::int64_t token = i < t.n ? (t.rows != nullptr ? t.rows[t.first + i] : t.first + i) : 0;
      sh.x[i][e % kExactK] = i < t.n && k < t.w.cols ? t.x[token * t.x_stride + k] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kExactK; k += 16) {
      if (k0 + k >= t.w.cols) break;
      float a[8], b[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] = sh.w[r0 + i][k + lane], b[i] = sh.x[n0 + i][k + lane];
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i * 8 + j] = math::fma(b[j], a[i], acc[i * 8 + j]);
    }
  }
  tree_scatter(acc, lane);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int at = scattered_at(lane) + e, row = row0 + r0 + at / 8, n = n0 + at % 8;
    if (row >= t.w.rows || n >= t.n) continue;
    float* y = t.y + (t.slots != nullptr ? t.slots[t.first + n] : t.first + n) * t.y_stride;
    y[row] = t.bias != nullptr ? acc[e] + t.bias[row] : acc[e];
  }
}

}  // namespace moeflux::backend::cuda
