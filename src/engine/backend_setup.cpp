#include "engine/backend_setup.h"

#include <algorithm>

#include "backend/cpu/cpu_backend.h"
#include "backend/cuda_backend.h"
#include "core/error.h"
#include "core/units.h"
#include "engine/tier_setup.h"
#include "io/machine.h"
#include "model/planner.h"
#include "session/session.h"
#include "store/resident_store.h"

namespace moeflux::engine {
namespace {

struct DeviceNeed {
  model::MemoryPlan plan;
  std::int64_t ctx = 0, chunk = 0;
  std::uint64_t available = 0;
  std::uint64_t needed() const noexcept { return plan.engine() + plan.session() + kDeviceMargin; }
  bool fits() const noexcept { return needed() <= available; }
};

// The whole model in device memory, beside what the planned session needs.
DeviceNeed device_need(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, std::uint64_t available) {
  DeviceNeed need;
  const auto [ctx, chunk] = session::session_sizes(options.planned, spec.max_context, backend::kCudaChunk);
  need.ctx = ctx;
  need.chunk = chunk;
  need.plan = model::plan_memory(spec, binding, ctx, chunk, options.planned.kv);
  need.available = available;
  return need;
}

// The same in the chunks of a split in tiers, which are smaller where the options leave them open.
DeviceNeed device_need_in_chunks(EngineOptions options, const model::ModelSpec& spec, const model::Binding& binding, const MemorySplit& split, std::uint64_t available) {
  options.planned.chunk_size = split.chunk_size;
  return device_need(options, spec, binding, available);
}

// The split where all is in device memory, which is all it speaks of.
MemorySplit resident_split(const DeviceNeed& need, const model::Binding& binding) {
  MemorySplit m;
  m.ram_bytes = m.least_bytes = need.needed();
  m.trunk_bytes = need.plan.trunk;
  m.kv_bytes = need.plan.kv;
  m.state_bytes = need.plan.recurrent;
  m.activation_bytes = need.plan.activations + need.plan.logits + need.plan.scratch;
  m.other_bytes = kDeviceMargin;
  m.expert_bytes = need.plan.experts;
  for (const store::ExpertLayer& l : binding.experts.layers) m.n_experts += static_cast<std::uint64_t>(l.n_experts);
  m.n_slots = m.n_experts;
  m.ctx_size = need.ctx;
  m.chunk_size = need.chunk;
  m.all_in_memory = true;
  return m;
}

}  // namespace

std::uint64_t device_ceiling(const EngineOptions& options, std::uint64_t free_bytes) {
  return options.vram_bytes == 0 ? free_bytes : std::min(options.vram_bytes, free_bytes);
}

std::string why_not_the_device(const MemorySplit& split) {
  const DeviceSplit& d = split.device;
  if (d.vram_bytes >= d.least_bytes) return "";
  return fmt::format("{} of device memory, at least {} are needed: computing on the CPU", format_bytes(d.vram_bytes), format_bytes(d.least_bytes));
}

std::unique_ptr<backend::Backend> make_processor(const EngineOptions& options, Allocator& host_memory) {
  return backend::make_cpu_backend({options.n_threads, options.isa, &host_memory});
}

BackendSetup make_backend(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, Allocator& host_memory) {
  const auto cpu = [&](std::string note) {
    return BackendSetup{make_processor(options, host_memory), false, 0, std::move(note)};
  };
  if (options.backend == BackendKind::Cpu) return cpu("");
  if (options.backend == BackendKind::Auto && options.gpu >= backend::count_cuda_devices()) return cpu("no CUDA device: computing on the CPU");
  BackendSetup out{nullptr, true, 0, ""};
  try {
    out.backend = backend::make_cuda_backend({options.gpu, &host_memory});
  } catch (const Error& e) {
    if (options.backend == BackendKind::Auto && e.code() == ErrorCode::Unsupported) return cpu(e.what());
    throw;
  }
  out.device_bytes = device_ceiling(options, backend::cuda_device_info(options.gpu).free_bytes);
  const MemorySplit split = split_for_device(options, spec, binding, out.device_bytes, io::process_memory().resident);
  if (split.all_in_memory) return out;
  if (std::string why = why_not_the_device(split); options.backend == BackendKind::Auto && !why.empty()) return cpu(std::move(why));
  require_enough_tiers(split);
  return out;
}

MemorySplit split_for_device(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, std::uint64_t device_bytes,
                             std::uint64_t other_bytes) {
  DeviceNeed need = device_need(options, spec, binding, device_bytes);
  MemorySplit split = split_tiers(options, spec, binding, device_bytes, other_bytes);
  if (!need.fits()) need = device_need_in_chunks(options, spec, binding, split, device_bytes);
  return need.fits() ? resident_split(need, binding) : split;
}

ExpertSetup make_device_experts(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding,
                                const format::ModelFolder& folder, backend::Backend& backend, std::uint64_t device_bytes) {
  const MemorySplit split = split_for_device(options, spec, binding, device_bytes, io::process_memory().resident);
  if (split.all_in_memory) {
    ExpertSetup setup;
    setup.memory = split;
    setup.store = std::make_unique<store::ResidentStore>(binding.experts, folder, backend.allocator(), backend.copier(), options.progress);
    setup.description = fmt::format("all {} experts in device memory", setup.memory.n_experts);
    return setup;
  }
  require_enough_tiers(split);
  return make_tiered_experts(options, binding, folder, split, {backend.allocator(), backend.pinned_allocator(), backend.make_async_copier(), backend.reads_pinned()});
}

}  // namespace moeflux::engine
