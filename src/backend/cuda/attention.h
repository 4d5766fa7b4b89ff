// Attention: what its kernels share. A block takes the query rows (tokens and heads of one kv head) that share keys and walks the tiles.
// Only for CUDA sources.
//
// Scores are sixteen small products, one a lane of dot16, in tiles of 8 x 8 per thread; value sums are one chain of fmas
// per element in ascending keys. All in f32 on the plain cores: the formula's order of additions leaves the tensor
// cores nothing to do.
#pragma once

#include <cuda_pipeline.h>

#include <algorithm>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/matmul.h"

namespace moeflux::backend::cuda {

inline constexpr int kTile = static_cast<int>(Attention::kTile);
inline constexpr int kGroupKeys = static_cast<int>(Attention::kTile * Attention::kGroupTiles);
inline constexpr int kAttentionThreads = 256;

struct AttentionArgs {
  const float* q;
  const std::byte *k, *v;
  const float* sinks;
  float* y;
  float* scores;    // few tokens: scaled scores [rows, n_groups * 1024]
  float* partials;  // not null: a block per group of keys, whose m, l and acc go here: [rows, groups, vd + 2]
  std::int64_t q_token, q_head, k_row, k_head, v_row, v_head, y_token, y_head;  // strides in elements
  int n_tokens, n_heads, shared_heads, hd, vd, n_groups;
  CudaStream::Position pos;
  std::int64_t window;
  float scale;
  bool f16, q_vectors, k_vectors, v_vectors;  // rows of queries, keys, values start at multiples of four elements' size
};

__device__ inline float4 load4(const std::byte* base, std::int64_t at, bool f16, bool vectors, int n) {
  float4 out{0.0f, 0.0f, 0.0f, 0.0f};
  if (f16) {
    const auto* p = reinterpret_cast<const std::uint16_t*>(base) + at;
    if (vectors && n >= 4) {
      const ushort4 h = *reinterpret_cast<const ushort4*>(p);
      return {f16_to_f32(h.x), f16_to_f32(h.y), f16_to_f32(h.z), f16_to_f32(h.w)};
    }
    if (n > 0) out.x = f16_to_f32(p[0]);
    if (n > 1) out.y = f16_to_f32(p[1]);
    if (n > 2) out.z = f16_to_f32(p[2]);
    if (n > 3) out.w = f16_to_f32(p[3]);
    return out;
  }
  const float* p = reinterpret_cast<const float*>(base) + at;
  if (vectors && n >= 4) return *reinterpret_cast<const float4*>(p);
  if (n > 0) out.x = p[0];
  if (n > 1) out.y = p[1];
  if (n > 2) out.z = p[2];
  if (n > 3) out.w = p[3];
  return out;
}

// v[i * 8 + j] += x[i] * y[j].
__device__ inline void add_products(const float (&x)[8], const float (&y)[8], float (&v)[64]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) v[i * 8 + j] = math::fma(y[j], x[i], v[i * 8 + j]);
}

// Rows: query rows of a block. Dims: room for values (vd <= Dims).
template <int Rows, int Dims>
struct Shape {
  static constexpr int kKeys = Rows == 32 ? 32 : 64;       // keys whose scores are computed together
  static constexpr int kChunk = Rows == 32 ? 128 : 64;     // dimensions of a key in shared memory at a time
  static constexpr int kKeyStride = kChunk + 4;
  static constexpr int kScoreStride = Rows + 4;
  static constexpr int kStage = kKeys * kKeyStride;        // floats: keys, later values
  static constexpr int kValueKeys = kStage / Dims < kTile ? kStage / Dims / 8 * 8 : kTile;
  static constexpr int kPerThread = Rows * Dims / (4 * kAttentionThreads);  // query rows of a thread in the value sums
  static constexpr int kPerRow = kAttentionThreads / Rows;          // threads of a row in the softmax: 8 or 16
  static constexpr bool kDouble = Rows == 32 && Dims == 256;  // two stages: one is filled while the other is used
  static __host__ __device__ int q_stride(int hd) { return (hd + 15) / 16 * 16 + 2; }  // 8 rows apart: half the banks away
  static __host__ __device__ std::size_t bytes(int hd, bool total) {
    const int q = (Rows * q_stride(hd) + 3) / 4 * 4;
    return static_cast<std::size_t>(q + kStage + kTile * kScoreStride + 8 * Rows + (total ? Rows * Dims : 0) + (kDouble ? kStage : 0)) * 4;
  }
};

