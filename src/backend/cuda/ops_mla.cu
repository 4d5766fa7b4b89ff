// Attention over a latent cache on the tensor cores: all heads share a key of up to 576 values, whose first 512 are the value.
//
// Keys are split at absolute positions, kSplit each. A block has 64 heads of one token and one split; two blocks of a cluster have the
// same split and read half of its rows each. Its four warpgroups pass tiles on: the producer reads rows, rounds them to f16, stores them in
// shared memory and has them copied to the neighbour's; the scorer multiplies queries and keys and makes probabilities of that; two adders
// multiply those and the values, half of the dimensions each. Tiles pass through two stages, so scores of a tile are computed while values
// of the one before are added. What is left of a split is its maximum, its sum of probabilities and its result in f16; a second kernel
// merges a row's splits. What a row becomes depends on its own position alone.
//
// What limits: what a stage goes through (stores, copy to the neighbour, scores, probabilities, sums) and the producer's two trips to global
// memory a tile; loads, stores, copies and operands of products all pass one memory of 128 bytes a cycle, 3300 cycles a tile. Nothing may
// wait for global memory between tiles (see warpgroup.h's barriers).
//
// Factors of products are f16 (queries, keys, probabilities), so is the result of a split; sums are f32. Scores and maxima are in powers of
// two.
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
constexpr int kTile = kTileKeys / 8 * kBlock;  // bytes of a tile of keys, and of the queries
constexpr int kAdders = 256, kScorers = 128, kProducers = 128, kThreads = kAdders + kScorers + kProducers;
constexpr int kAdderRegisters = 160, kScorerRegisters = 64, kProducerRegisters = 128;  // of a thread; all threads start with 128
static_assert(kAdders * kAdderRegisters + kScorers * kScorerRegisters + kProducers * kProducerRegisters <= 65536);
constexpr int kGroupKeys = static_cast<int>(Attention::kTile * Attention::kGroupTiles);
static_assert(kGroupKeys % kSplit == 0, "recorded steps are replayed inside a group");
constexpr std::size_t kScratchBytes = 64u << 20;  // partial results of the tokens computed together: little enough to stay in the cache

// Bytes of shared memory behind the next multiple of 1024: queries (in the end, the result), two tiles, probabilities, factors and sums of
// rows, barriers.
constexpr int kProbabilitiesAt = 3 * kTile, kFactorsAt = kProbabilitiesAt + kHeads * kTileKeys * 2, kBarriersAt = kFactorsAt + 2 * kHeads * 4,
              kSharedBytes = kBarriersAt + 6 * 8;
constexpr int kHalfRow = kValues / 2 * 2;   // bytes of an adder's share of a row's result
constexpr int kResult = kHeads * kHalfRow;  // of a block's result: all rows of the one adder, then of the other
static_assert(2 * kResult <= kTile);

struct MlaArgs {
  const float* q;
  const std::byte* k;
  float* y;
  std::byte* results;  // f16 [tokens of this launch, splits, heads / 64, 2 halves, 64 rows, 256]: unit u of row r at place u ^ (r % 8)
  float2* stats;       // [tokens of this launch, heads, splits]: maximum, sum of probabilities
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
  __device__ std::uint32_t scored() const { return base + kBarriersAt + 32; }  // a tile's probabilities are there
  __device__ std::uint32_t added() const { return base + kBarriersAt + 40; }   // and were read
};

// ---- rows from global memory to shared memory

// A warp brings eight rows, which lie together, in batches of 16-byte units a thread: all of a batch is under way at once. (Batches that
// overlap are of no use: there are six counters of a warp to wait for loads, and it waits for the last one.)
template <bool F16>
struct EightRows {
  const std::byte* first;
  std::int64_t pitch;  // bytes
  int n, hd;           // rows that are there; others, and values from hd on, become zeros

  static constexpr int kUnits = F16 ? 18 : 36;  // of a lane

