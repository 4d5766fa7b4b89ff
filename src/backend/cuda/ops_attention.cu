// Attention: a block takes the query rows (tokens and heads of one kv head) that share keys and walks the tiles.
//
// Scores are sixteen small products, one a lane of dot16, in tiles of 8 x 8 per thread; value sums are one chain of fmas
// per element in ascending keys. All in f32 on the plain cores: the formula's order of additions leaves the tensor
// cores nothing to do. (A latent cache in precision fast: ops_mla.cu.)
#include <cuda_pipeline.h>

#include <algorithm>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/matmul.h"
#include "backend/cuda/mla.h"

namespace moeflux::backend::cuda {
namespace {

constexpr int kTile = static_cast<int>(Attention::kTile);
constexpr int kGroupKeys = static_cast<int>(Attention::kTile * Attention::kGroupTiles);
constexpr int kThreads = 256;

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
  bool f16, k_vectors, v_vectors;  // rows of keys, values start at multiples of four elements' size
};

__device__ inline float minus_inf() { return -__int_as_float(0x7f800000); }

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

// Rows: query rows of a block. Dims: room for values (vd <= Dims).
template <int Rows, int Dims>
struct Shape {
  static constexpr int kKeys = Rows == 32 ? 32 : 64;       // keys whose scores are computed together
  static constexpr int kChunk = Rows == 32 ? 128 : 64;     // dimensions of a key in shared memory at a time
  static constexpr int kKeyStride = kChunk + 4;
  static constexpr int kScoreStride = Rows + 4;
  static constexpr int kStage = kKeys * kKeyStride;        // floats: keys, later values
  static constexpr int kValueKeys = kStage / Dims < kTile ? kStage / Dims / 8 * 8 : kTile;
  static constexpr int kPerThread = Rows * Dims / (4 * kThreads);  // query rows of a thread in the value sums
  static constexpr int kPerRow = kThreads / Rows;          // threads of a row in the softmax: 8 or 16
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
    for (int e = threadIdx.x; e < Rows * padded; e += kThreads) {
      const int r = e / padded, d = e % padded;
      q[r * stride + d] = r < n && d < a.hd ? a.q[token(r) * a.q_token + head(r) * a.q_head + d] : 0.0f;
    }
    for (int r = threadIdx.x; r < Rows; r += kThreads) {
      const std::int64_t p = static_cast<std::int64_t>(a.pos.get()) + token(r);
      range[2 * r] = r < n ? static_cast<int>(a.window > 0 && p - a.window + 1 > 0 ? p - a.window + 1 : 0) : 0;
      range[2 * r + 1] = r < n ? static_cast<int>(p) + 1 : 0;
    }
  }

  __device__ void reset() {
    for (int r = threadIdx.x; r < Rows; r += kThreads) m[r] = minus_inf(), l[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kPerThread; ++i)
#pragma unroll
      for (int d = 0; d < 4; ++d) acc[i][d] = 0.0f;
  }

