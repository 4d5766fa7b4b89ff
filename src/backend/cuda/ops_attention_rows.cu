// Attention where the rows of a step, the heads of its only token, are too few to fill the device: what takes time then is how long a
// row takes. The same sums as in ops_attention_few.cu: scores by blocks of few keys, values by blocks of few dimensions.
#include "backend/cuda/attention.h"

namespace moeflux::backend::cuda {
namespace {

constexpr unsigned kMostBlocks = 132;  // of values; small ones of scores up to four times as many

// ---- scores

constexpr int kRows = 8, kKeys = 16, kScoreThreads = kKeys / 2 * 16;  // sixteen lanes have two keys
constexpr int kSteps = kWholeDims / 16;

// A lane's values of its keys are in registers before scores' inputs are there, but for what this step wrote.
__global__ void __launch_bounds__(kScoreThreads) score_rows_kernel(const __grid_constant__ AttentionArgs a) {
  __shared__ float4 q[kRows / 4][kWholeDims];  // four rows of a dimension together
  const int kv = blockIdx.y, r0 = static_cast<int>(blockIdx.z) * kRows, n = min(kRows, a.n_tokens * a.shared_heads - r0);
  const int base = static_cast<int>(blockIdx.x) * kKeys, lane = threadIdx.x & 15, first = base + static_cast<int>(threadIdx.x) / 16 * 2;
  const int pos = a.pos.get(), end = pos + (r0 + n - 1) / a.shared_heads + 1;
  const std::int64_t begin = a.window > 0 ? static_cast<std::int64_t>(pos) + r0 / a.shared_heads - a.window + 1 : 0;
  const bool nothing = base >= end || base + kKeys <= begin, old = base + kKeys <= pos;
  float x[2][kSteps];
  const auto load_keys = [&] {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float* from = reinterpret_cast<const float*>(a.k) + min(first + k, end - 1) * a.k_row + kv * a.k_head + lane;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) x[k][i] = i * 16 < a.hd ? from[i * 16] : 0.0f;
    }
  };
  if (!nothing && old) load_keys();
  begin_kernel();
  if (nothing) return;
  if (!old) load_keys();
  for (int e = threadIdx.x; e < kRows * a.hd / 4; e += kScoreThreads) {
    const int r = min(e / (a.hd / 4), n - 1), d = e % (a.hd / 4) * 4, t = (r0 + r) / a.shared_heads, h = kv * a.shared_heads + (r0 + r) % a.shared_heads;
    const float4 v = *reinterpret_cast<const float4*>(a.q + t * a.q_token + h * a.q_head + d);
    const int row = e / (a.hd / 4);
    float* to = reinterpret_cast<float*>(&q[row / 4][d]) + row % 4;
    to[0] = v.x, to[4] = v.y, to[8] = v.z, to[12] = v.w;
  }
  __syncthreads();
  float s[2 * kRows] = {};  // key by key
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i * 16 >= a.hd) break;
    const float4 low = q[0][i * 16 + lane], high = q[1][i * 16 + lane];
    const float y[kRows] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int r = 0; r < kRows; ++r) s[k * kRows + r] = math::fma(y[r], x[k][i], s[k * kRows + r]);
  }
  tree_level<8>(s, lane, 8);
  tree_level<4>(s, lane, 4);
  tree_level<2>(s, lane, 2);
  tree_level<1>(s, lane, 1);
  const int key = first + lane / kRows, r = lane % kRows;  // whose sum this lane has
  if (key >= end || r >= n) return;
  const std::int64_t row = static_cast<std::int64_t>((r0 + r) / a.shared_heads) * a.n_heads + kv * a.shared_heads + (r0 + r) % a.shared_heads;
  a.scores[row * a.n_groups * kGroupKeys + key] = a.scale * s[0];
}

// ---- values

constexpr int kSliceDims = kWarp;  // dimensions of a block
constexpr int kRowWarps = 4;       // of a row; the first of them adds up the values
constexpr int kGroupTiles = static_cast<int>(Attention::kGroupTiles);
constexpr std::size_t kTileBytes = 2 * sizeof(float) * kGroupTiles;  // of a row, beside that
inline std::size_t slice_bytes(int rows) { return sizeof(float) * static_cast<std::size_t>(kGroupKeys) * static_cast<std::size_t>(kSliceDims + rows); }

// The group's values of a slice are on their way before scores are waited for; rows share them.
__device__ inline void fetch_slice(const AttentionArgs& a, std::int64_t at, int d0, int n_keys, float* slice) {
  constexpr int kPieces = kSliceDims / 4;
  const int piece = threadIdx.x % kPieces * 4, step = blockDim.x / kPieces;
  const float* from = reinterpret_cast<const float*>(a.v) + at + d0 + piece;
  if (d0 + piece < a.vd)
#pragma unroll 4
    for (int key = threadIdx.x / kPieces; key < n_keys; key += step)
      __pipeline_memcpy_async(slice + key * kSliceDims + piece, from + key * a.v_row, 16);
  __pipeline_commit();
}

