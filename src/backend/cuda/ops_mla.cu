// Attention over a latent cache on the tensor cores: all heads share a key of up to 576 values, whose first 512 are the value.
//
// Keys are split at absolute positions, kSplit each. A block has 64 heads of one token and one split; two blocks of a cluster have the
// same split and read half of its rows each. One warpgroup of a block (the producer) reads rows, rounds them to f16, stores them in shared
// memory and has them copied to the neighbour's; two (the consumers) multiply: each has half of the keys of a tile for the scores, half of
// the dimensions for the sums. Tiles pass through two stages. A second kernel merges a row's splits. What a row becomes depends on its own
// position alone.
//
// What limits: loads, stores, copies to the neighbour and the operands of products all pass one memory of 128 bytes a cycle, and the scores'
// operands alone take 1700 of a tile's 5000 cycles there. Nothing may wait for global memory between tiles (see warpgroup.h's barriers).
//
// Factors of products are f16 (queries, keys, probabilities), sums are f32. Scores and maxima are in powers of two.
#include <algorithm>

#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/mla.h"
#include "backend/cuda/warpgroup.h"

namespace moeflux::backend::cuda {
namespace {

constexpr int kHeads = 64;        // of a block: the rows of a warpgroup's product
constexpr int kTileKeys = 64;     // keys in shared memory at a time
constexpr int kSplit = 512;       // keys of a block: 64 splits of 32,768 keys are one block for each of 128 processors
constexpr int kWidth = 576;       // room for a key
constexpr int kValues = 512;
constexpr int kPanel = 1024;                  // bytes: 64 values of 8 rows
constexpr int kBlock = kWidth / 64 * kPanel;  // bytes of 8 rows
constexpr int kTile = kTileKeys / 8 * kBlock; // bytes of a tile of keys, and of the queries
constexpr int kSumsRow = kValues * 4 + 32;    // bytes of a row of sums in shared memory: eight rows in different banks
static_assert(kHeads * kSumsRow <= 2 * kTile);
constexpr int kConsumers = 256, kProducers = 128;
constexpr int kConsumerRegisters = 176, kProducerRegisters = 152;  // of a thread; all threads start with 168, which is the same in all
static_assert(kConsumers * kConsumerRegisters + kProducers * kProducerRegisters == (kConsumers + kProducers) * 168);
constexpr int kGroupKeys = static_cast<int>(Attention::kTile * Attention::kGroupTiles);
static_assert(kGroupKeys % kSplit == 0, "recorded steps are replayed inside a group");
constexpr std::size_t kScratchBytes = 64u << 20;  // partial results of the tokens computed together: little enough to stay in the cache

// Bytes of shared memory behind the next multiple of 1024: queries, two tiles, probabilities, maxima, barriers.
constexpr int kProbabilitiesAt = 3 * kTile, kTopsAt = kProbabilitiesAt + kHeads * kTileKeys * 2, kBarriersAt = kTopsAt + 2 * kHeads * 4,
              kSharedBytes = kBarriersAt + 4 * 8;

struct MlaArgs {
  const float* q;
  const std::byte* k;
  float* y;
  float* sums;    // [tokens of this launch, heads, splits, 512]
  float2* stats;  // [tokens of this launch, heads, splits]: maximum, sum of probabilities
  std::int64_t q_token, q_head, k_row, y_token, y_head;  // strides in elements
  int n_heads, hd, n_splits, first_token;
  CudaStream::Position pos;
  float scale;  // times log2(e)
};

#ifdef MOEFLUX_WARPGROUPS

// Probabilities are stored times 2^12: those below 2^-14 of the largest would lose digits as f16.
constexpr float kRaise = 12.0f;

struct Shared {
  std::uint32_t base;
  __device__ std::uint32_t queries() const { return base; }
  __device__ std::uint32_t tile(int i) const { return base + kTile + (i & 1) * kTile; }
  __device__ std::uint32_t probabilities() const { return base + kProbabilitiesAt; }
  __device__ std::uint32_t full(int i) const { return base + kBarriersAt + (i & 1) * 8; }
  __device__ std::uint32_t empty(int i) const { return base + kBarriersAt + 16 + (i & 1) * 8; }
};

// ---- rows from global memory to shared memory

// A warp brings eight rows, which lie together, in batches of eighteen 16-byte units a thread: all of a batch is under way at once.
// (Smaller batches that overlap are of no use: there are six counters of a warp to wait for loads, and it waits for the last one.)
constexpr int kUnits = 18;

template <bool F16>
struct EightRows {
  const std::byte* first;
  std::int64_t pitch;  // bytes
  int n, hd;           // rows that are there; others, and values from hd on, become zeros