  // Scores of keys [first, first + kKeys), unscaled, to scores[key][row].
  __device__ void dot_keys(int base, int first, int key_end) {
    const int lane = threadIdx.x & 15, part = threadIdx.x / 16;
    constexpr int kQueryTiles = Rows / 8;
    const int q0 = part % kQueryTiles * 8, k0 = part / kQueryTiles * 8, stride = S::q_stride(a.hd);
    float v[64] = {};
    for (int d0 = 0; d0 < a.hd; d0 += S::kChunk) {
      __syncthreads();
      for (int e = threadIdx.x; e < S::kKeys * (S::kChunk / 4); e += kThreads) {
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
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) v[i * 8 + j] = math::fma(y[j], x[i], v[i * 8 + j]);
      }
    }
    tree_scatter(v, lane);
    const int at = scattered_at(lane), key = first - base + k0 + at / 8;
    *reinterpret_cast<float4*>(&scores[key * S::kScoreStride + q0 + at % 8]) = float4{v[0], v[1], v[2], v[3]};
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
    for (int e = threadIdx.x; e < S::kKeys * (S::kChunk / 4); e += kThreads) {
      const int key = e / (S::kChunk / 4), d = e % (S::kChunk / 4) * 4;
      copy16(&stage_of(step)[key * S::kKeyStride + d], a.k, (first + key) * a.k_row + kv * a.k_head + d0 + d, first + key < key_end && d0 + d < a.hd);
    }
    __pipeline_commit();
  }
  __device__ void copy_values(int step, int base, int n_keys) {
    const int j0 = step * S::kValueKeys;
    for (int e = threadIdx.x; e < S::kValueKeys * (Dims / 4); e += kThreads) {
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
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) v[i * 8 + j] = math::fma(y[j], x[i], v[i * 8 + j]);
      }
      if (step % n_chunks + 1 < n_chunks) continue;
      tree_scatter(v, lane);
      const int at = scattered_at(lane), key = step / n_chunks * S::kKeys + k0 + at / 8;
      *reinterpret_cast<float4*>(&scores[key * S::kScoreStride + q0 + at % 8]) = float4{v[0], v[1], v[2], v[3]};
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
      for (int e = threadIdx.x; e < S::kValueKeys * (Dims / 4); e += kThreads) {
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
    for (int r = threadIdx.x; r < n; r += kThreads) {
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

template <int Rows, int Dims>
__global__ void __launch_bounds__(kThreads, 2) attention_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) float memory[];
  using S = Shape<Rows, Dims>;
  Block<Rows, Dims> b(a, memory);
  begin_kernel();
  b.kv = blockIdx.y;
  // Late tokens see the most keys: they go first.
  b.r0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Rows;
  b.n = min(Rows, a.n_tokens * a.shared_heads - b.r0);
  b.load_queries();
  b.reset();
  __syncthreads();
  int begin = b.range[0], end = b.range[2 * b.n - 1];  // rows ascend by token
  if (a.partials != nullptr) {
    begin = max(begin, static_cast<int>(blockIdx.z) * kGroupKeys);
    end = min(end, static_cast<int>(blockIdx.z + 1) * kGroupKeys);
    if (begin >= end) return;
  }
  const int first_group = begin / kGroupKeys, last_group = (end - 1) / kGroupKeys;
  for (int base = begin / kTile * kTile; base < end; base += kTile) {
    if (b.copies())
      b.dot_tile(base, end);
    else
      for (int first = base; first < base + kTile; first += S::kKeys) b.dot_keys(base, first, end);
    __syncthreads();
    b.softmax_tile(base);
    __syncthreads();
    b.add_values(base, end);
    if (first_group != last_group && ((base + kTile) % kGroupKeys == 0 || base + kTile >= end)) b.merge_group(base / kGroupKeys);
  }
  if (a.partials != nullptr)
    b.write_partial(blockIdx.z);
  else if (first_group != last_group)
    b.write(b.total_m, b.total_l, true);
  else
    b.write(b.m, b.l, false);
}

// Groups of one query row in order: merged, the sink, the division. A block per row.
__global__ void merge_kernel(const __grid_constant__ AttentionArgs a) {
  begin_kernel();
  const std::int64_t row = blockIdx.x;
  const int t = static_cast<int>(row / a.n_heads), h = static_cast<int>(row % a.n_heads);
  const std::int64_t p = static_cast<std::int64_t>(a.pos.get()) + t;
  const int begin = static_cast<int>(a.window > 0 && p - a.window + 1 > 0 ? p - a.window + 1 : 0);
  const int g0 = begin / kGroupKeys, g1 = static_cast<int>(p / kGroupKeys);
  const float* parts = a.partials + row * a.n_groups * (a.vd + 2);
  for (int d = threadIdx.x; d < a.vd; d += blockDim.x) {
    const float* first = parts + static_cast<std::int64_t>(g0) * (a.vd + 2);
    float m = first[0], l = first[1], acc = first[2 + d];
    for (int g = g0 + 1; g <= g1; ++g) {
      const float* next = parts + static_cast<std::int64_t>(g) * (a.vd + 2);
      const float top = m > next[0] ? m : next[0], ca = math::exp(m - top), cb = math::exp(next[0] - top);
      l = math::fma(next[1], cb, l * ca);
      acc = math::fma(next[2 + d], cb, acc * ca);
      m = top;
    }
    if (a.sinks != nullptr) {
      const float top = m > a.sinks[h] ? m : a.sinks[h], factor = math::exp(m - top);
      l = math::fma(l, factor, math::exp(a.sinks[h] - top));
      acc = acc * factor;
    }
    a.y[t * a.y_token + h * a.y_head + d] = acc * (1.0f / l);
  }
}

// ---- a few tokens: the keys are what there is to spread over the chip

constexpr int kScoreRows = 16;
using ScoreShape = Shape<kScoreRows, 512>;

