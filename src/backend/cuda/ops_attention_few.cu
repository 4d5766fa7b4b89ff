// Attention of a few tokens: scores of tiles of keys by many blocks, then values by groups of keys; where that leaves
// processors without work, in the way of ops_attention_rows.cu.
#include "backend/cuda/attention.h"

namespace moeflux::backend::cuda {
namespace {

constexpr int kScoreRows = 16;
using ScoreShape = Shape<kScoreRows, 512>;

// Keys of a tile in shared memory at once (whole_tile()): copies of all of them are on their way before anything is waited for. Only what
// this step wrote is not there yet.
__host__ __device__ inline int whole_stride(int hd) { return hd + 4; }
inline std::size_t score_bytes(const AttentionArgs& a) {
  const std::size_t plain = ScoreShape::bytes(a.hd, false);
  return whole_tile(a) ? plain + (static_cast<std::size_t>(kTile) * static_cast<std::size_t>(whole_stride(a.hd)) - ScoreShape::kStage) * 4 : plain;
}

// Scores of sixteen query rows and one tile of keys.
template <bool Whole>
__global__ void __launch_bounds__(kAttentionThreads, 2) score_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) float memory[];
  Block<kScoreRows, 512> b(a, memory);
  float* keys = b.stage;
  if constexpr (Whole) {  // keys take more room than a stage, all others move
    const int more = kTile * whole_stride(a.hd) - ScoreShape::kStage;
    b.scores += more;
    b.range += more;
  }
  b.kv = blockIdx.y;
  b.r0 = static_cast<int>(blockIdx.z) * kScoreRows;
  b.n = min(kScoreRows, a.n_tokens * a.shared_heads - b.r0);
  const int pos = a.pos.get(), base = static_cast<int>(blockIdx.x) * kTile, end = pos + b.token(b.n - 1) + 1;
  const std::int64_t begin = a.window > 0 ? static_cast<std::int64_t>(pos) + b.token(0) - a.window + 1 : 0;
  const bool nothing = base >= end || base + kTile <= begin;
  const auto copy_range = [&](int first, int last) {  // keys of the tile
    const int per_key = a.hd / 4;
    for (int e = first * per_key + static_cast<int>(threadIdx.x); e < last * per_key; e += kAttentionThreads) {
      const int key = e / per_key, d = (e - key * per_key) * 4;
      __pipeline_memcpy_async(&keys[key * whole_stride(a.hd) + d], reinterpret_cast<const float*>(a.k) + (base + key) * a.k_row + b.kv * a.k_head + d, 16);
    }
  };
  const int old = max(0, min(pos - base, kTile)), all = max(0, min(end - base, kTile));
  if (Whole && !nothing) copy_range(0, old);
  begin_kernel();
  if (nothing) return;
  b.load_queries();
  if constexpr (Whole) {
    copy_range(old, all);
    for (int e = all * whole_stride(a.hd) + static_cast<int>(threadIdx.x); e < kTile * whole_stride(a.hd); e += kAttentionThreads) keys[e] = 0.0f;
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    b.dot_whole(keys, whole_stride(a.hd));
  } else {
    b.dot_keys(base, base, end);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < b.n * kTile; e += kAttentionThreads) {
    const int r = e / kTile, j = e % kTile;
    const std::int64_t row = static_cast<std::int64_t>(b.token(r)) * a.n_heads + b.head(r);
    a.scores[row * a.n_groups * kGroupKeys + base + j] = a.scale * b.scores[j * ScoreShape::kScoreStride + r];
  }
}

constexpr int kValueThreads = 128;  // a dimension each

// Values of f32 come to shared memory by tiles, in a ring: all stages but one are on their way while the one is added. f16 has no ring.
constexpr int kMostStages = 3, kFewStages = 2;
constexpr int kValueStage = kTile * kValueThreads;  // floats
constexpr std::size_t ring_bytes(int stages) { return sizeof(float) * kValueStage * static_cast<std::size_t>(stages); }

