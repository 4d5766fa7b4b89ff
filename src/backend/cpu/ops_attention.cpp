// Attention: one task per query head, or per group of key tiles when a few queries meet a long context.
#include <algorithm>

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

AttentionGroup group_args(const Attention& op, std::int64_t t, std::int64_t h, std::int64_t group, float* scores) noexcept {
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

const float* sink_of(const Attention& op, std::int64_t h) noexcept { return op.sinks.empty() ? nullptr : op.sinks.f32() + h; }

}  // namespace

void CpuBackend::execute(Stream& stream, const Attention& op) {
  auto& s = static_cast<CpuStream&>(stream);
  const std::int64_t n_tokens = op.q.dim(0), n_heads = op.q.dim(1), hd = op.v.dim(2);
  const std::int64_t queries = n_tokens * n_heads;
  const std::size_t state_floats = static_cast<std::size_t>(hd);
  for (Scratch& w : s.workers) w.get((static_cast<std::size_t>(Attention::kTile) + 2 * state_floats) * 4);

  const std::int64_t most_groups = keys_of(op, n_tokens - 1).n_groups();
  if (most_groups == 1 || queries >= 4 * pool_.size()) {
    pool_.run(queries, [&](std::int64_t i, int worker) noexcept {
      const std::int64_t t = i / n_heads, h = i % n_heads;
      auto* scores = reinterpret_cast<float*>(s.workers[static_cast<std::size_t>(worker)].get(0));
      SoftmaxState total{0.0f, 0.0f, scores + Attention::kTile}, next{0.0f, 0.0f, total.acc + hd};
      const KeyRange keys = keys_of(op, t);
      for (std::int64_t g = 0; g < keys.n_groups(); ++g) {
        k_.attention_group(group_args(op, t, h, keys.first_group() + g, scores), g == 0 ? total : next);
        if (g > 0) k_.attention_merge(total, next, hd);
      }
      k_.attention_finish(total, sink_of(op, h), output(op, t, h), hd);
    });
    return;
  }

  // Partial results: per (query, group) m, l and acc.
  const std::int64_t stride = hd + 2;
  auto* partials = reinterpret_cast<float*>(s.partials.get(static_cast<std::size_t>(queries * most_groups * stride) * 4));
  pool_.run(queries * most_groups, [&](std::int64_t i, int worker) noexcept {
    const std::int64_t q = i / most_groups, g = i % most_groups, t = q / n_heads;
    const KeyRange keys = keys_of(op, t);
    if (g >= keys.n_groups()) return;
    float* p = partials + i * stride;
    auto* scores = reinterpret_cast<float*>(s.workers[static_cast<std::size_t>(worker)].get(0));
    SoftmaxState part{0.0f, 0.0f, p + 2};
    k_.attention_group(group_args(op, t, q % n_heads, keys.first_group() + g, scores), part);
    p[0] = part.m;
    p[1] = part.l;
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