// Scores of sixteen query rows and one tile of keys.
__global__ void __launch_bounds__(kThreads, 2) score_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) float memory[];
  Block<kScoreRows, 512> b(a, memory);
  begin_kernel();
  b.kv = blockIdx.y;
  b.r0 = static_cast<int>(blockIdx.z) * kScoreRows;
  b.n = min(kScoreRows, a.n_tokens * a.shared_heads - b.r0);
  const int base = static_cast<int>(blockIdx.x) * kTile, end = a.pos.get() + b.token(b.n - 1) + 1;
  const std::int64_t begin = a.window > 0 ? static_cast<std::int64_t>(a.pos.get()) + b.token(0) - a.window + 1 : 0;
  if (base >= end || base + kTile <= begin) return;
  b.load_queries();
  b.dot_keys(base, base, end);
  __syncthreads();
  for (int e = threadIdx.x; e < b.n * kTile; e += kThreads) {
    const int r = e / kTile, j = e % kTile;
    const std::int64_t row = static_cast<std::int64_t>(b.token(r)) * a.n_heads + b.head(r);
    a.scores[row * a.n_groups * kGroupKeys + base + j] = a.scale * b.scores[j * ScoreShape::kScoreStride + r];
  }
}

constexpr int kValueThreads = 128;  // a dimension each

// Rows of one kv head over one group of keys: probabilities of all tiles first, then the chains of fmas.
template <int Rows, bool F16>
__global__ void __launch_bounds__(kValueThreads) value_kernel(const __grid_constant__ AttentionArgs a) {
  constexpr int kTiles = static_cast<int>(Attention::kGroupTiles);
  __shared__ __align__(16) float p[kGroupKeys][Rows];
  __shared__ float top[Rows][kTiles], factor[Rows][kTiles], sum[Rows][kTiles], m[Rows], l[Rows];
  __shared__ int range[Rows][2];  // keys of a row inside the group; none: [0, 0)
  begin_kernel();
  const int per_kv = (a.n_tokens * a.shared_heads + Rows - 1) / Rows;
  const int kv = blockIdx.x / per_kv, r0 = static_cast<int>(blockIdx.x) % per_kv * Rows, group = blockIdx.y;
  const int d = blockIdx.z * kValueThreads + threadIdx.x, n = min(Rows, a.n_tokens * a.shared_heads - r0), first = group * kGroupKeys;
  const auto token = [&](int r) { return (r0 + r) / a.shared_heads; };
  const auto row_of = [&](int r) { return static_cast<std::int64_t>(token(r)) * a.n_heads + kv * a.shared_heads + (r0 + r) % a.shared_heads; };
  if (threadIdx.x < Rows) {
    const int r = threadIdx.x;
    int begin = 0, end = 0;
    if (r < n) {
      const std::int64_t q = static_cast<std::int64_t>(a.pos.get()) + token(r);
      const std::int64_t from = (a.window > 0 ? q - a.window + 1 : 0) - first, to = q + 1 - first;
      begin = static_cast<int>(from < 0 ? 0 : from), end = static_cast<int>(to > kGroupKeys ? kGroupKeys : to);
      if (begin >= end || begin >= kGroupKeys) begin = end = 0;
    }
    range[r][0] = begin, range[r][1] = end;
  }
  __syncthreads();
  int block_end = 0;
#pragma unroll
  for (int r = 0; r < Rows; ++r) block_end = max(block_end, range[r][1]);
  if (block_end == 0) return;
  const int n_tiles = (block_end + kTile - 1) / kTile;

#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const float* scores = a.scores + row_of(min(r, n - 1)) * a.n_groups * kGroupKeys + first;
#pragma unroll 4
    for (int j = threadIdx.x; j < n_tiles * kTile; j += kValueThreads) p[j][r] = j >= range[r][0] && j < range[r][1] ? scores[j] : minus_inf();
  }
  __syncthreads();
  // Eight threads find the maximum of a row's tile.
  for (int e = threadIdx.x / 8; e < Rows * n_tiles; e += kValueThreads / 8) {
    const int r = e % Rows, t = e / Rows, part = threadIdx.x & 7;
    float best = minus_inf();
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i) {
      const float x = p[t * kTile + i * 8 + part][r];
      best = best > x ? best : x;
    }
    const unsigned mask = 0xffu << (threadIdx.x & 24);
#pragma unroll
    for (int step = 4; step >= 1; step /= 2) {
      const float other = __shfl_xor_sync(mask, best, step);
      best = best > other ? best : other;
    }
    if (part == 0) top[r][t] = best;
  }
  __syncthreads();
  if (threadIdx.x < Rows) {  // running maximum and the factor of every tile
    const int r = threadIdx.x;
    float best = minus_inf();
    for (int t = 0; t < n_tiles; ++t) {
      const bool has = range[r][0] < (t + 1) * kTile && range[r][1] > t * kTile;
      const float next = best > top[r][t] ? best : top[r][t];
      factor[r][t] = !has ? 1.0f : best == minus_inf() ? 0.0f : math::exp(best - next);
      if (has) best = next;
      top[r][t] = best;
    }
    m[r] = best;
  }
  __syncthreads();