  // f32: nine units of every lane are two rows, of which the fifth unit has the end of the one and the begin of the other. Two batches.
  static __device__ int row_of(int unit, int lane) {
    if constexpr (F16) return (unit * kWarp + lane) / (kWidth / 8);
    const int in_pair = unit % 9;
    return unit / 9 * 2 + (in_pair > 4 || (in_pair == 4 && lane >= 16) ? 1 : 0);
  }
  static __device__ int column_of(int unit, int lane) {  // in units
    if constexpr (F16) return (unit * kWarp + lane) % (kWidth / 8);
    return unit % 9 * kWarp + lane - (row_of(unit, lane) & 1) * (kWidth / 4);
  }

  __device__ void load(int batch, int lane, uint4 (&to)[kUnits]) const {
    const int in_warp = computed_here(lane) & 31;
    const std::byte* from = first + batch * 4 * pitch;
    const auto at = [&](int i) { return reinterpret_cast<const uint4*>(from + row_of(i, in_warp) * pitch) + column_of(i, in_warp); };
    if (n >= 8 && hd == kWidth) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) to[i] = __ldcg(at(i));
    } else {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        to[i] = uint4{0, 0, 0, 0};
        if (batch * 4 + row_of(i, in_warp) < n && column_of(i, in_warp) * (F16 ? 8 : 4) < hd) to[i] = __ldcg(at(i));
      }
    }
  }

  // All of a batch to eight rows at `to`.
  static __device__ void store(int lane, const uint4 (&from)[kUnits], std::uint32_t to)
    requires F16
  {
    const int in_warp = computed_here(lane) & 31;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int c = column_of(i, in_warp);
      store_shared(to + c / 8 * kPanel + swizzled(row_of(i, in_warp), c % 8), from[i]);
    }
  }
  static __device__ void store(int batch, int lane, const uint2 (&from)[kUnits], std::uint32_t to)
    requires(!F16)
  {
    const int in_warp = computed_here(lane) & 31;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int c = column_of(i, in_warp);
      store_shared(to + c / 16 * kPanel + swizzled(batch * 4 + row_of(i, in_warp), c / 2 % 8) + c % 2 * 8, from[i]);
    }
  }

  static __device__ void round(const uint4 (&from)[kUnits], uint2 (&to)[kUnits]) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      to[i] = uint2{to_halves(__uint_as_float(from[i].x), __uint_as_float(from[i].y)), to_halves(__uint_as_float(from[i].z), __uint_as_float(from[i].w))};
  }
};

// ---- the producer

constexpr int kFetchAhead = 1;  // half tiles (pairs of blocks) that are on their way from memory to the second-level cache

template <bool F16, int Cluster>
struct Producer {
  const MlaArgs& a;
  const std::byte* rows;  // of the split
  int n_keys;             // of the split that the token sees
  int warp, lane, rank;

  // A job is half a tile: blocks of a cluster have one each.
  static constexpr int kJobsPerTile = 2 / Cluster;
  __device__ int tile(int job) const { return job / kJobsPerTile; }
  __device__ int first_row(int job) const { return (Cluster == 2 ? rank : job & 1) * 32 + warp * 8; }

  __device__ EightRows<F16> rows_of(int job) const {
    const int key = tile(job) * kTileKeys + first_row(job);
    const std::int64_t pitch = a.k_row * (F16 ? 2 : 4);
    return {rows + key * pitch, pitch, n_keys - key, a.hd};
  }