// A row's softmax by kRowWarps warps, each every fourth tile. In shared memory: maxima of its tiles and their sums.
struct RowSoftmax {
  float *top, *sum, *p;  // [kGroupTiles], [kGroupTiles], [kGroupKeys]
  int begin, end;        // keys of the group; begin == end: none
  float best, factor;    // lane t: of tile t

  __device__ int tile(int i) const { return static_cast<int>(threadIdx.x) / kWarp % kRowWarps + i * kRowWarps; }
  __device__ bool in(int j) const { return j >= begin && j < end; }

  // Scores of keys [begin, end) to p, maxima of tiles.
  __device__ void load(const float* scores) const {
    constexpr int kTiles = kGroupTiles / kRowWarps;
    const int lane = threadIdx.x % kWarp;
    float low[kTiles], high[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int j = tile(i) * kTile + lane;
      low[i] = in(j) ? scores[j] : minus_inf(), high[i] = in(j + kWarp) ? scores[j + kWarp] : minus_inf();
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int j = tile(i) * kTile + lane;
      p[j] = low[i], p[j + kWarp] = high[i];
      float most = low[i] > high[i] ? low[i] : high[i];
#pragma unroll
      for (int step = kWarp / 2; step >= 1; step /= 2) {
        const float other = __shfl_xor_sync(kAll, most, step);
        most = most > other ? most : other;
      }
      if (lane == 0) top[tile(i)] = most;
    }
  }

  // Scores to probabilities, 0 beside the keys as far as their tiles reach; sum16 of every tile. Behind load() and a barrier.
  __device__ void finish() {
    const int lane = threadIdx.x % kWarp, first = begin / kTile, last = (end - 1) / kTile;
    best = lane < kGroupTiles ? top[lane] : minus_inf();
#pragma unroll
    for (int step = 1; step < kGroupTiles; step *= 2) {
      const float other = __shfl_up_sync(kAll, best, step);
      if (lane >= step && other > best) best = other;
    }
    const float up = __shfl_up_sync(kAll, best, 1), before = lane == 0 ? minus_inf() : up;
    factor = lane < first || lane > last ? 1.0f : before == minus_inf() ? 0.0f : math::exp(before - best);
#pragma unroll 2
    for (int i = 0; tile(i) <= last; ++i) {
      const int t = tile(i), j = t * kTile + lane;
      const float most = __shfl_sync(kAll, best, t);
      const float low = in(j) ? math::exp(p[j] - most) : 0.0f, high = in(j + kWarp) ? math::exp(p[j + kWarp] - most) : 0.0f;
      p[j] = low, p[j + kWarp] = high;
      // Four keys a lane in order, then the tree; lanes from 16 on add what nobody reads.
      float s = low + __shfl_down_sync(kAll, low, 16);
      s = s + high;
      s = s + __shfl_down_sync(kAll, high, 16);
#pragma unroll
      for (int step = 8; step >= 1; step /= 2) s = s + __shfl_xor_sync(kAll, s, step);
      if (lane == 0) sum[t] = s;
    }
  }

  // Behind finish() and a barrier.
  __device__ float total() const {
    const int lane = threadIdx.x % kWarp, first = begin / kTile, last = (end - 1) / kTile;
    const float mine = lane < kGroupTiles ? sum[lane] : 0.0f;
    float l = 0.0f;
#pragma unroll 4
    for (int t = first; t <= last; ++t) l = math::fma(l, __shfl_sync(kAll, factor, t), __shfl_sync(kAll, mine, t));
    return l;
  }
};

// One fma a key in ascending order; the next batch's loads are under way meanwhile. Behind `end` probabilities are 0 and values are
// numbers, as far as a batch reaches.
__device__ inline float warp_values(const float* slice, const float* p, float factor, int begin, int end) {
  constexpr int kBatch = 16, kPerTile = kTile / kBatch;
  const int lane = threadIdx.x % kWarp, last = (end - 1) / kBatch;
  float v[kBatch];
  float4 w[kBatch / 4];
  const auto load = [&](int batch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) v[i] = slice[(batch * kBatch + i) * kSliceDims + lane];
#pragma unroll
    for (int i = 0; i < kBatch / 4; ++i) w[i] = reinterpret_cast<const float4*>(p + batch * kBatch)[i];
  };
  float acc = 0.0f;
  int batch = begin / kTile * kPerTile;
  load(batch);
#pragma unroll 2
  for (; batch <= last; ++batch) {
    float now[kBatch];
    float4 weights[kBatch / 4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) now[i] = v[i];
#pragma unroll
    for (int i = 0; i < kBatch / 4; ++i) weights[i] = w[i];
    load(min(batch + 1, last));
    if (batch % kPerTile == 0) acc = acc * __shfl_sync(kAll, factor, batch / kPerTile);
#pragma unroll
    for (int i = 0; i < kBatch / 4; ++i) {
      acc = math::fma(weights[i].x, now[4 * i], acc);
      acc = math::fma(weights[i].y, now[4 * i + 1], acc);
      acc = math::fma(weights[i].z, now[4 * i + 2], acc);
      acc = math::fma(weights[i].w, now[4 * i + 3], acc);
    }
  }
  return acc;
}

