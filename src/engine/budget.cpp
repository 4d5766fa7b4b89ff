#include "engine/budget.h"

#include <algorithm>
#include <array>
#include <variant>

#include <moeflux/probe.h>

#include "core/checked.h"
#include "core/error.h"
#include "core/units.h"
#include "io/machine.h"
#include "model/planner.h"
#include "session/session.h"
#include "store/streaming_store.h"

namespace moeflux::engine {
namespace {

// Chunks to choose from. Beyond the largest every expert has tokens enough; below the least a prompt is hardly more than
// a series of single steps.
constexpr std::array<std::int64_t, 7> kChunks = {2048, 1024, 512, 256, 128, 64, 32};
// The part of the ceiling that a chunk's activations may take: slots for experts are worth more beyond it.
constexpr double kChunkShare = 0.08;

// The chunk that options leave open.
std::int64_t choose_chunk(const model::ModelSpec& spec, const model::Binding& binding, std::int64_t ctx, KvType kv, std::uint64_t ram) {
  for (std::int64_t chunk : kChunks) {
    const model::MemoryPlan plan = model::plan_memory(spec, binding, ctx, std::min(chunk, ctx), kv);
    if (static_cast<double>(plan.activations + plan.scratch) <= kChunkShare * static_cast<double>(ram)) return chunk;
  }
  return kChunks.back();
}

}  // namespace

std::size_t most_top_k(const model::ModelSpec& spec) {
  std::int64_t most = 1;
  for (const model::LayerSpec& l : spec.layers)
    if (const auto* moe = std::get_if<model::MoeSpec>(&l.ffn)) most = std::max(most, moe->top_k);
  return static_cast<std::size_t>(most);
}

std::size_t count_experts(const model::Binding& binding) {
  std::size_t n = 0;
  for (const store::ExpertLayer& l : binding.experts.layers) n += static_cast<std::size_t>(l.n_experts);
  return n;
}

std::uint64_t memory_ceiling(const EngineOptions& options) { return options.ram_bytes != 0 ? options.ram_bytes : default_ram_bytes(); }

MemorySplit split_memory(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, std::uint64_t other_bytes) {
  MemorySplit s;
  s.ram_bytes = memory_ceiling(options);
  s.ctx_size = session::session_sizes(options.planned, spec.max_context).ctx;
  const std::int64_t wanted = options.planned.chunk_size != 0 ? options.planned.chunk_size : choose_chunk(spec, binding, s.ctx_size, options.planned.kv, s.ram_bytes);
  s.chunk_size = std::min(wanted, s.ctx_size);
  const model::MemoryPlan plan = model::plan_memory(spec, binding, s.ctx_size, s.chunk_size, options.planned.kv);
  s.trunk_bytes = plan.trunk;
  s.kv_bytes = plan.kv;
  s.state_bytes = plan.recurrent;
  s.activation_bytes = plan.activations + plan.scratch + plan.logits;
  s.other_bytes = add_or_fail(other_bytes, kHostMargin, "memory");
  s.n_experts = count_experts(binding);
  s.slot_bytes = s.n_experts == 0 ? 0 : store::StreamingStore::slot_bytes(binding.experts);
  const std::size_t top_k = s.n_experts == 0 ? 0 : most_top_k(spec);
  s.least_bytes = add_or_fail(s.fixed_bytes(), mul_or_fail<std::uint64_t>(top_k, s.slot_bytes, "memory"), "memory");
  s.all_in_memory = add_or_fail(s.fixed_bytes(), plan.experts, "memory") <= s.ram_bytes;
  if (s.all_in_memory) {
    s.n_slots = s.n_experts;
    s.expert_bytes = plan.experts;
  } else if (s.ram_bytes >= s.least_bytes) {
    s.n_slots = std::min<std::size_t>(s.n_experts, (s.ram_bytes - s.fixed_bytes()) / s.slot_bytes);
    s.expert_bytes = s.n_slots * s.slot_bytes;
  }
  return s;
}

void require_enough(const MemorySplit& s) {
  if (s.ram_bytes >= s.least_bytes) return;
  fail(ErrorCode::OutOfMemory,
       "a memory ceiling of {} is too low: trunk {}, session {} ({} positions, chunks of {}), {} for the experts of one token, {} besides; "
       "at least {} is needed",
       format_bytes(s.ram_bytes), format_bytes(s.trunk_bytes), format_bytes(s.session_bytes()), s.ctx_size, s.chunk_size,
       format_bytes(s.least_bytes - s.fixed_bytes()), format_bytes(s.other_bytes), format_bytes(s.least_bytes));
}

std::string describe(const MemorySplit& s) {
  if (const DeviceSplit& d = s.device; d.vram_bytes > 0)
    return fmt::format("device {}: trunk {}, session {} (ctx {}, chunk {}), {} slots for experts {}, other {}; main memory {}: {} slots {}, other {}",
                       format_bytes(d.vram_bytes), format_bytes(d.trunk_bytes), format_bytes(d.session_bytes), s.ctx_size, s.chunk_size, d.n_slots,
                       format_bytes(d.n_slots * d.slot_bytes), format_bytes(d.other_bytes), format_bytes(s.ram_bytes), s.n_slots, format_bytes(s.expert_bytes),
                       format_bytes(s.other_bytes));
  return fmt::format("{}: trunk {}, session {} (ctx {}, chunk {}), {} of {} experts {}, other {}", format_bytes(s.ram_bytes), format_bytes(s.trunk_bytes),
                     format_bytes(s.session_bytes()), s.ctx_size, s.chunk_size, s.n_slots, s.n_experts, format_bytes(s.expert_bytes),
                     format_bytes(s.other_bytes));
}

}  // namespace moeflux::engine