  // In one piece with what lies between rows, unless that is most of it.
  __device__ void fetch(int job) const {
    const EightRows<F16> r = rows_of(job);
    const int bytes = a.hd * (F16 ? 2 : 4);
    if (lane == 0 && r.n > 0 && r.pitch <= 2 * bytes) fetch_to_cache(r.first, (min(8, r.n) - 1) * static_cast<int>(r.pitch) + bytes);
  }

  // Between a stage's release and its next tile there is as little as can be: one batch of the tile is here as f16, the other under way.
  __device__ void run(const Shared& shared) const {
    const int n_jobs = (n_keys + kTileKeys - 1) / kTileKeys * kJobsPerTile;
    uint4 units[kUnits];
    uint2 halves[kUnits];
    begin(0, units, halves);
    for (int job = 0; job < n_jobs; ++job) {
      const int t = tile(job);
      const std::uint32_t to = shared.tile(t) + first_row(job) / 8 * kBlock;
      if (t >= 2) barrier_wait(shared.empty(t), t / 2 - 1);
      if constexpr (F16) {
        EightRows<true>::store(lane, units, to);
      } else {
        EightRows<false>::store(0, lane, halves, to);
        EightRows<false>::round(units, halves);
        EightRows<false>::store(1, lane, halves, to);
      }
      fence_async();
      __syncwarp();
      if (Cluster == 2 && job == 0) cluster_go();
      if (lane == 0) pass(shared, t, to);
      __syncwarp();
      if (job + kFetchAhead < n_jobs) fetch(job + kFetchAhead);
      if (job + 1 < n_jobs) begin(job + 1, units, halves);
    }
  }

  __device__ void begin(int job, uint4 (&units)[kUnits], uint2 (&halves)[kUnits]) const {
    const EightRows<F16> r = rows_of(job);
    r.load(0, lane, units);
    if constexpr (!F16) {
      r.round(units, halves);
      r.load(1, lane, units);
    }
  }

  // The warp's rows are there.
  __device__ void pass(const Shared& shared, int t, std::uint32_t rows_at) const {
    if constexpr (Cluster == 2) {
      copy_there(neighbour(rows_at, rank ^ 1), rows_at, kBlock, neighbour(shared.full(t), rank ^ 1));
      barrier_arrive_expecting(shared.full(t), kBlock);  // as many come from the neighbour's warp
    } else {
      barrier_arrive(shared.full(t));
    }
  }
};

// ---- the consumers

// A row's state, for the two rows r and r + 8 of a thread: 2^top is what probabilities are relative to, `sum` is the thread's own share.
// A tile's maximum may be above it by kSlack, so that sums have to be multiplied rarely.
struct Running {
  float top[2], sum[2];
};
constexpr float kSlack = 3.0f;
static_assert(kSlack + kRaise < 16.0f, "f16 ends at 2^16");

struct Consumer {
  const MlaArgs& a;
  const Shared& shared;
  float* tops;  // shared: [2 warpgroups][kHeads / 2][2]
  int group, lane, row;  // warpgroup, first of the thread's two rows
  int n_keys;

  // What warpgroup `of` says of row r (j = 0) or r + 8 of this thread.
  __device__ float* share(int of, int j) const { return tops + of * kHeads + (row / 16 * 8 + row % 16) * 2 + j; }

