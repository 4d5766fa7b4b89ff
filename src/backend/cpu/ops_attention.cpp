// Attention: one task per query head, or per group of key tiles when a few queries meet a long context.
#include <algorithm>
#include <limits>

#include "backend/cpu/cpu_internal.h"

namespace moeflux::backend::cpu {
namespace {

constexpr std::int64_t kGroupKeys = Attention::kTile * Attention::kGroupTiles;

// The keys of one query: position p sees [begin, end).
struct KeyRange {
  std::int64_t begin, end;
  std::int64_t first_group() const noexcept { return begin / kGroupKeys; }
  std::int64_t n_groups() const noexcept { return (end - 1) / kGroupKeys - first_group() + 1; }
};

KeyRange keys_of(const Attention& op, std::int64_t t) noexcept {
  const std::int64_t p = op.pos0 + t;
  return {op.window > 0 ? std::max<std::int64_t>(0, p - op.window + 1) : 0, p + 1};
}

AttentionGroup group_args(const Attention& op, std::int64_t t, std::int64_t h, std::int64_t group,
                          float* scores) noexcept {
  const std::int64_t kv = h / (op.q.dim(1) / op.k.dim(1));
  const std::int64_t size = op.k.dtype == DType::F16 ? 2 : 4;
  const KeyRange keys = keys_of(op, t);
  AttentionGroup a;
  a.q = op.q.f32() + t * op.q.stride(0) + h * op.q.stride(1);
  a.k = static_cast<const std::byte*>(op.k.data) + kv * op.k.stride(1) * size;
  a.v = static_cast<const std::byte*>(op.v.data) + kv * op.v.stride(1) * size;
  a.k_stride = op.k.stride(0);
  a.v_stride = op.v.stride(0);
  a.f16 = op.k.dtype == DType::F16;
  a.head_dim = op.q.dim(2);
  a.v_dim = op.v.dim(2);
  a.j_begin = std::max(keys.begin, group * kGroupKeys);
  a.j_end = std::min(keys.end, (group + 1) * kGroupKeys);
  a.scale = op.scale;
  a.scores = scores;
  return a;
}

float* output(const Attention& op, std::int64_t t, std::int64_t h) noexcept {
  return op.y.f32() + t * op.y.stride(0) + h * op.y.stride(1);
}

const float* sink_of(const Attention& op, std::int64_t h) noexcept {
  return op.sinks.empty() ? nullptr : op.sinks.f32() + h;
}

// Heads that a task takes together: those of one kv head, up to 8, 4 where that gives too few tasks.
struct HeadSplit {
  std::int64_t per_task, tasks_per_kv, n_kv;
  std::int64_t tasks_per_token() const noexcept { return tasks_per_kv * n_kv; }
};

HeadSplit split_heads(const Attention& op, std::int64_t n_tokens_and_groups, int n_threads,
                      bool tiles) noexcept {
  const std::int64_t n_kv = op.k.dim(1), shared = op.q.dim(1) / n_kv;
  if (!tiles || shared < 2 || op.q.dim(2) % 32 != 0 || op.v.dim(2) % 32 != 0) return {1, shared, n_kv};
  const std::int64_t most = (shared + 7) / 8 * n_kv * n_tokens_and_groups >= n_threads ? 8 : 4;
  const std::int64_t n = (shared + most - 1) / most;
  return {(shared + n - 1) / n, n, n_kv};
}

constexpr std::int64_t kMaxHeads = 8;

// Tokens whose queries meet a tile of keys while it is in cache. Their states take 16 KiB each for eight heads of 256: they stay in the
// second-level cache beside the tile. Where the tile is ordered for them first, that has to pay.
constexpr std::int64_t kTokensPerTask = 8, kTokensPerOrderedTile = 32;

std::int64_t tokens_per_task(const KernelTable& k, const HeadSplit& split, std::int64_t n_tokens, int n_threads) noexcept {
  if (split.per_task == 1) return 1;
  const auto enough_tasks = [&](std::int64_t n) noexcept { return n_tokens * split.tasks_per_token() >= 4 * n_threads * n; };
  if (k.attention_tile != nullptr && enough_tasks(kTokensPerOrderedTile)) return kTokensPerOrderedTile;
  return enough_tasks(kTokensPerTask) ? kTokensPerTask : 1;
}

// Floats that kernels need for one tile.
std::int64_t tile_floats(const KernelTable& k, const Attention& op, std::int64_t n_tokens) noexcept {
  if (k.attention_tile == nullptr || n_tokens == 1) return kMaxHeads * Attention::kTile;
  return static_cast<std::int64_t>(attention_tile_scratch_bytes(op.q.dim(2), op.v.dim(2), n_tokens * kMaxHeads) / 4);
}

void clear(SoftmaxState& s, std::int64_t hd) noexcept {
  s.m = -std::numeric_limits<float>::infinity();
  s.l = 0.0f;
  std::fill_n(s.acc, hd, 0.0f);
}

// One head, or up to eight that share a kv head, over the keys of `a`; the states begin here.
void run_group(const KernelTable& k, const Attention& op, const HeadSplit& split, const AttentionGroup& a, std::int64_t n,
               SoftmaxState* out) noexcept {
  if (split.per_task == 1) return k.attention_group(a, out[0]);
  const int n_heads = n > 4 ? 8 : 4;
  for (int i = 0; i < n_heads; ++i) clear(out[i], a.v_dim);
  k.attention_heads(a, op.q.stride(1), static_cast<int>(n), out, n_heads);
}

void run_tile(const KernelTable& k, const AttentionTile& tile) noexcept {
  if (k.attention_tile != nullptr) return k.attention_tile(tile);
  for (int i = 0; i < tile.n; ++i) {
    const TileQuery& query = tile.queries[i];
    AttentionGroup a = tile.keys;
    a.q = query.q, a.j_begin = query.j_begin, a.j_end = query.j_end, a.cold = i == 0;
    k.attention_heads(a, tile.q_stride, tile.n_queries, query.state, tile.n_queries > 4 ? 8 : 4);
  }
}

// Heads [h, h + n) of one token over all its keys.
void attend_token(const KernelTable& k, const Attention& op, const HeadSplit& split, std::int64_t t, std::int64_t h, std::int64_t n,
                  float* scratch) noexcept {
  const std::int64_t hd = op.v.dim(2);
  SoftmaxState total[kMaxHeads], next[kMaxHeads];
  for (std::int64_t i = 0; i < kMaxHeads; ++i) {
    total[i].acc = scratch + kMaxHeads * Attention::kTile + i * hd;
    next[i].acc = total[i].acc + kMaxHeads * hd;
  }
  const KeyRange keys = keys_of(op, t);
  for (std::int64_t g = 0; g < keys.n_groups(); ++g) {
    run_group(k, op, split, group_args(op, t, h, keys.first_group() + g, scratch), n, g == 0 ? total : next);
    if (g > 0)
      for (std::int64_t i = 0; i < n; ++i) k.attention_merge(total[i], next[i], hd);
  }
  for (std::int64_t i = 0; i < n; ++i) k.attention_finish(total[i], sink_of(op, h + i), output(op, t, h + i), hd);
}

// The same for tokens [t0, t1), tile by tile: every token's own order of keys stays as it is.
void attend_tokens(const KernelTable& k, const Attention& op, std::int64_t t0, std::int64_t t1, std::int64_t h, std::int64_t n,
                   float* scratch) noexcept {
  const std::int64_t hd = op.v.dim(2);
  const int n_heads = n > 4 ? 8 : 4;
  SoftmaxState total[kTokensPerOrderedTile][kMaxHeads], next[kTokensPerOrderedTile][kMaxHeads];
  float* acc = scratch + tile_floats(k, op, t1 - t0);
  for (auto* states : {total, next})
    for (std::int64_t t = 0; t < t1 - t0; ++t)
      for (int i = 0; i < n_heads; ++i, acc += hd) states[t][i].acc = acc;
  const std::int64_t first = keys_of(op, t0).first_group(), last = (keys_of(op, t1 - 1).end - 1) / kGroupKeys;
  for (std::int64_t g = first; g <= last; ++g) {
    const auto states_of = [&](std::int64_t t) noexcept { return g == keys_of(op, t).first_group() ? total[t - t0] : next[t - t0]; };
    for (std::int64_t t = t0; t < t1; ++t)
      for (int i = 0; i < n_heads; ++i) clear(states_of(t)[i], hd);
    for (std::int64_t tile = g * kGroupKeys; tile < (g + 1) * kGroupKeys; tile += Attention::kTile) {
      TileQuery queries[kTokensPerOrderedTile];
      AttentionTile all;
      all.queries = queries;
      for (std::int64_t t = t0; t < t1; ++t) {
        AttentionGroup a = group_args(op, t, h, g, scratch);
        a.j_begin = std::max(a.j_begin, tile);
        a.j_end = std::min(a.j_end, tile + Attention::kTile);
        if (a.j_begin >= a.j_end) continue;
        queries[all.n] = {a.q, a.j_begin, a.j_end, states_of(t)};
        if (all.n++ > 0) a.j_begin = std::min(a.j_begin, all.keys.j_begin), a.j_end = std::max(a.j_end, all.keys.j_end);
        all.keys = a;
      }
      if (all.n == 0) continue;
      all.q_stride = op.q.stride(1);
      all.n_queries = static_cast<int>(n);
      all.next_end = keys_of(op, t1 - 1).end;
      run_tile(k, all);
    }
    for (std::int64_t t = t0; t < t1; ++t)
      if (const KeyRange keys = keys_of(op, t); g > keys.first_group() && g * kGroupKeys < keys.end)
        for (std::int64_t i = 0; i < n; ++i) k.attention_merge(total[t - t0][i], next[t - t0][i], hd);
  }
  for (std::int64_t t = t0; t < t1; ++t)
    for (std::int64_t i = 0; i < n; ++i) k.attention_finish(total[t - t0][i], sink_of(op, h + i), output(op, t, h + i), hd);
}

}  // namespace

// A task computes all groups of its heads in order, for one token or, where keys would be read again for every token, for a few;
// or one group when there are too few queries for the threads and another pass merges them.
void CpuBackend::execute(Stream& stream, const Attention& op) {
  auto& s = static_cast<CpuStream&>(stream);
  const std::int64_t n_tokens = op.q.dim(0), n_heads = op.q.dim(1), hd = op.v.dim(2);
  const std::int64_t most_groups = keys_of(op, n_tokens - 1).n_groups();
  const HeadSplit split =
      split_heads(op, n_tokens * most_groups, pool_.size(), k_.attention_heads != nullptr);
  const std::int64_t shared = n_heads / split.n_kv, per_token = split.tasks_per_token();
  const std::int64_t per_task = tokens_per_task(k_, split, n_tokens, pool_.size());
  for (Scratch& w : s.workers) w.get(static_cast<std::size_t>(tile_floats(k_, op, per_task) + kMaxHeads * 2 * per_task * hd) * 4);

  const auto first_head = [&](std::int64_t i) noexcept {
    return i / split.tasks_per_kv * shared + i % split.tasks_per_kv * split.per_task;
  };
  const auto heads_of = [&](std::int64_t i) noexcept {
    return std::min(split.per_task, shared - i % split.tasks_per_kv * split.per_task);
  };
  const auto scratch_of = [&](int worker) noexcept {
    return reinterpret_cast<float*>(s.workers[static_cast<std::size_t>(worker)].get(0));
  };

  if (most_groups == 1 || n_tokens * per_token >= 4 * pool_.size()) {
    pool_.run((n_tokens + per_task - 1) / per_task * per_token, [&](std::int64_t i, int worker) noexcept {
      // Late tokens see the most keys: they go first, so that no thread is left with a long task at the end.
      const std::int64_t end = n_tokens - i / per_token * per_task, begin = std::max<std::int64_t>(0, end - per_task);
      const std::int64_t h = first_head(i % per_token), n = heads_of(i % per_token);
      if (end - begin > 1)
        attend_tokens(k_, op, begin, end, h, n, scratch_of(worker));
      else
        attend_token(k_, op, split, begin, h, n, scratch_of(worker));
    });
    return;
  }

  // Partial results: per (query, group) m, l and acc.
  const std::int64_t stride = hd + 2, queries = n_tokens * n_heads;
  auto* partials =
      reinterpret_cast<float*>(s.partials.get(static_cast<std::size_t>(queries * most_groups * stride) * 4));
  const auto partial = [&](std::int64_t t, std::int64_t h, std::int64_t g) noexcept {
    return partials + ((t * n_heads + h) * most_groups + g) * stride;
  };
  pool_.run(n_tokens * per_token * most_groups, [&](std::int64_t i, int worker) noexcept {
    const std::int64_t g = i % most_groups, task = i / most_groups, t = task / per_token;
    const std::int64_t h = first_head(task % per_token), n = heads_of(task % per_token);
    const KeyRange keys = keys_of(op, t);
    if (g >= keys.n_groups()) return;
    float* scores = scratch_of(worker);
    SoftmaxState part[kMaxHeads];
    for (std::int64_t k = 0; k < kMaxHeads; ++k)
      part[k].acc = k < n ? partial(t, h + k, g) + 2 : scores + kMaxHeads * Attention::kTile + k * hd;
    run_group(k_, op, split, group_args(op, t, h, keys.first_group() + g, scores), n, part);
    for (std::int64_t k = 0; k < n; ++k) {
      partial(t, h + k, g)[0] = part[k].m;
      partial(t, h + k, g)[1] = part[k].l;
    }
  });
  pool_.run(queries, [&](std::int64_t q, int) noexcept {
    float* p = partials + q * most_groups * stride;
    SoftmaxState total{p[0], p[1], p + 2};
    for (std::int64_t g = 1; g < keys_of(op, q / n_heads).n_groups(); ++g) {
      float* n = p + g * stride;
      k_.attention_merge(total, SoftmaxState{n[0], n[1], n + 2}, hd);
    }
    k_.attention_finish(total, sink_of(op, q % n_heads), output(op, q / n_heads, q % n_heads), hd);
  });
}

}  // namespace moeflux::backend::cpu