  // f32: nine units of every lane are two rows, of which the fifth unit has the end of the one and the begin of the other.
  static __device__ int row_of(int unit, int lane) {
    if constexpr (F16) return (unit * kWarp + lane) / (kWidth / 8);
    const int in_pair = unit % 9;
    return unit / 9 * 2 + (in_pair > 4 || (in_pair == 4 && lane >= 16) ? 1 : 0);
  }
  static __device__ int column_of(int unit, int lane) {  // in units
    if constexpr (F16) return (unit * kWarp + lane) % (kWidth / 8);
    return unit % 9 * kWarp + lane - (row_of(unit, lane) & 1) * (kWidth / 4);
  }

  template <int From, int N>
  __device__ void load(int lane, uint4 (&to)[N]) const {
    static_assert(From + N <= kUnits);
    const int in_warp = computed_here(lane) & 31;
    const auto at = [&](int i) { return reinterpret_cast<const uint4*>(first + row_of(i, in_warp) * pitch) + column_of(i, in_warp); };
    if (n >= 8 && hd == kWidth) {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = __ldcg(at(From + i));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        to[i] = uint4{0, 0, 0, 0};
        if (row_of(From + i, in_warp) < n && column_of(From + i, in_warp) * (F16 ? 8 : 4) < hd) to[i] = __ldcg(at(From + i));
      }
    }
  }

  // To eight rows at `to`.
  template <int From, int N>
  static __device__ void store(int lane, const uint4 (&from)[N], std::uint32_t to)
    requires F16
  {
    const int in_warp = computed_here(lane) & 31;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int c = column_of(From + i, in_warp);
      store_shared(to + c / 8 * kPanel + swizzled(row_of(From + i, in_warp), c % 8), from[i]);
    }
  }
  // Written so that a row takes two instructions for its place and its units none.
  template <int From, int N>
  static __device__ void store(int lane, const uint2 (&from)[N], std::uint32_t to)
    requires(!F16)
  {
    const std::uint32_t in_warp = static_cast<std::uint32_t>(computed_here(lane)) & 31u, in_panel = in_warp / 2 % 8 * 16;
    const std::uint32_t begin = to + in_warp / 16 * kPanel + in_warp % 2 * 8;
    const auto place = [&](std::uint32_t row) { return begin + row * 128 + (in_panel ^ row * 16); };
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const std::uint32_t u = (From + i) % 9, row = (From + i) / 9 * 2;
      const std::uint32_t even = place(row) + u * 2 * kPanel, odd = place(row + 1) + u * 2 * kPanel - 9 * kPanel;
      store_shared(u < 4 || (u == 4 && in_warp < 16) ? even : odd, from[i]);
    }
  }

  template <int N>
  static __device__ void round(const uint4 (&from)[N], uint2 (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      to[i] = uint2{to_halves(__uint_as_float(from[i].x), __uint_as_float(from[i].y)), to_halves(__uint_as_float(from[i].z), __uint_as_float(from[i].w))};
  }
};

// ---- the producer

constexpr int kFetchAhead = 1;  // half tiles that are on their way from memory to the second-level cache; with two it holds too much

template <bool F16, int Cluster>
struct Producer {
  const MlaArgs& a;
  const std::byte* rows;  // of the split
  int n_keys;             // of the split that the token sees
  int warp, lane, rank;

  static constexpr int kBatch = 18;  // f32: half of a job
  using Rows = EightRows<F16>;

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

  // Between a stage's release and its next tile there is as little as can be: of f32, one batch is here as f16, the other under way. Loads
  // come behind the fence: it waits for those before it.
  __device__ void run(const Shared& shared) const {
    const int n_jobs = (n_keys + kTileKeys - 1) / kTileKeys * kJobsPerTile;
    uint4 units[kBatch];
    uint2 halves[kBatch];
    begin(0, units, halves);
    for (int job = 0; job < n_jobs; ++job) {
      const int t = tile(job);
      const std::uint32_t to = shared.tile(t) + first_row(job) / 8 * kBlock;
      if (!F16 && job + kFetchAhead < n_jobs) fetch(job + kFetchAhead);
      if (t >= 2) barrier_wait(shared.empty(t), t / 2 - 1);
      if constexpr (F16) {
        Rows::template store<0>(lane, units, to);
      } else {
        Rows::template store<0>(lane, halves, to);
        Rows::round(units, halves);
        Rows::template store<kBatch>(lane, halves, to);
      }
      fence_async();
      __syncwarp();
      if (Cluster == 2 && job == 0) cluster_go();
      if (lane == 0) pass(shared, t, to);
      __syncwarp();
      if (F16 && job + kFetchAhead < n_jobs) fetch(job + kFetchAhead);  // a job is one batch, and soon there
      if (job + 1 < n_jobs) begin(job + 1, units, halves);
    }
  }