  __device__ void load_queries(int token, int first_head) const {
    const int first = static_cast<int>(threadIdx.x) / kWarp * 8;
    const EightRows<false> q{reinterpret_cast<const std::byte*>(a.q + token * a.q_token + (first_head + first) * a.q_head), a.q_head * 4, a.n_heads - first_head - first, a.hd};
    uint4 units[kUnits];
    uint2 halves[kUnits];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      q.load(b, lane, units);
      q.round(units, halves);
      q.store(b, lane, halves, shared.queries() + first / 8 * kBlock);
    }
    fence_async();
    meet(1, kConsumers);
  }

  // Scores of all rows and half of the tile's keys.
  __device__ void multiply_keys(int tile, float (&s)[16]) const {
    const std::uint64_t q = computed_here(operand(shared.queries(), 16, kBlock));
    const std::uint64_t k = computed_here(operand(shared.tile(tile) + group * (kTile / 2), 16, kBlock));
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      const std::uint64_t step = (i / 4 * kPanel + i % 4 * 32) / 16;
      product_64x32(s, q + step, k + step, i > 0);
    }
  }

  // o += probabilities times half of the dimensions, for half of the keys: the own ones from registers, then the other warpgroup's.
  __device__ std::uint64_t values(int tile, int half) const {
    return computed_here(operand(shared.tile(tile) + half * (kTile / 2) + group * (kValues / 2 / 64 * kPanel), kPanel, kBlock));
  }
  __device__ void multiply_own_values(int tile, const std::uint32_t (&p)[8], float (&o)[128]) const {
    const std::uint64_t v = values(tile, group);
#pragma unroll
    for (int i = 0; i < 2; ++i) product_64x256(o, {p[2 * i], p[4 + 2 * i], p[2 * i + 1], p[4 + 2 * i + 1]}, v + i * 2 * kBlock / 16);
  }
  __device__ void multiply_other_values(int tile, float (&o)[128]) const {
    const std::uint64_t p = computed_here(operand(shared.probabilities() + (group ^ 1) * 64, 16, 1024)), v = values(tile, group ^ 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) product_64x256(o, p + i * 32 / 16, v + i * 2 * kBlock / 16);
  }

  // Scores to probabilities, two f16 each, of rows r (p[0..3]) and r + 8; returns what sums so far have to be multiplied by.
  __device__ float2 softmax(int tile, float (&s)[16], Running& state, std::uint32_t (&p)[8]) const {
    const float infinity = __int_as_float(0x7f800000);
    if ((tile + 1) * kTileKeys > n_keys) {
      const int first = tile * kTileKeys + group * 32 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (first + i / 4 * 8 + i % 2 >= n_keys) s[i] = -infinity;
    }
    float top[2] = {-infinity, -infinity};
#pragma unroll
    for (int i = 0; i < 16; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    // Of four lanes with the same rows two have the one, two the other from here on.
    const int mine = lane % 2;
    float most = fmaxf(mine == 0 ? top[0] : top[1], __shfl_xor_sync(kAll, mine == 0 ? top[1] : top[0], 1));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
    if (lane % 4 < 2) *share(group, mine) = most;
    meet(1, kConsumers);
    const float2 ours = *reinterpret_cast<const float2*>(share(0, 0)), theirs = *reinterpret_cast<const float2*>(share(1, 0));
    const float both[2] = {fmaxf(ours.x, theirs.x), fmaxf(ours.y, theirs.y)};
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float largest = both[j] * a.scale;
      const float next = largest > state.top[j] + kSlack ? largest : state.top[j];
      factor[j] = power_of_two(state.top[j] - next);
      state.top[j] = next;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto weight = [&](float score) { return power_of_two(math::fma(score, a.scale, kRaise - next)); };
        p[4 * j + i] = to_halves(weight(s[4 * i + 2 * j]), weight(s[4 * i + 2 * j + 1]));
        const float2 rounded = from_halves(p[4 * j + i]);
        sum = sum + (rounded.x + rounded.y);
      }
      state.sum[j] = math::fma(state.sum[j], factor[j], sum);
    }
    return {factor[0], factor[1]};
  }

  __device__ void store_probabilities(const std::uint32_t (&p)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t at = shared.probabilities() + swizzled(row + i / 4 * 8, group * 4 + i % 4) + lane % 4 * 4;
      store_shared(at, p[i]);
    }
    fence_async();
    meet(1, kConsumers);
  }

  // Of the last two tiles nobody waits for it, and what is said to a neighbour has to arrive before that ends.
  template <int Cluster>
  __device__ void release(int tile, int n_tiles) const {
    __syncwarp();
    if (lane == 0 && tile + 2 < n_tiles) {
      barrier_arrive(shared.empty(tile));
      if constexpr (Cluster == 2) barrier_arrive_there(neighbour(shared.empty(tile), cluster_rank() ^ 1));
    }
    __syncwarp();
  }

  // The producer fills one stage while the other is multiplied.
  template <int Cluster>
  __device__ void run(float (&o)[128], Running& state) const {
    const int n_tiles = (n_keys + kTileKeys - 1) / kTileKeys;
    float s[16] = {};
    std::uint32_t p[8];
    for (int tile = 0; tile < n_tiles; ++tile) {
      barrier_wait(shared.full(tile), tile / 2);
      products_begin();
      multiply_keys(tile, s);
      products_commit();
      products_wait<0>();
      pin(s);
      const float2 factor = softmax(tile, s, state, p);
      if (__any_sync(kAll, factor.x != 1.0f || factor.y != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i] = o[i] * (i / 2 % 2 == 0 ? factor.x : factor.y);
      }
      pin(o);
      products_begin();
      multiply_own_values(tile, p, o);
      products_commit();
      store_probabilities(p);
      multiply_other_values(tile, o);
      products_commit();
      products_wait<0>();
      pin(o);
      release<Cluster>(tile, n_tiles);
    }
  }

  // By way of shared memory: a thread's own values are two of a row, and stores of whole rows take half of the time. The tiles' memory is
  // free: all of this block have met, and the neighbour has what was copied from it.
  template <int Cluster>
  __device__ void write(const float (&o)[128], Running& state, int first_head) const {
    if constexpr (Cluster == 2) cluster_come();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float& sum = state.sum[j];
      sum = sum + __shfl_xor_sync(kAll, sum, 1);
      sum = sum + __shfl_xor_sync(kAll, sum, 2);
      if (lane % 4 == 0) *share(group, j) = sum;  // maxima are read before the last meeting
    }
    meet(1, kConsumers);
    if constexpr (Cluster == 2) cluster_go();
    const auto index = [&](int r) { return (static_cast<std::int64_t>(blockIdx.z) * a.n_heads + first_head + r) * a.n_splits + blockIdx.y; };
    const std::uint32_t sums = shared.tile(0) + group * (kValues / 2 * 4);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = row + 8 * j;
      if (group == 0 && lane % 4 == 0 && first_head + r < a.n_heads) a.stats[index(r)] = float2{state.top[j], *share(0, j) + *share(1, j)};