template <int Rows, int Dims>
struct Block {
  using S = Shape<Rows, Dims>;
  const AttentionArgs& a;
  float *q, *stage, *scores, *m, *l, *c, *total_m, *total_l, *total, *second;
  int* range;     // [Rows][2] keys of each row
  int kv, r0, n;  // kv head, first row, rows
  float acc[S::kPerThread][4];

  __device__ Block(const AttentionArgs& args, float* memory) : a(args) {
    q = memory;
    stage = q + (Rows * S::q_stride(a.hd) + 3) / 4 * 4;
    scores = stage + S::kStage;
    m = scores + kTile * S::kScoreStride;
    l = m + Rows, c = l + Rows, total_m = c + Rows, total_l = total_m + Rows;
    range = reinterpret_cast<int*>(total_l + Rows);
    second = reinterpret_cast<float*>(range + 3 * Rows);
    total = second + (S::kDouble ? S::kStage : 0);
  }

  __device__ int token(int r) const { return (r0 + r) / a.shared_heads; }
  __device__ int head(int r) const { return kv * a.shared_heads + (r0 + r) % a.shared_heads; }
  __device__ int dim0() const { return threadIdx.x % (Dims / 4) * 4; }
  __device__ int row_group() const { return threadIdx.x / (Dims / 4) * S::kPerThread; }

  __device__ void load_queries() {
    const int stride = S::q_stride(a.hd), padded = (a.hd + 15) / 16 * 16;
    if (a.q_vectors) {  // loads of a batch are under way together
      constexpr int kBatch = 4;
      const int per_row = padded / 4;
#pragma unroll 1
      for (int e0 = threadIdx.x; e0 < Rows * per_row; e0 += kBatch * kAttentionThreads) {
        float4 v[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int e = e0 + k * kAttentionThreads, r = e / per_row, d = (e - r * per_row) * 4;
          v[k] = float4{0.0f, 0.0f, 0.0f, 0.0f};
          if (r < n && d < a.hd) v[k] = *reinterpret_cast<const float4*>(a.q + token(r) * a.q_token + head(r) * a.q_head + d);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int e = e0 + k * kAttentionThreads, r = e / per_row, d = (e - r * per_row) * 4;
          if (r >= Rows) break;
          float* to = &q[r * stride + d];
          to[0] = v[k].x, to[1] = v[k].y, to[2] = v[k].z, to[3] = v[k].w;
        }
      }
    } else {
      for (int e = threadIdx.x; e < Rows * padded; e += kAttentionThreads) {
        const int r = e / padded, d = e % padded;
        q[r * stride + d] = r < n && d < a.hd ? a.q[token(r) * a.q_token + head(r) * a.q_head + d] : 0.0f;
      }
    }
    for (int r = threadIdx.x; r < Rows; r += kAttentionThreads) {
      const std::int64_t p = static_cast<std::int64_t>(a.pos.get()) + token(r);
      range[2 * r] = r < n ? static_cast<int>(a.window > 0 && p - a.window + 1 > 0 ? p - a.window + 1 : 0) : 0;
      range[2 * r + 1] = r < n ? static_cast<int>(p) + 1 : 0;
    }
  }

  __device__ void reset() {
    for (int r = threadIdx.x; r < Rows; r += kAttentionThreads) m[r] = minus_inf(), l[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kPerThread; ++i)
#pragma unroll
      for (int d = 0; d < 4; ++d) acc[i][d] = 0.0f;
  }