  __device__ void begin(int job, uint4 (&units)[kBatch], uint2 (&halves)[kBatch]) const {
    const Rows r = rows_of(job);
    r.template load<0>(lane, units);
    if constexpr (!F16) {
      Rows::round(units, halves);
      r.template load<kBatch>(lane, units);
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

// ---- queries

// All but the producer bring them: of eight rows an adder's warp has the first units, and a warp of the scorer the others of twice eight,
// so that all are under way at once.
constexpr int kAdderUnits = 30, kScorerUnits = EightRows<false>::kUnits - kAdderUnits;

template <int From, int N>
__device__ void load_queries(const MlaArgs& a, int token, int first_head, int eight, int lane, uint4 (&units)[N]) {
  const int first = first_head + eight * 8;
  const EightRows<false> q{reinterpret_cast<const std::byte*>(a.q + token * a.q_token + first * a.q_head), a.q_head * 4, a.n_heads - first, a.hd};
  q.load<From>(lane, units);
}
template <int From, int N>
__device__ void store_queries(const Shared& shared, int eight, int lane, const uint4 (&units)[N]) {
  uint2 halves[N];
  EightRows<false>::round(units, halves);
  EightRows<false>::store<From>(lane, halves, shared.queries() + eight * kBlock);
}

// ---- the scorer

// A row's state, for the two rows r and r + 8 of a thread: 2^top is what probabilities are relative to, `sum` is the thread's own share.
// A tile's maximum may be above it by kSlack, so that sums have to be multiplied rarely.
struct Running {
  float top[2], sum[2];
};
constexpr float kSlack = 3.0f;
static_assert(kSlack + kRaise < 16.0f, "f16 ends at 2^16");

struct Scorer {
  const MlaArgs& a;
  const Shared& shared;
  float* factors;  // shared: [kHeads] what sums so far have to be multiplied by, [kHeads] what the last ones have to be
  int lane, row;   // first of the thread's two rows
  int n_keys;

  __device__ void bring_queries(int token, int first_head) const {
    const int first = static_cast<int>(threadIdx.x - kAdders) / kWarp * 2;
    uint4 units[2][kScorerUnits];
#pragma unroll
    for (int i = 0; i < 2; ++i) load_queries<kAdderUnits>(a, token, first_head, first + i, lane, units[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) store_queries<kAdderUnits>(shared, first + i, lane, units[i]);
    fence_async();
  }

  __device__ void multiply_keys(int tile, float (&s)[32]) const {
    const std::uint64_t q = computed_here(operand(shared.queries(), 16, kBlock)), k = computed_here(operand(shared.tile(tile), 16, kBlock));
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      const std::uint64_t step = (i / 4 * kPanel + i % 4 * 32) / 16;
      product_64x64(s, q + step, k + step, i > 0);
    }
  }

  // Scores to probabilities, two f16 each, of rows r (p[0..7]) and r + 8.
  __device__ void softmax(int tile, float (&s)[32], Running& state, float (&factor)[2], std::uint32_t (&p)[16]) const {
    const float infinity = __int_as_float(0x7f800000);
    if ((tile + 1) * kTileKeys > n_keys) {
      const int first = tile * kTileKeys + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (first + i / 4 * 8 + i % 2 >= n_keys) s[i] = -infinity;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float most = -infinity;
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(s[4 * i + 2 * j], s[4 * i + 2 * j + 1]));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
      const float largest = most * a.scale;
      const float next = largest > state.top[j] + kSlack ? largest : state.top[j];
      factor[j] = power_of_two(state.top[j] - next);
      state.top[j] = next;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto weight = [&](float score) { return power_of_two(math::fma(score, a.scale, kRaise - next)); };
        p[8 * j + i] = to_halves(weight(s[4 * i + 2 * j]), weight(s[4 * i + 2 * j + 1]));
        const float2 rounded = from_halves(p[8 * j + i]);
        sum = sum + (rounded.x + rounded.y);
      }
      state.sum[j] = math::fma(state.sum[j], factor[j], sum);
    }
  }

  // For the adders, once they are done with those of the tile before.
  __device__ void pass(int tile, const float (&factor)[2], const std::uint32_t (&p)[16]) const {
    if (tile > 0) barrier_wait(shared.added(), tile - 1);
#pragma unroll
    for (int i = 0; i < 16; ++i) store_shared(shared.probabilities() + swizzled(row + i / 8 * 8, i % 8) + lane % 4 * 4, p[i]);
    if (lane % 4 == 0) factors[row] = factor[0], factors[row + 8] = factor[1];
  }

  __device__ void run(Running& state) const {
    const int n_tiles = (n_keys + kTileKeys - 1) / kTileKeys;
    float s[32] = {}, factor[2];
    std::uint32_t p[16];
    for (int tile = 0; tile < n_tiles; ++tile) {
      barrier_wait(shared.full(tile), tile / 2);
      products_begin();
      multiply_keys(tile, s);
      products_commit();
      products_wait<0>();
      pin(s);
      softmax(tile, s, state, factor, p);
      pass(tile, factor, p);
      if (tile + 1 == n_tiles) finish(state);
      fence_async();
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.scored());
      __syncwarp();
    }
  }