#pragma unroll
      for (int i = 0; i < 32; ++i)
        store_shared(sums + r * kSumsRow + i * 32 + lane % 4 * 8, uint2{__float_as_uint(o[4 * i + 2 * j]), __float_as_uint(o[4 * i + 2 * j + 1])});
    }
    fence_async();
    __syncwarp();
    const int r = row - lane / 4 + lane;  // one of the warp's sixteen
    if (lane < 16 && first_head + r < a.n_heads) {
      copy_out(a.sums + index(r) * kValues + group * (kValues / 2), sums + r * kSumsRow, kValues / 2 * 4);
      copies_out_wait();
    }
  }
};

// All threads of the block or cluster: barriers are there for those that have come, where there are two blocks once they went on.
template <int Cluster>
__device__ inline void come() {
  if constexpr (Cluster == 2)
    cluster_come();
  else
    meet(2, kConsumers + kProducers);
}

#endif  // MOEFLUX_WARPGROUPS

// Blocks: heads in 64s, splits, tokens.
template <bool F16, int Cluster>
__global__ void __launch_bounds__(kConsumers + kProducers, 1) split_kernel(const __grid_constant__ MlaArgs a) {
#ifdef MOEFLUX_WARPGROUPS
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const Shared shared{(shared_address(memory) + 1023u) / 1024u * 1024u};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.full(i), (Cluster == 2 ? 1 : 2) * kProducers / kWarp);  // warps with a half tile
      barrier_init(shared.empty(i), Cluster * kConsumers / kWarp);
    }
    barriers_done();
  }
  const int token = a.first_token + static_cast<int>(blockIdx.z), first_key = static_cast<int>(blockIdx.y) * kSplit;
  const int n_keys = min(kSplit, a.pos.get() + token + 1 - first_key), first_head = static_cast<int>(blockIdx.x) * kHeads;
  const int lane = threadIdx.x % kWarp;
  if (threadIdx.x >= kConsumers) {
    give_registers<kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x / kWarp) % (kProducers / kWarp), rank = Cluster == 2 ? static_cast<int>(cluster_rank()) : 0;
    const Producer<F16, Cluster> p{a, a.k + first_key * a.k_row * (F16 ? 2 : 4), n_keys, warp, lane, rank};
    // The position came before the step's first kernel, and fetching rows that are being written does no harm.
    for (int job = 0; job < kFetchAhead; ++job) p.fetch(job);
    begin_kernel();
    if (n_keys <= 0) return;  // all of a cluster
    come<Cluster>();
    p.run(shared);
    if constexpr (Cluster == 2) cluster_come(), cluster_go();  // the neighbour has what was copied from here
  } else {
    take_registers<kConsumerRegisters>();
    const int group = threadIdx.x / 128, row = static_cast<int>(threadIdx.x % 128 / kWarp) * 16 + lane / 4;
    float* tops = reinterpret_cast<float*>(memory + (shared.base - shared_address(memory)) + kTopsAt);
    const Consumer c{a, shared, tops, group, lane, row, n_keys};
    begin_kernel();
    if (n_keys <= 0) return;
    come<Cluster>();
    c.load_queries(token, first_head);
    if constexpr (Cluster == 2) cluster_go();
    float o[128] = {};
    Running state{{-__int_as_float(0x7f800000), -__int_as_float(0x7f800000)}, {0.0f, 0.0f}};
    c.template run<Cluster>(o, state);
    c.template write<Cluster>(o, state, first_head);
  }