  // Lanes' products of eight keys, k0 behind `first` of the tile, and eight query rows, added up.
  __device__ void put_scores(float (&v)[64], int lane, int first, int k0, int q0) {
    tree_scatter(v, lane);
    const int at = scattered_at(lane), key = first + k0 + at / 8;
    *reinterpret_cast<float4*>(&scores[key * S::kScoreStride + q0 + at % 8]) = float4{v[0], v[1], v[2], v[3]};
  }

  // Scores of keys [first, first + kKeys), unscaled, to scores[key][row].
  __device__ void dot_keys(int base, int first, int key_end) {
    const int lane = threadIdx.x & 15, part = threadIdx.x / 16;
    constexpr int kQueryTiles = Rows / 8;
    const int q0 = part % kQueryTiles * 8, k0 = part / kQueryTiles * 8, stride = S::q_stride(a.hd);
    float v[64] = {};
    for (int d0 = 0; d0 < a.hd; d0 += S::kChunk) {
      __syncthreads();
      for (int e = threadIdx.x; e < S::kKeys * (S::kChunk / 4); e += kAttentionThreads) {
        const int key = e / (S::kChunk / 4), d = e % (S::kChunk / 4) * 4;
        float4 x{0.0f, 0.0f, 0.0f, 0.0f};
        if (first + key < key_end) x = load4(a.k, (first + key) * a.k_row + kv * a.k_head + d0 + d, a.f16, a.k_vectors, a.hd - d0 - d);
        *reinterpret_cast<float4*>(&stage[key * S::kKeyStride + d]) = x;
      }
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < S::kChunk; d += 16) {
        if (d0 + d >= a.hd) break;
        float x[8], y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = stage[(k0 + i) * S::kKeyStride + d + lane], y[i] = q[(q0 + i) * stride + d0 + d + lane];
        add_products(x, y, v);
      }
    }
    put_scores(v, lane, first - base, k0, q0);
  }

  // dot_keys() of a tile whose keys are in shared memory as they are.
  __device__ void dot_whole(const float* keys, int key_stride) {
    const int lane = threadIdx.x & 15, part = threadIdx.x / 16;
    constexpr int kQueryTiles = Rows / 8;
    const int q0 = part % kQueryTiles * 8, k0 = part / kQueryTiles * 8, stride = S::q_stride(a.hd);
    float v[64] = {};
#pragma unroll 2
    for (int d = 0; d < a.hd; d += 16) {
      float x[8], y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = keys[(k0 + i) * key_stride + d + lane], y[i] = q[(q0 + i) * stride + d + lane];
      add_products(x, y, v);
    }
    put_scores(v, lane, 0, k0, q0);
  }

  // ---- where rows are 16 bytes wide and need no conversion, they are copied to one stage while the other is computed with
  __device__ bool copies() const { return S::kDouble && !a.f16 && a.k_vectors && a.v_vectors && a.hd % 16 == 0 && a.vd % 4 == 0; }
  __device__ float* stage_of(int step) const { return step & 1 ? second : stage; }

  static __device__ void copy16(float* to, const std::byte* base, std::int64_t at, bool there) {
    if (there)
      __pipeline_memcpy_async(to, reinterpret_cast<const float*>(base) + at, 16);
    else
      *reinterpret_cast<float4*>(to) = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  __device__ void copy_keys(int step, int base, int key_end, int n_chunks) {
    const int first = base + step / n_chunks * S::kKeys, d0 = step % n_chunks * S::kChunk;
    for (int e = threadIdx.x; e < S::kKeys * (S::kChunk / 4); e += kAttentionThreads) {
      const int key = e / (S::kChunk / 4), d = e % (S::kChunk / 4) * 4;
      copy16(&stage_of(step)[key * S::kKeyStride + d], a.k, (first + key) * a.k_row + kv * a.k_head + d0 + d, first + key < key_end && d0 + d < a.hd);
    }
    __pipeline_commit();
  }
  __device__ void copy_values(int step, int base, int n_keys) {
    const int j0 = step * S::kValueKeys;
    for (int e = threadIdx.x; e < S::kValueKeys * (Dims / 4); e += kAttentionThreads) {
      const int j = j0 + e / (Dims / 4), d = e % (Dims / 4) * 4;
      copy16(&stage_of(step)[(j - j0) * Dims + d], a.v, (base + j) * a.v_row + kv * a.v_head + d, j < n_keys && d < a.vd);
    }
    __pipeline_commit();
  }

  // dot_keys for the whole tile. The values' first step is on its way at the end.
  __device__ void dot_tile(int base, int key_end) {
    const int lane = threadIdx.x & 15, part = threadIdx.x / 16;
    constexpr int kQueryTiles = Rows / 8;
    const int q0 = part % kQueryTiles * 8, k0 = part / kQueryTiles * 8, stride = S::q_stride(a.hd);
    const int n_chunks = (a.hd + S::kChunk - 1) / S::kChunk, n_steps = kTile / S::kKeys * n_chunks;
    float v[64] = {};
    copy_keys(0, base, key_end, n_chunks);
    for (int step = 0; step < n_steps; ++step) {
      __pipeline_wait_prior(0);
      __syncthreads();  // this step's keys are there, and nobody uses the other stage any more
      if (step + 1 < n_steps)
        copy_keys(step + 1, base, key_end, n_chunks);
      else if ((n_steps & 1) == 0)
        copy_values(0, base, min(kTile, key_end - base));
      const float* keys = stage_of(step);
      const int d0 = step % n_chunks * S::kChunk;
#pragma unroll 4
      for (int d = 0; d < S::kChunk; d += 16) {
        if (d0 + d >= a.hd) break;
        float x[8], y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = keys[(k0 + i) * S::kKeyStride + d + lane], y[i] = q[(q0 + i) * stride + d0 + d + lane];
        add_products(x, y, v);
      }
      if (step % n_chunks + 1 < n_chunks) continue;
      put_scores(v, lane, step / n_chunks * S::kKeys, k0, q0);
#pragma unroll
      for (int i = 0; i < 64; ++i) v[i] = 0.0f;
    }
    if (n_steps & 1) {  // the stage of the values' first step was the last one in use
      __syncthreads();
      copy_values(0, base, min(kTile, key_end - base));
    }
  }

  // Scores of the tile to probabilities; m, l and the factor c of every row. Rows without a key here stay as they are.
  __device__ void softmax_tile(int base) {
    const int r = threadIdx.x / S::kPerRow, part = threadIdx.x % S::kPerRow;
    const int j0 = max(range[2 * r], base) - base, j1 = min(range[2 * r + 1], base + kTile) - base;
    const bool has = j0 < j1;
    float top = m[r];
    float s[kTile / S::kPerRow];
#pragma unroll
    for (int i = 0; i < kTile / S::kPerRow; ++i) {
      const int j = i * S::kPerRow + part;
      s[i] = j >= j0 && j < j1 ? a.scale * scores[j * S::kScoreStride + r] : minus_inf();
      top = top > s[i] ? top : s[i];
    }
#pragma unroll
    for (int step = S::kPerRow / 2; step >= 1; step /= 2) {
      const float other = __shfl_xor_sync(kAll, top, step);
      top = top > other ? top : other;
    }
    float lane_sum[16 / S::kPerRow] = {};
#pragma unroll
    for (int i = 0; i < kTile / S::kPerRow; ++i) {
      const float p = has ? math::exp(s[i] - top) : 0.0f;
      scores[(i * S::kPerRow + part) * S::kScoreStride + r] = p;
      lane_sum[i % (16 / S::kPerRow)] = lane_sum[i % (16 / S::kPerRow)] + p;
    }
    float sum = lane_sum[0];
    if constexpr (S::kPerRow == 8) sum = sum + lane_sum[1];
#pragma unroll
    for (int step = S::kPerRow / 2; step >= 1; step /= 2) sum = sum + __shfl_xor_sync(kAll, sum, step);
    if (part == 0) {
      const float factor = !has ? 1.0f : m[r] == minus_inf() ? 0.0f : math::exp(m[r] - top);
      c[r] = factor;
      if (has) l[r] = math::fma(l[r], factor, sum), m[r] = top;
    }
  }

  __device__ void add_values(int base, int key_end) {
    const int d0 = dim0(), q0 = row_group(), n_keys = min(kTile, key_end - base);
#pragma unroll
    for (int i = 0; i < S::kPerThread; ++i) {
      const float factor = c[q0 + i];
#pragma unroll
      for (int d = 0; d < 4; ++d) acc[i][d] = acc[i][d] * factor;
    }
    if (copies()) {
      const int n_steps = (n_keys + S::kValueKeys - 1) / S::kValueKeys;
      for (int step = 0; step < n_steps; ++step) {
        __pipeline_wait_prior(0);
        __syncthreads();
        if (step + 1 < n_steps) copy_values(step + 1, base, n_keys);
        add_staged(stage_of(step), step * S::kValueKeys, min(S::kValueKeys, n_keys - step * S::kValueKeys), d0, q0);
      }
      __syncthreads();  // the next tile's keys go to either stage
      return;
    }
    for (int j0 = 0; j0 < n_keys; j0 += S::kValueKeys) {
      __syncthreads();
      for (int e = threadIdx.x; e < S::kValueKeys * (Dims / 4); e += kAttentionThreads) {
        const int j = j0 + e / (Dims / 4), d = e % (Dims / 4) * 4;
        float4 x{0.0f, 0.0f, 0.0f, 0.0f};
        if (j < n_keys) x = load4(a.v, (base + j) * a.v_row + kv * a.v_head + d, a.f16, a.v_vectors, a.vd - d);
        *reinterpret_cast<float4*>(&stage[(j - j0) * Dims + d]) = x;
      }
      __syncthreads();
      add_staged(stage, j0, min(S::kValueKeys, n_keys - j0), d0, q0);
    }
  }

  // Values of `count` keys of the tile from j0 on, in shared memory.
  __device__ void add_staged(const float* values, int j0, int count, int d0, int q0) {
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
      const float4 v = *reinterpret_cast<const float4*>(&values[j * Dims + d0]);
      float p[S::kPerThread];  // the same for a whole warp, in wide loads: shared memory is the bottleneck here
      const float* from = &scores[(j0 + j) * S::kScoreStride + q0];
      if constexpr (S::kPerThread >= 4) {
#pragma unroll
        for (int i = 0; i < S::kPerThread; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + i);
          p[i] = four.x, p[i + 1] = four.y, p[i + 2] = four.z, p[i + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < S::kPerThread; ++i) p[i] = from[i];
      }
#pragma unroll
      for (int i = 0; i < S::kPerThread; ++i) {
        acc[i][0] = math::fma(p[i], v.x, acc[i][0]);
        acc[i][1] = math::fma(p[i], v.y, acc[i][1]);
        acc[i][2] = math::fma(p[i], v.z, acc[i][2]);
        acc[i][3] = math::fma(p[i], v.w, acc[i][3]);
      }
    }
  }

  // The group's state into the total: taken for the first group of a row, merged after it, nothing before it.
  __device__ void merge_group(int group) {
    __syncthreads();
    const int d0 = dim0(), q0 = row_group();
#pragma unroll
    for (int i = 0; i < S::kPerThread; ++i) {
      const int r = q0 + i;
      if (r >= n || group < range[2 * r] / kGroupKeys || group > (range[2 * r + 1] - 1) / kGroupKeys) continue;
      float* t = total + r * Dims + d0;
      const bool first = group == range[2 * r] / kGroupKeys;
      const float top = total_m[r] > m[r] ? total_m[r] : m[r];
      const float ca = first ? 0.0f : math::exp(total_m[r] - top), cb = first ? 1.0f : math::exp(m[r] - top);
#pragma unroll
      for (int d = 0; d < 4; ++d) t[d] = first ? acc[i][d] : math::fma(acc[i][d], cb, t[d] * ca);
    }
    __syncthreads();
    for (int r = threadIdx.x; r < n; r += kAttentionThreads) {
      if (group < range[2 * r] / kGroupKeys || group > (range[2 * r + 1] - 1) / kGroupKeys) continue;
      if (group == range[2 * r] / kGroupKeys) {
        total_m[r] = m[r], total_l[r] = l[r];
        continue;
      }
      const float top = total_m[r] > m[r] ? total_m[r] : m[r];
      total_l[r] = math::fma(l[r], math::exp(m[r] - top), total_l[r] * math::exp(total_m[r] - top));
      total_m[r] = top;
    }
    __syncthreads();
    reset();
  }

  __device__ void write(const float* from_m, const float* from_l, bool from_total) {
    __syncthreads();
    const int d0 = dim0(), q0 = row_group();
#pragma unroll
    for (int i = 0; i < S::kPerThread; ++i) {
      const int r = q0 + i;
      if (r >= n) continue;
      float sum = from_l[r], factor = 1.0f;
      if (a.sinks != nullptr) {
        const float sink = a.sinks[head(r)], top = from_m[r] > sink ? from_m[r] : sink;
        factor = math::exp(from_m[r] - top);
        sum = math::fma(sum, factor, math::exp(sink - top));
      }
      const float inv = 1.0f / sum;
      float* y = a.y + token(r) * a.y_token + head(r) * a.y_head;
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        if (d0 + d >= a.vd) continue;
        const float x = from_total ? total[r * Dims + d0 + d] : acc[i][d];
        y[d0 + d] = (a.sinks != nullptr ? x * factor : x) * inv;
      }
    }
  }

  __device__ void write_partial(int group) {
    __syncthreads();
    const int d0 = dim0(), q0 = row_group();
#pragma unroll
    for (int i = 0; i < S::kPerThread; ++i) {
      const int r = q0 + i;
      if (r >= n) continue;
      const std::int64_t row = static_cast<std::int64_t>(token(r)) * a.n_heads + head(r);
      float* p = a.partials + (row * a.n_groups + group) * (a.vd + 2);
      if (d0 == 0) p[0] = m[r], p[1] = l[r];
#pragma unroll
      for (int d = 0; d < 4; ++d)
        if (d0 + d < a.vd) p[2 + d0 + d] = acc[i][d];
    }
  }
};