  __device__ void finish(Running& state) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float& sum = state.sum[j];
      sum = sum + __shfl_xor_sync(kAll, sum, 1);
      sum = sum + __shfl_xor_sync(kAll, sum, 2);
      if (lane % 4 == 0) factors[kHeads + row + 8 * j] = 1.0f / sum;
    }
  }

  __device__ void write(const Running& state, int first_head) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = first_head + row + 8 * j;
      if (lane % 4 == 0 && head < a.n_heads)
        a.stats[(static_cast<std::int64_t>(blockIdx.z) * a.n_heads + head) * a.n_splits + blockIdx.y] = float2{state.top[j], state.sum[j]};
    }
  }
};

// ---- the adders

struct Adder {
  const MlaArgs& a;
  const Shared& shared;
  const float* factors;
  int group, lane, row;  // warpgroup, first of the thread's two rows
  int n_keys;

  __device__ void bring_queries(int token, int first_head) const {
    const int eight = static_cast<int>(threadIdx.x) / kWarp;
    uint4 units[kAdderUnits];
    load_queries<0>(a, token, first_head, eight, lane, units);
    store_queries<0>(shared, eight, lane, units);
    fence_async();
  }

  // Of the last two tiles nobody waits for it, and what is said to a neighbour has to arrive before that ends.
  template <int Cluster>
  __device__ void release(int tile, int n_tiles) const {
    __syncwarp();
    if (lane == 0 && tile + 1 < n_tiles) {
      barrier_arrive(shared.added());
      if (tile + 2 < n_tiles) {
        barrier_arrive(shared.empty(tile));
        if constexpr (Cluster == 2) barrier_arrive_there(neighbour(shared.empty(tile), cluster_rank() ^ 1));
      }
    }
    __syncwarp();
  }