#pragma unroll 4
  for (int e = threadIdx.x; e < Rows * n_tiles * kTile; e += kValueThreads) {
    const int r = e % Rows, j = e / Rows;
    p[j][r] = j >= range[r][0] && j < range[r][1] ? math::exp(p[j][r] - top[r][j / kTile]) : 0.0f;
  }
  __syncthreads();
  // sum16 of every tile by sixteen threads.
  for (int e = threadIdx.x / 16; e < Rows * n_tiles; e += kValueThreads / 16) {
    const int r = e % Rows, t = e / Rows, lane = threadIdx.x & 15;
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) s = s + p[t * kTile + i * 16 + lane][r];
    const unsigned mask = 0xffffu << (threadIdx.x & 16);
#pragma unroll
    for (int step = 8; step >= 1; step /= 2) s = s + __shfl_xor_sync(mask, s, step);
    if (lane == 0) sum[r][t] = s;
  }
  __syncthreads();
  if (threadIdx.x < Rows) {
    const int r = threadIdx.x;
    float total = 0.0f;
    for (int t = 0; t < n_tiles; ++t)
      if (range[r][0] < (t + 1) * kTile && range[r][1] > t * kTile) total = math::fma(total, factor[r][t], sum[r][t]);
    l[r] = total;
  }
  __syncthreads();
  if (d >= a.vd) return;

  float acc[Rows] = {};
  const std::int64_t at = static_cast<std::int64_t>(kv) * a.v_head + d + static_cast<std::int64_t>(first) * a.v_row;
  const auto* v32 = reinterpret_cast<const float*>(a.v) + at;
  const auto* v16 = reinterpret_cast<const std::uint16_t*>(a.v) + at;
  constexpr int kBatch = 16;  // loads in flight while the batch before is added; keys behind the end have p = 0
  float v[kBatch], next[kBatch];
  const auto load = [&](int j0, float(&to)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t j = min(j0 + i, block_end - 1);
      to[i] = F16 ? f16_to_f32(v16[j * a.v_row]) : v32[j * a.v_row];
    }
  };
  load(0, v);
  for (int j0 = 0; j0 < block_end; j0 += kBatch) {
    load(j0 + kBatch, next);
    if (j0 % kTile == 0)
#pragma unroll
      for (int r = 0; r < Rows; ++r) acc[r] = acc[r] * factor[r][j0 / kTile];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int r = 0; r < Rows; ++r) acc[r] = math::fma(p[j0 + i][r], v[i], acc[r]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) v[i] = next[i];
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    if (range[r][1] == 0) continue;
    if (a.partials != nullptr) {
      float* to = a.partials + (row_of(r) * a.n_groups + group) * (a.vd + 2);
      if (d == 0) to[0] = m[r], to[1] = l[r];
      to[2 + d] = acc[r];
      continue;
    }
    float total = l[r], c = 1.0f;
    const int h = kv * a.shared_heads + (r0 + r) % a.shared_heads;
    if (a.sinks != nullptr) {
      const float best = m[r] > a.sinks[h] ? m[r] : a.sinks[h];
      c = math::exp(m[r] - best);
      total = math::fma(total, c, math::exp(a.sinks[h] - best));
    }
    a.y[token(r) * a.y_token + h * a.y_head + d] = (a.sinks != nullptr ? acc[r] * c : acc[r]) * (1.0f / total);
  }
}

void allocate_partials(CudaStream& s, AttentionArgs& a) {
  a.partials = s.scratch_of<float>(Scratch::Partials, static_cast<std::size_t>(a.n_tokens) * static_cast<std::size_t>(a.n_heads) *
                                                          static_cast<std::size_t>(a.n_groups) * static_cast<std::size_t>(a.vd + 2));
}

