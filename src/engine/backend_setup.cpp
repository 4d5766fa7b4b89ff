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
  std::uint64_t needed = 0, available = 0;
  bool fits() const noexcept { return needed <= available; }
};

// The whole model in device memory.
DeviceNeed device_need(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding) {
  const auto [ctx, chunk] = session::session_sizes(options.planned, spec.max_context, backend::kCudaChunk);
  const model::MemoryPlan plan = model::plan_memory(spec, binding, ctx, chunk, options.planned.kv);
  const backend::CudaDeviceInfo info = backend::cuda_device_info(options.gpu);
  return {plan.engine() + plan.session() + kDeviceMargin, options.vram_bytes == 0 ? info.free_bytes : std::min<std::uint64_t>(options.vram_bytes, info.free_bytes)};
}

std::string too_small(const DeviceNeed& need) {
  return fmt::format("the model needs {} of device memory, {} are there", format_bytes(need.needed), format_bytes(need.available));
}

}  // namespace

BackendSetup make_backend(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding) {
  const auto cpu = [&](std::string note) { return BackendSetup{backend::make_cpu_backend({options.n_threads, options.isa}), false, std::move(note)}; };
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

ExpertSetup make_device_experts(const EngineOptions& options, const model::ModelSpec&, const model::Binding& binding,
                                const format::ModelFolder& folder, backend::Backend& backend) {
  std::size_t all = 0;
  for (const store::ExpertLayer& l : binding.experts.layers) all += static_cast<std::size_t>(l.n_experts);
  return {std::make_unique<store::ResidentStore>(binding.experts, folder, backend.allocator(), backend.copier(), options.progress),
          fmt::format("all {} experts in device memory", all)};
}

}  // namespace moeflux::engine