#endif
}

constexpr int kMergeParts = 4, kMergeThreads = kMergeParts * kValues / 4;

// One row: part p of the threads adds splits p, p + 4, .. in order, then parts are added in order. Blocks: heads, tokens.
__global__ void __launch_bounds__(kMergeThreads) merge_splits_kernel(const __grid_constant__ MlaArgs a) {
  __shared__ float4 shared_sums[kMergeParts - 1][kValues / 4];
  __shared__ float shared_l[kMergeParts - 1];
  begin_kernel();
  const int token = a.first_token + static_cast<int>(blockIdx.y), head = blockIdx.x, n = (a.pos.get() + token) / kSplit + 1;
  const std::int64_t row = (static_cast<std::int64_t>(blockIdx.y) * a.n_heads + head) * a.n_splits;
  const float2* stats = a.stats + row;
  float top = -__int_as_float(0x7f800000);
  for (int i = threadIdx.x % kWarp; i < n; i += kWarp) top = fmaxf(top, __ldcg(&stats[i]).x);
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, step));
  const int part = threadIdx.x / (kValues / 4), d = threadIdx.x % (kValues / 4);
  const float4* sums = reinterpret_cast<const float4*>(a.sums + row * kValues) + d;
  float4 acc{0.0f, 0.0f, 0.0f, 0.0f};
  float l = 0.0f;
#pragma unroll 8
  for (int i = part; i < n; i += kMergeParts) {
    const float2 stat = __ldcg(&stats[i]);
    const float4 v = __ldcg(sums + static_cast<std::int64_t>(i) * (kValues / 4));
    const float weight = power_of_two(stat.x - top);
    l = math::fma(stat.y, weight, l);
    acc = {math::fma(v.x, weight, acc.x), math::fma(v.y, weight, acc.y), math::fma(v.z, weight, acc.z), math::fma(v.w, weight, acc.w)};
  }
  if (part > 0) {
    shared_sums[part - 1][d] = acc;
    if (d == 0) shared_l[part - 1] = l;
  }
  __syncthreads();
  if (part > 0) return;
#pragma unroll
  for (int p = 0; p < kMergeParts - 1; ++p) {
    const float4 v = shared_sums[p][d];
    acc = {acc.x + v.x, acc.y + v.y, acc.z + v.z, acc.w + v.w};
    l = l + shared_l[p];
  }
  *reinterpret_cast<float4*>(a.y + token * a.y_token + head * a.y_head + d * 4) = {acc.x / l, acc.y / l, acc.z / l, acc.w / l};
}

bool in_sixteens(const TensorView& v, std::int64_t element_bytes) {
  const auto per_unit = 16 / element_bytes;
  return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.stride(0) % per_unit == 0 && v.stride(1) % per_unit == 0;
}