  // o += probabilities times half of the dimensions.
  template <int Cluster>
  __device__ void run(float (&o)[2][64]) const {
    const int n_tiles = (n_keys + kTileKeys - 1) / kTileKeys;
    for (int tile = 0; tile < n_tiles; ++tile) {
      barrier_wait(shared.scored(), tile);
      barrier_wait(shared.full(tile), tile / 2);  // has come, but nothing else says to this thread that the neighbour's rows are there
      const float2 factor{factors[row], factors[row + 8]};
      if (__any_sync(kAll, factor.x != 1.0f || factor.y != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128; ++i) o[i / 64][i % 64] = o[i / 64][i % 64] * (i / 2 % 2 == 0 ? factor.x : factor.y);
      }
      pin(o[0]), pin(o[1]);
      products_begin();
      const std::uint64_t p = computed_here(operand(shared.probabilities(), 16, 1024));
      const std::uint64_t v = computed_here(operand(shared.tile(tile) + group * (kValues / 2 / 64 * kPanel), kPanel, kBlock));
#pragma unroll
      for (int i = 0; i < kTileKeys / 16; ++i) {
        product_64x128(o[0], p + i * 32 / 16, v + i * 2 * kBlock / 16);
        product_64x128(o[1], p + i * 32 / 16, v + (i * 2 * kBlock + 2 * kPanel) / 16);
      }
      products_commit();
      products_wait<0>();
      pin(o[0]), pin(o[1]);
      release<Cluster>(tile, n_tiles);
    }
  }

  // By way of shared memory, one copy a warp: a thread's own values are two of a row. The queries' place is free: their last use is behind
  // the last probabilities.
  __device__ void write(const float (&o)[2][64]) const {
    const std::uint32_t rows = shared.queries() + group * kResult;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = row + 8 * j;
      const float factor = factors[kHeads + r];
#pragma unroll
      for (int i = 0; i < 32; ++i)
        store_shared(rows + r * kHalfRow + ((i ^ (r & 7)) << 4) + lane % 4 * 4, to_halves(o[i / 16][i % 16 * 4 + 2 * j] * factor, o[i / 16][i % 16 * 4 + 2 * j + 1] * factor));
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
      const std::int64_t block = (static_cast<std::int64_t>(blockIdx.z) * a.n_splits + blockIdx.y) * gridDim.x + blockIdx.x;
      const int first = group * kResult + row / 16 * 16 * kHalfRow;
      copy_out(a.results + block * (2 * kResult) + first, shared.queries() + first, 16 * kHalfRow);
      copies_out_wait();
    }
    __syncwarp();
  }
};

// All threads of the block or cluster: barriers are there for those that have come, where there are two blocks once they went on.
template <int Cluster>
__device__ inline void come() {
  if constexpr (Cluster == 2)
    cluster_come();
  else
    meet(2, kThreads);
}

#endif  // MOEFLUX_WARPGROUPS

// Blocks: heads in 64s, splits, tokens.
template <bool F16, int Cluster>
__global__ void __launch_bounds__(kThreads, 1) split_kernel(const __grid_constant__ MlaArgs a) {
#ifdef MOEFLUX_WARPGROUPS
  extern __shared__ __align__(1024) std::uint8_t memory[];
  const Shared shared{(shared_address(memory) + 1023u) / 1024u * 1024u};
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.full(i), (Cluster == 2 ? 1 : 2) * kProducers / kWarp);  // warps with a half tile
      barrier_init(shared.empty(i), Cluster * kAdders / kWarp);
    }
    barrier_init(shared.scored(), kScorers / kWarp);
    barrier_init(shared.added(), kAdders / kWarp);
    barriers_done();
  }
  const int token = a.first_token + static_cast<int>(blockIdx.z), first_key = static_cast<int>(blockIdx.y) * kSplit;
  const int pos = a.pos.get(), n_keys = min(kSplit, pos + token + 1 - first_key), first_head = static_cast<int>(blockIdx.x) * kHeads;
  const int lane = threadIdx.x % kWarp, row = static_cast<int>(threadIdx.x % 128 / kWarp) * 16 + lane / 4;
  float* factors = reinterpret_cast<float*>(memory + (shared.base - shared_address(memory)) + kFactorsAt);
  if (n_keys <= 0) {  // all of a cluster
    begin_kernel();
    return;
  }
  come<Cluster>();
  if (threadIdx.x >= kAdders + kScorers) {
    give_registers<kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x / kWarp) % (kProducers / kWarp), rank = Cluster == 2 ? static_cast<int>(cluster_rank()) : 0;
    const Producer<F16, Cluster> p{a, a.k + first_key * a.k_row * (F16 ? 2 : 4), n_keys, warp, lane, rank};
    // The position came before the step's first kernel, and rows of the cache before this op's tokens before this step: only a split with
    // others has to wait for them. (Fetching rows that are being written does no harm.)
    const bool waits = first_key + kSplit > pos;
    for (int job = 0; job < kFetchAhead; ++job) p.fetch(job);
    if (waits) wait_inputs();
    p.run(shared);
  } else if (threadIdx.x >= kAdders) {
    give_registers<kScorerRegisters>();
    const Scorer c{a, shared, factors, lane, row, n_keys};
    begin_kernel();
    c.bring_queries(token, first_head);
    meet(1, kAdders + kScorers);
    if constexpr (Cluster == 2) cluster_go();
    Running state{{-__int_as_float(0x7f800000), -__int_as_float(0x7f800000)}, {0.0f, 0.0f}};
    c.run(state);
    c.write(state, first_head);
  } else {
    take_registers<kAdderRegisters>();
    const Adder c{a, shared, factors, static_cast<int>(threadIdx.x / 128), lane, row, n_keys};
    begin_kernel();
    c.bring_queries(token, first_head);
    meet(1, kAdders + kScorers);
    if constexpr (Cluster == 2) cluster_go();
    float o[2][64] = {};
    c.template run<Cluster>(o);
    c.write(o);
  }
  if constexpr (Cluster == 2) cluster_come(), cluster_go();  // the neighbour has what was copied from here
