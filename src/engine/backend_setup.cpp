#include "engine/backend_setup.h"

#include <algorithm>

#include "backend/cpu/cpu_backend.h"
#include "backend/cuda_backend.h"
#include "core/error.h"
#include "core/units.h"
#include "model/planner.h"
#include "session/session.h"
#include "store/resident_store.h"

namespace moeflux::engine {
namespace {

// What the planner does not name: the runtime's own memory, fragments of allocations, scratch that grows with the routing.
constexpr std::uint64_t kDeviceMargin = 512u << 20;

struct DeviceNeed {
  model::MemoryPlan plan;
  std::int64_t ctx = 0, chunk = 0;
  std::uint64_t available = 0;
  std::uint64_t needed() const noexcept { return plan.engine() + plan.session() + kDeviceMargin; }
  bool fits() const noexcept { return needed() <= available; }
};

// The whole model in device memory, beside what the planned session needs.
DeviceNeed device_need(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding) {
  DeviceNeed need;
  const auto [ctx, chunk] = session::session_sizes(options.planned, spec.max_context, backend::kCudaChunk);
  need.ctx = ctx;
  need.chunk = chunk;
  need.plan = model::plan_memory(spec, binding, ctx, chunk, options.planned.kv);
  const std::uint64_t free = backend::cuda_device_info(options.gpu).free_bytes;
  need.available = options.vram_bytes == 0 ? free : std::min(options.vram_bytes, free);
  return need;
}

std::string too_small(const DeviceNeed& need) {
  return fmt::format("the model needs {} of device memory, {} are there", format_bytes(need.needed()), format_bytes(need.available));
}

}  // namespace

BackendSetup make_backend(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, Allocator& host_memory) {
  const auto cpu = [&](std::string note) {
    return BackendSetup{backend::make_cpu_backend({options.n_threads, options.isa, &host_memory}), false, std::move(note)};
  };
  if (options.backend == BackendKind::Cpu) return cpu("");
  if (options.backend == BackendKind::Auto) {
    if (options.gpu >= backend::count_cuda_devices()) return cpu("no CUDA device: computing on the CPU");
    const DeviceNeed need = device_need(options, spec, binding);
    if (!need.fits()) return cpu(too_small(need) + ": computing on the CPU");
  }
  BackendSetup out{backend::make_cuda_backend({options.gpu}), true, ""};
  const DeviceNeed need = device_need(options, spec, binding);
  if (!need.fits()) fail(ErrorCode::OutOfMemory, "{}", too_small(need));
  return out;
}

ExpertSetup make_device_experts(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding,
                                const format::ModelFolder& folder, backend::Backend& backend) {
  const DeviceNeed need = device_need(options, spec, binding);
  ExpertSetup setup;
  MemorySplit& m = setup.memory;
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
  setup.store = std::make_unique<store::ResidentStore>(binding.experts, folder, backend.allocator(), backend.copier(), options.progress);
  setup.description = fmt::format("all {} experts in device memory", m.n_experts);
  return setup;
}

}  // namespace moeflux::engine