template <int Rows>
__global__ void __launch_bounds__(Rows * kRowWarps * kWarp) value_rows_kernel(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) float slice[];  // [kGroupKeys][kSliceDims], then [Rows][kGroupKeys] probabilities
  __shared__ float tops[Rows][kGroupTiles], sums[Rows][kGroupTiles];
  const int rows = a.n_tokens * a.shared_heads, per_kv = (rows + Rows - 1) / Rows, kv = blockIdx.x / per_kv;
  const int mine = static_cast<int>(threadIdx.x) / (kRowWarps * kWarp), r = static_cast<int>(blockIdx.x) % per_kv * Rows + mine, lane = threadIdx.x % kWarp;
  const int group = blockIdx.y, first = group * kGroupKeys, d0 = blockIdx.z * kSliceDims, pos = a.pos.get();
  const auto token = [&](int row) { return min(row, rows - 1) / a.shared_heads; };
  const auto clip = [&](std::int64_t key) { return static_cast<int>(key < first ? 0 : key - first > kGroupKeys ? kGroupKeys : key - first); };
  // The kernel before has waited for the one that wrote the newest values.
  const int n_keys = clip(static_cast<std::int64_t>(pos) + token(r - mine + Rows - 1) + 1);
  fetch_slice(a, static_cast<std::int64_t>(kv) * a.v_head + static_cast<std::int64_t>(first) * a.v_row, d0, n_keys, slice);
  for (int e = n_keys * kSliceDims + static_cast<int>(threadIdx.x); e < (n_keys + 15) / 16 * 16 * kSliceDims; e += static_cast<int>(blockDim.x)) slice[e] = 0.0f;
  begin_kernel();
  const std::int64_t q = static_cast<std::int64_t>(pos) + token(r);
  const int h = kv * a.shared_heads + min(r, rows - 1) % a.shared_heads;
  const std::int64_t row = static_cast<std::int64_t>(token(r)) * a.n_heads + h;
  RowSoftmax x{tops[mine], sums[mine], slice + kGroupKeys * kSliceDims + mine * kGroupKeys, a.window > 0 ? clip(q - a.window + 1) : 0, clip(q + 1), 0.0f, 0.0f};
  const bool has = r < rows && x.begin < x.end;
  if (has) x.load(a.scores + row * a.n_groups * kGroupKeys + first);
  __syncthreads();
  if (has) x.finish();
  __pipeline_wait_prior(0);
  __syncthreads();
  if (!has || threadIdx.x / kWarp % kRowWarps != 0) return;
  const float acc = warp_values(slice, x.p, x.factor, x.begin, x.end), m = __shfl_sync(kAll, x.best, (x.end - 1) / kTile);
  const float total = x.total();  // by all lanes
  if (const int d = d0 + lane; d < a.vd) put_value(a, token(r), h, group, d, m, total, acc);
}

template <int Rows>
bool launch_values(CudaStream& s, const AttentionArgs& a) {
  const int rows = a.n_tokens * a.shared_heads;
  const dim3 grid(static_cast<unsigned>(a.n_heads / a.shared_heads * ceil_div(rows, Rows)), static_cast<unsigned>(a.n_groups), static_cast<unsigned>(ceil_div(a.vd, kSliceDims)));
  if (grid.x * grid.y * grid.z > kMostBlocks || slice_bytes(Rows) + kTileBytes * Rows > s.traits.shared_bytes) return false;
  launch_large(s, "Attention: values", value_rows_kernel<Rows>, grid, Rows * kRowWarps * kWarp, slice_bytes(Rows), a);
  return true;
}

}  // namespace

bool score_rows(CudaStream& s, const AttentionArgs& a) {
  const dim3 grid(static_cast<unsigned>(a.n_groups * (kGroupKeys / kKeys)), static_cast<unsigned>(a.n_heads / a.shared_heads),
                  static_cast<unsigned>(ceil_div(a.n_tokens * a.shared_heads, kRows)));
  if (!whole_tile(a) || !a.q_vectors || grid.z > 2 || grid.x * grid.y * grid.z > 4 * kMostBlocks) return false;
  launch(s, "Attention: scores", score_rows_kernel, grid, kScoreThreads, 0, a);
  return true;
}

bool value_rows(CudaStream& s, const AttentionArgs& a) {
  if (a.f16 || !a.v_vectors || a.vd % 4 != 0) return false;
  return launch_values<1>(s, a) || launch_values<2>(s, a) || launch_values<4>(s, a);
}

}  // namespace moeflux::backend::cuda