// acc[r] += p * value over n keys of a tile, one fma each in ascending keys. Batches of loads come before their fmas.
template <int Rows>
__device__ inline void add_values(const float* values, float (*p)[Rows], int n, float (&acc)[Rows]) {
  constexpr int kBatch = 16 / Rows < 4 ? 4 : 16 / Rows;
  int j = 0;
#pragma unroll 1
  for (; j + kBatch <= n; j += kBatch) {
    float v[kBatch];
    float4 weights[kBatch * Rows / 4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) v[i] = values[(j + i) * kValueThreads];
#pragma unroll
    for (int i = 0; i < kBatch * Rows / 4; ++i) weights[i] = reinterpret_cast<const float4*>(p[j])[i];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const int at = i * Rows + r;
        const float4& w = weights[at / 4];
        acc[r] = math::fma(at % 4 == 0 ? w.x : at % 4 == 1 ? w.y : at % 4 == 2 ? w.z : w.w, v[i], acc[r]);
      }
  }
#pragma unroll 1
  for (; j < n; ++j)
#pragma unroll
    for (int r = 0; r < Rows; ++r) acc[r] = math::fma(p[j][r], values[j * kValueThreads], acc[r]);
}

// Rows of one kv head over one group of keys: probabilities of all tiles first, then the chains of fmas.
template <int Rows, int Stages>
__global__ void __launch_bounds__(kValueThreads) value_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) float ring[];
  constexpr bool F16 = Stages == 0;
  constexpr int kStages = F16 ? kMostStages : Stages;
  constexpr int kTiles = static_cast<int>(Attention::kGroupTiles);
  __shared__ __align__(16) float p[kGroupKeys][Rows];
  __shared__ float top[Rows][kTiles], factor[Rows][kTiles], sum[Rows][kTiles], m[Rows], l[Rows];
  __shared__ int range[Rows][2];  // keys of a row inside the group; none: [0, 0)
  const int per_kv = (a.n_tokens * a.shared_heads + Rows - 1) / Rows;
  const int kv = blockIdx.x / per_kv, r0 = static_cast<int>(blockIdx.x) % per_kv * Rows, group = blockIdx.y;
  const int d = blockIdx.z * kValueThreads + threadIdx.x, n = min(Rows, a.n_tokens * a.shared_heads - r0), first = group * kGroupKeys;
  const auto token = [&](int r) { return (r0 + r) / a.shared_heads; };
  const auto row_of = [&](int r) { return static_cast<std::int64_t>(token(r)) * a.n_heads + kv * a.shared_heads + (r0 + r) % a.shared_heads; };
  // The kernel before has waited for the one that wrote the newest values.
  const std::int64_t last = static_cast<std::int64_t>(a.pos.get()) + token(n - 1) - first;
  const int n_keys = static_cast<int>(last < 0 ? 0 : last >= kGroupKeys ? kGroupKeys : last + 1);
  const std::int64_t value_at = static_cast<std::int64_t>(kv) * a.v_head + static_cast<std::int64_t>(first) * a.v_row;
  const int d0 = static_cast<int>(blockIdx.z) * kValueThreads;
  // A tile, by warps a key at a time: where rows are 16 bytes wide and need no conversion.
  const bool copies = !F16 && a.v_vectors && a.vd % 4 == 0;
  [[maybe_unused]] const auto fetch = [&](int tile) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n = min(kTile, n_keys - tile * kTile);
    if (copies && d0 + lane * 4 < a.vd) {
      const float* from = reinterpret_cast<const float*>(a.v) + value_at + d0 + lane * 4 + static_cast<std::int64_t>(tile * kTile + warp) * a.v_row;
      float* to = ring + tile % kStages * kValueStage + warp * kValueThreads + lane * 4;
#pragma unroll 4
      for (int key = warp; key < n; key += kValueThreads / kWarp, from += kValueThreads / kWarp * a.v_row, to += kValueThreads / kWarp * kValueThreads)
        __pipeline_memcpy_async(to, from, 16);
    }
    __pipeline_commit();
  };
  if constexpr (!F16) {
#pragma unroll 1
    for (int tile = 0; tile + 1 < kStages; ++tile) fetch(tile);
  }
  begin_kernel();
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
    float s[kGroupKeys / kValueThreads];  // all of a row's loads are under way together
#pragma unroll
    for (int i = 0; i < kGroupKeys / kValueThreads; ++i) {
      const int j = threadIdx.x + i * kValueThreads;
      s[i] = j >= range[r][0] && j < range[r][1] ? scores[j] : minus_inf();
    }