bool has_warpgroups() {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the device's capability");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking for the device's capability");
  return major == 9 && minor == 0;  // these instructions are no part of later capabilities
}

bool fits(const Attention& op) {
  const std::int64_t hd = op.q.dim(2), n_heads = op.q.dim(1);
  if (op.precision != Precision::Fast || op.k.dim(1) != 1 || n_heads % 16 != 0) return false;
  if (!(op.scale > 0.0f) || hd <= kValues || hd > kWidth || hd % 16 != 0 || op.v.dim(2) != kValues) return false;
  if (op.k.data != op.v.data || op.k.stride(0) != op.v.stride(0) || op.window != 0 || !op.sinks.empty()) return false;
  return in_sixteens(op.q, 4) && in_sixteens(op.y, 4) && in_sixteens(op.k, op.k.dtype == DType::F16 ? 2 : 4) && has_warpgroups();
}

template <bool F16, int Cluster>
void launch_splits(CudaStream& s, const MlaArgs& a, dim3 blocks) {
  constexpr std::size_t kBytes = kSharedBytes + 1024;  // aligned by the kernel
  static_assert(kBytes <= 227u << 10);
  allow_shared(split_kernel<F16, Cluster>, kBytes);
  launch_clusters(s, "Attention: splits of a latent cache", split_kernel<F16, Cluster>, blocks, Cluster, kConsumers + kProducers, kBytes, a);
}

}  // namespace

bool run_latent_attention(CudaStream& s, const Attention& op) {
  if (!fits(op)) return false;
  constexpr float kLog2e = 1.44269504f;
  const bool f16 = op.k.dtype == DType::F16;
  MlaArgs a{};
  a.q = op.q.f32(), a.k = static_cast<const std::byte*>(op.k.data), a.y = op.y.f32();
  a.q_token = op.q.stride(0), a.q_head = op.q.stride(1), a.k_row = op.k.stride(0), a.y_token = op.y.stride(0), a.y_head = op.y.stride(1);
  a.n_heads = static_cast<int>(op.q.dim(1)), a.hd = static_cast<int>(op.q.dim(2));
  a.pos = s.position(op.pos0), a.scale = op.scale * kLog2e;
  // All splits of the last group: a recorded step is replayed at its other positions.
  const std::int64_t n_tokens = op.q.dim(0), n_groups = (op.pos0 + n_tokens - 1) / kGroupKeys + 1;
  a.n_splits = static_cast<int>(n_groups * (kGroupKeys / kSplit));
  const std::size_t rows = static_cast<std::size_t>(a.n_heads) * static_cast<std::size_t>(a.n_splits);  // of a token
  const std::size_t row_bytes = kValues * sizeof(float) + sizeof(float2);
  const auto at_once = std::min<std::int64_t>(n_tokens, std::max<std::int64_t>(1, static_cast<std::int64_t>(kScratchBytes / (rows * row_bytes))));
  a.sums = s.scratch_of<float>(Scratch::Partials, static_cast<std::size_t>(at_once) * rows * (row_bytes / sizeof(float)));
  a.stats = reinterpret_cast<float2*>(a.sums + static_cast<std::size_t>(at_once) * rows * kValues);
  const auto head_blocks = static_cast<unsigned>(ceil_div(a.n_heads, kHeads));
  const bool pairs = head_blocks % 2 == 0;
  const auto splits = f16 ? (pairs ? launch_splits<true, 2> : launch_splits<true, 1>) : (pairs ? launch_splits<false, 2> : launch_splits<false, 1>);
  for (std::int64_t t = 0; t < n_tokens; t += at_once) {
    const auto n = static_cast<unsigned>(std::min(at_once, n_tokens - t));
    a.first_token = static_cast<int>(t);
    splits(s, a, dim3(head_blocks, static_cast<unsigned>(a.n_splits), n));
    launch(s, "Attention: merging splits", merge_splits_kernel, dim3(static_cast<unsigned>(a.n_heads), n), kMergeThreads, 0, a);
  }
  return true;
}

}  // namespace moeflux::backend::cuda