#endif
}

constexpr int kMergeWarps = 8, kMergeBatch = 8;

// Half of a row: warp w of the threads adds splits w, w + 8, .. in order, then warps are added in order. Blocks: halves of heads, tokens.
__global__ void __launch_bounds__(kMergeWarps * kWarp) merge_splits_kernel(const __grid_constant__ MlaArgs a) {
  __shared__ float4 shared_sums[kMergeWarps][kValues / 2 / 4];
  __shared__ float shared_l[kMergeWarps];
  const int head = blockIdx.x / 2, half = blockIdx.x % 2, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int token = a.first_token + static_cast<int>(blockIdx.y), n = (a.pos.get() + token) / kSplit + 1;
  const float2* stats = a.stats + (static_cast<std::int64_t>(blockIdx.y) * a.n_heads + head) * a.n_splits;
  const int head_blocks = (a.n_heads + kHeads - 1) / kHeads;
  const std::byte* results = a.results + (static_cast<std::int64_t>(blockIdx.y) * a.n_splits * head_blocks + head / kHeads) * (2 * kResult) + half * kResult +
                             head % kHeads * kHalfRow + (lane ^ (head & 7)) * 16;
  float2 stat[kMergeBatch];
  uint4 part[kMergeBatch];
  const auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < kMergeBatch; ++k) {
      const int i = first + k * kMergeWarps;
      stat[k] = float2{minus_inf(), 0.0f}, part[k] = uint4{0, 0, 0, 0};  // weighs nothing
      if (i >= n) continue;
      stat[k] = __ldcg(stats + i);
      part[k] = __ldcg(reinterpret_cast<const uint4*>(results + static_cast<std::int64_t>(i) * head_blocks * (2 * kResult)));
    }
  };
  begin_kernel();
  load(warp);
  float top = minus_inf(), l = 0.0f, acc[8] = {};
  for (int i = lane; i < n; i += kWarp) top = fmaxf(top, __ldcg(stats + i).x);