// Room for the groups' states of every query row.
void allocate_partials(CudaStream& s, AttentionArgs& a);
// Groups of every query row in order: merged, the sink, the division.
void merge_groups(CudaStream& s, const AttentionArgs& a);
// A few tokens: the keys are what there is to spread over the chip (ops_attention_few.cu).
void attend_few(CudaStream& s, AttentionArgs a);
// Its two halves where there are too few rows for that (ops_attention_rows.cu); false: there are enough, or shapes are others, and
// nothing was launched.
bool score_rows(CudaStream& s, const AttentionArgs& a);
bool value_rows(CudaStream& s, const AttentionArgs& a);

// Keys that need no conversion and are not too wide: 16 bytes at a time, all of a tile at once.
// The end of dimension d of a query row in one group of keys: its part where groups are merged afterwards, else with the sink and divided.
__device__ inline void put_value(const AttentionArgs& a, int token, int head, int group, int d, float m, float l, float acc) {
  if (a.partials != nullptr) {
    float* to = a.partials + ((static_cast<std::int64_t>(token) * a.n_heads + head) * a.n_groups + group) * (a.vd + 2);
    if (d == 0) to[0] = m, to[1] = l;
    to[2 + d] = acc;
    return;
  }
  if (a.sinks != nullptr) {
    const float best = m > a.sinks[head] ? m : a.sinks[head], c = math::exp(m - best);
    l = math::fma(l, c, math::exp(a.sinks[head] - best));
    acc = acc * c;
  }
  a.y[token * a.y_token + head * a.y_head + d] = acc * (1.0f / l);
}

inline constexpr int kWholeDims = 256;
inline bool whole_tile(const AttentionArgs& a) { return !a.f16 && a.k_vectors && a.hd % 16 == 0 && a.hd <= kWholeDims; }

}  // namespace moeflux::backend::cuda
