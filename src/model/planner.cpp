#include "model/planner.h"

#include <algorithm>

#include "core/checked.h"
#include "model/model.h"
#include "model/state.h"

namespace moeflux::model {

std::uint64_t kv_bytes(const LayerSpec& layer, std::int64_t ctx, KvType type) {
  std::int64_t width = 0;  // values a position keeps
  if (const auto* gqa = std::get_if<GqaSpec>(&layer.mixer)) width = 2 * gqa->kv_dim();
  if (const auto* mla = std::get_if<MlaSpec>(&layer.mixer)) width = mla->cache_dim();
  const std::uint64_t row = mul_or_fail(static_cast<std::uint64_t>(width), std::uint64_t{type == KvType::F16 ? 2u : 4u}, "kv cache");
  return mul_or_fail(row, static_cast<std::uint64_t>(ctx), "kv cache");
}

std::uint64_t recurrent_bytes(const LayerSpec& layer) {
  const auto* delta = std::get_if<GatedDeltaSpec>(&layer.mixer);
  if (delta == nullptr) return 0;
  const std::uint64_t conv = mul_or_fail(static_cast<std::uint64_t>(delta->n_taps - 1), static_cast<std::uint64_t>(delta->conv_width()), "recurrent state");
  const std::uint64_t state = mul_or_fail(static_cast<std::uint64_t>(delta->value_width()), static_cast<std::uint64_t>(delta->k_dim), "recurrent state");
  return mul_or_fail(add_or_fail(conv, state, "recurrent state"), std::uint64_t{4}, "recurrent state");
}

namespace {

// Rows of a chunk in its widest layer, as a backend gathers, multiplies and quantizes them.
std::uint64_t scratch_bytes(const ModelSpec& spec, std::int64_t chunk) {
  std::uint64_t most = 0;
  for (const LayerSpec& l : spec.layers) {
    const auto* moe = std::get_if<MoeSpec>(&l.ffn);
    const std::int64_t rows = chunk * (moe != nullptr ? moe->top_k + (moe->shared_dim > 0 ? 1 : 0) : 1);
    const std::int64_t inner = moe != nullptr ? std::max(moe->inner_dim, moe->shared_dim) : std::get<DenseSpec>(l.ffn).inner_dim;
    // Input and output rows and both intermediates in f32, and one row more in 8 bits with its group scales.
    const std::int64_t per_row = 8 * spec.hidden_dim + 8 * inner + 2 * std::max(spec.hidden_dim, inner);
    most = std::max(most, mul_or_fail(static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(per_row), "scratch memory"));
  }
  return most;
}

}  // namespace

MemoryPlan plan_memory(const ModelSpec& spec, const Binding& binding, std::int64_t ctx, std::int64_t chunk, KvType kv) {
  MemoryPlan plan;
  plan.trunk = binding.trunk_bytes();
  for (const store::ExpertLayer& l : binding.experts.layers)
    plan.experts = add_or_fail(plan.experts, mul_or_fail(static_cast<std::uint64_t>(l.n_experts), l.layout.bytes, "experts"), "experts");
  for (const LayerSpec& l : spec.layers) {
    plan.kv = add_or_fail(plan.kv, kv_bytes(l, ctx, kv), "kv cache");
    plan.recurrent = add_or_fail(plan.recurrent, recurrent_bytes(l), "recurrent state");
  }
  plan.activations = activation_bytes(spec, chunk);
  plan.logits = mul_or_fail(static_cast<std::uint64_t>(spec.vocab_size), std::uint64_t{4 * (kLogitRows + 1)}, "logits");
  plan.scratch = scratch_bytes(spec, chunk);
  return plan;
}

}  // namespace moeflux::model