#pragma unroll
  for (int step = 16; step >= 1; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, step));
  for (int first = warp; first < n; first += kMergeBatch * kMergeWarps) {
    if (first != warp) load(first);
#pragma unroll
    for (int k = 0; k < kMergeBatch; ++k) {
      const float weight = power_of_two(stat[k].x - top) * stat[k].y;
      l = l + weight;
      const std::uint32_t two[4] = {part[k].x, part[k].y, part[k].z, part[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = from_halves(two[i]);
        acc[2 * i] = math::fma(v.x, weight, acc[2 * i]), acc[2 * i + 1] = math::fma(v.y, weight, acc[2 * i + 1]);
      }
    }
  }
  shared_sums[warp][lane * 2] = {acc[0], acc[1], acc[2], acc[3]}, shared_sums[warp][lane * 2 + 1] = {acc[4], acc[5], acc[6], acc[7]};
  if (lane == 0) shared_l[warp] = l;
  __syncthreads();
  float sum = 0.0f, divisor = 0.0f;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) sum = sum + reinterpret_cast<const float*>(shared_sums[w])[threadIdx.x], divisor = divisor + shared_l[w];
  a.y[token * a.y_token + head * a.y_head + half * (kValues / 2) + threadIdx.x] = sum / divisor;
}
static_assert(kMergeWarps * kWarp == kValues / 2);

bool in_sixteens(const TensorView& v, std::int64_t element_bytes) {
  const auto per_unit = 16 / element_bytes;
  return reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0 && v.stride(0) % per_unit == 0 && v.stride(1) % per_unit == 0;
}

bool fits(const Attention& op) {
  const std::int64_t hd = op.q.dim(2), n_heads = op.q.dim(1);
  if (op.precision != Precision::Fast || op.k.dim(1) != 1 || n_heads % 16 != 0) return false;
  if (!(op.scale > 0.0f) || hd <= kValues || hd > kWidth || hd % 16 != 0 || op.v.dim(2) != kValues) return false;
  if (op.k.data != op.v.data || op.k.stride(0) != op.v.stride(0) || op.window != 0 || !op.sinks.empty()) return false;
  return in_sixteens(op.q, 4) && in_sixteens(op.y, 4) && in_sixteens(op.k, op.k.dtype == DType::F16 ? 2 : 4);
}

template <bool F16, int Cluster>
void launch_splits(CudaStream& s, const MlaArgs& a, dim3 blocks) {
  constexpr std::size_t kBytes = kSharedBytes + 1024;  // aligned by the kernel
  static_assert(kBytes <= 227u << 10);
  allow_shared(split_kernel<F16, Cluster>, kBytes);
  launch_clusters(s, "Attention: splits of a latent cache", split_kernel<F16, Cluster>, blocks, Cluster, kThreads, kBytes, a);
}

}  // namespace

bool run_latent_attention(CudaStream& s, const Attention& op) {
  if (!s.traits.warpgroups || !fits(op)) return false;
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
  const auto head_blocks = static_cast<unsigned>(ceil_div(a.n_heads, kHeads));
  const std::size_t rows = std::size_t{head_blocks} * kHeads * static_cast<std::size_t>(a.n_splits);  // of a token
  constexpr std::size_t kRowBytes = 2 * kHalfRow + sizeof(float2);
  const auto at_once = std::min<std::int64_t>(n_tokens, std::max<std::int64_t>(1, static_cast<std::int64_t>(kScratchBytes / (rows * kRowBytes))));
  const auto rows_at_once = static_cast<std::size_t>(at_once) * rows;
  a.results = s.scratch(Scratch::Partials, rows_at_once * kRowBytes);
  a.stats = reinterpret_cast<float2*>(a.results + rows_at_once * (2 * kHalfRow));
  const bool pairs = head_blocks % 2 == 0;
  const auto splits = f16 ? (pairs ? launch_splits<true, 2> : launch_splits<true, 1>) : (pairs ? launch_splits<false, 2> : launch_splits<false, 1>);
  for (std::int64_t t = 0; t < n_tokens; t += at_once) {
    const auto n = static_cast<unsigned>(std::min(at_once, n_tokens - t));
    a.first_token = static_cast<int>(t);
    splits(s, a, dim3(head_blocks, static_cast<unsigned>(a.n_splits), n));
    launch(s, "Attention: merging splits", merge_splits_kernel, dim3(static_cast<unsigned>(2 * a.n_heads), n), kMergeWarps * kWarp, 0, a);
  }
  return true;
}

}  // namespace moeflux::backend::cuda