void run_few(CudaStream& s, AttentionArgs a) {
  const auto n_kv = static_cast<unsigned>(a.n_heads / a.shared_heads), rows = static_cast<unsigned>(a.n_tokens * a.shared_heads),
             groups = static_cast<unsigned>(a.n_groups);
  a.scores = s.scratch_of<float>(Scratch::Inner, static_cast<std::size_t>(a.n_tokens) * static_cast<std::size_t>(a.n_heads) * groups * kGroupKeys);
  if (groups > 1) allocate_partials(s, a);
  launch_large(s, "Attention: scores", score_kernel, dim3(groups * Attention::kGroupTiles, n_kv, (rows + kScoreRows - 1) / kScoreRows), kThreads,
               ScoreShape::bytes(a.hd, false), a);
  const auto slices = static_cast<unsigned>(ceil_div(a.vd, kValueThreads));
  // Rows that share loads of values: more where there are blocks enough.
  const auto values = [&]<int Rows>() {
    launch(s, "Attention: values", a.f16 ? value_kernel<Rows, true> : value_kernel<Rows, false>, dim3(n_kv * ((rows + Rows - 1) / Rows), groups, slices), kValueThreads, 0, a);
  };
  if (rows * groups >= 1024)
    values.template operator()<8>();
  else if (n_kv * rows * groups * slices >= 512)
    values.template operator()<4>();
  else
    values.template operator()<1>();
  if (groups > 1) launch(s, "Attention: merging groups", merge_kernel, static_cast<unsigned>(a.n_tokens * a.n_heads), 128, 0, a);
}

template <int Rows, int Dims>
void run_many(CudaStream& s, AttentionArgs a) {
  using S = Shape<Rows, Dims>;
  const unsigned blocks = static_cast<unsigned>(ceil_div(static_cast<std::int64_t>(a.n_tokens) * a.shared_heads, Rows));
  const auto n_kv = static_cast<unsigned>(a.n_heads / a.shared_heads);
  const bool split = a.n_groups > 1 && blocks * n_kv < 264;  // two blocks for each of some hundred processors
  if (split) allocate_partials(s, a);
  launch_large(s, "Attention", attention_kernel<Rows, Dims>, dim3(blocks, n_kv, split ? static_cast<unsigned>(a.n_groups) : 1u), kThreads,
               S::bytes(a.hd, !split && a.n_groups > 1), a);
  if (split) launch(s, "Attention: merging groups", merge_kernel, static_cast<unsigned>(a.n_tokens * a.n_heads), 128, 0, a);
}

}  // namespace

void CudaBackend::execute(Stream& stream, const Attention& op) {
  CudaStream& s = use(stream);
  if (run_latent_attention(s, op)) return;
  AttentionArgs a{};
  a.q = op.q.f32(), a.k = static_cast<const std::byte*>(op.k.data), a.v = static_cast<const std::byte*>(op.v.data);
  a.sinks = op.sinks.f32(), a.y = op.y.f32();
  a.q_token = op.q.stride(0), a.q_head = op.q.stride(1), a.k_row = op.k.stride(0), a.k_head = op.k.stride(1);
  a.v_row = op.v.stride(0), a.v_head = op.v.stride(1), a.y_token = op.y.stride(0), a.y_head = op.y.stride(1);
  a.n_tokens = static_cast<int>(op.q.dim(0)), a.n_heads = static_cast<int>(op.q.dim(1));
  a.shared_heads = a.n_heads / static_cast<int>(op.k.dim(1));
  a.hd = static_cast<int>(op.q.dim(2)), a.vd = static_cast<int>(op.v.dim(2));
  a.pos = s.position(op.pos0), a.window = op.window, a.scale = op.scale;
  a.n_groups = static_cast<int>((op.pos0 + op.q.dim(0) - 1) / kGroupKeys) + 1;
  a.f16 = op.k.dtype == DType::F16;
  const std::uintptr_t size = a.f16 ? 8 : 16;
  a.k_vectors = reinterpret_cast<std::uintptr_t>(a.k) % size == 0 && a.k_row % 4 == 0 && a.k_head % 4 == 0;
  a.v_vectors = reinterpret_cast<std::uintptr_t>(a.v) % size == 0 && a.v_row % 4 == 0 && a.v_head % 4 == 0;
  if (a.vd > 512 || Shape<16, 512>::bytes(a.hd, true) > 200u << 10) raise(cudaErrorNotSupported, "attention with heads of this width");
  if (a.n_tokens <= kMatvecTokens)
    run_few(s, a);
  else if (a.vd > 256 || Shape<32, 256>::bytes(a.hd, true) > 112u << 10)
    run_many<16, 512>(s, a);
  else if (a.vd > 128)
    run_many<32, 256>(s, a);
  else if (a.vd > 64)
    run_many<32, 128>(s, a);
  else
    run_many<32, 64>(s, a);
}

}  // namespace moeflux::backend::cuda