#pragma unroll
    for (int i = 0; i < kGroupKeys / kValueThreads; ++i) p[threadIdx.x + i * kValueThreads][r] = s[i];
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
  static_assert(kTiles == 16 && Rows * 16 <= kValueThreads);
  if (threadIdx.x < (Rows * 16 + 31) / 32 * 32) {  // running maximum and the factor of every tile: sixteen threads a row
    const int r = min(static_cast<int>(threadIdx.x) / 16, Rows - 1), t = threadIdx.x & 15;
    float best = t < n_tiles ? top[r][t] : minus_inf();  // tiles without a key of this row have -inf
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
      const float other = __shfl_up_sync(kAll, best, step, 16);
      if (t >= step && other > best) best = other;
    }
    const float up = __shfl_up_sync(kAll, best, 1, 16), before = t == 0 ? minus_inf() : up;
    const bool has = range[r][0] < (t + 1) * kTile && range[r][1] > t * kTile;
    const float f = !has ? 1.0f : before == minus_inf() ? 0.0f : math::exp(before - best);
    __syncwarp();
    if (threadIdx.x < Rows * 16 && t < n_tiles) {
      factor[r][t] = f, top[r][t] = best;
      if (t == n_tiles - 1) m[r] = best;
    }
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

  float acc[Rows] = {};
  if (copies) {
#pragma unroll 1
    for (int tile = 0; tile < n_tiles; ++tile) {
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();  // everyone's copies of this tile are there, and nobody reads the stage that is filled next
      fetch(tile + kStages - 1);
      const float* values = ring + tile % kStages * kValueStage + threadIdx.x;
#pragma unroll
      for (int r = 0; r < Rows; ++r) acc[r] = acc[r] * factor[r][tile];
      const int n = min(kTile, block_end - tile * kTile);
      add_values<Rows>(values, &p[tile * kTile], n, acc);
    }
  } else if (d < a.vd) {
    constexpr int kBatch = 16;  // loads in flight while the batch before is added; keys behind the end have p = 0
    const auto* v32 = reinterpret_cast<const float*>(a.v) + value_at + d;
    const auto* v16 = reinterpret_cast<const std::uint16_t*>(a.v) + value_at + d;
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
  }
  if (d >= a.vd) return;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    if (range[r][1] != 0) put_value(a, token(r), kv * a.shared_heads + (r0 + r) % a.shared_heads, group, d, m[r], l[r], acc[r]);
  }
}

}  // namespace

void attend_few(CudaStream& s, AttentionArgs a) {
  const auto n_kv = static_cast<unsigned>(a.n_heads / a.shared_heads), rows = static_cast<unsigned>(a.n_tokens * a.shared_heads),
             groups = static_cast<unsigned>(a.n_groups);
  a.scores = s.scratch_of<float>(Scratch::Inner, static_cast<std::size_t>(a.n_tokens) * static_cast<std::size_t>(a.n_heads) * groups * kGroupKeys);
  if (groups > 1) allocate_partials(s, a);
  if (!score_rows(s, a))
    launch_large(s, "Attention: scores", whole_tile(a) ? score_kernel<true> : score_kernel<false>,
                 dim3(groups * Attention::kGroupTiles, n_kv, (rows + kScoreRows - 1) / kScoreRows), kAttentionThreads, score_bytes(a), a);
  const auto slices = static_cast<unsigned>(ceil_div(a.vd, kValueThreads));
  // Rows that share loads of values: more where there are blocks enough.
  const auto values = [&]<int Rows>() {
    constexpr std::size_t kRowBytes = sizeof(float) * (kGroupKeys + 64);  // more than what a row takes beside the ring
    const bool most = ring_bytes(kMostStages) + Rows * kRowBytes <= s.traits.shared_bytes;
    const auto kernel = a.f16 ? value_kernel<Rows, 0> : most ? value_kernel<Rows, kMostStages> : value_kernel<Rows, kFewStages>;
    launch_large(s, "Attention: values", kernel, dim3(n_kv * ((rows + Rows - 1) / Rows), groups, slices), kValueThreads, a.f16 ? 0 : ring_bytes(most ? kMostStages : kFewStages), a);
  };
  if (value_rows(s, a)) {
    // as many blocks as processors had to be enough
  } else if (rows * groups >= 1024) {
    values.template operator()<8>();
  } else if (n_kv * rows * groups * slices >= 512) {
    values.template operator()<4>();
  } else {
    values.template operator()<1>();
  }
  if (groups > 1) merge_groups(s, a);
}

}  // namespace moeflux::backend::cuda
