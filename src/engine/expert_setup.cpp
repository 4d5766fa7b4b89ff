#include "engine/expert_setup.h"

#include <algorithm>

#include "core/error.h"
#include "core/units.h"
#include "io/async_reader.h"
#include "io/machine.h"
#include "model/planner.h"
#include "session/session.h"
#include "store/resident_store.h"
#include "store/streaming_store.h"

namespace moeflux::engine {
namespace {

// What the planner does not name: heap fragmentation, thread stacks, the reader's tables.
constexpr std::uint64_t kMargin = 24u << 20;

std::size_t most_top_k(const model::ModelSpec& spec) {
  std::int64_t most = 1;
  for (const model::LayerSpec& l : spec.layers)
    if (const auto* moe = std::get_if<model::MoeSpec>(&l.ffn)) most = std::max(most, moe->top_k);
  return static_cast<std::size_t>(most);
}

std::size_t n_experts(const model::Binding& binding) {
  std::size_t n = 0;
  for (const store::ExpertLayer& l : binding.experts.layers) n += static_cast<std::size_t>(l.n_experts);
  return n;
}

io::ReaderKind reader_kind(IoKind kind) {
  return kind == IoKind::Uring ? io::ReaderKind::Uring : kind == IoKind::Pread ? io::ReaderKind::Pread : io::ReaderKind::Auto;
}

std::unique_ptr<store::StreamingStore> make_streaming(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding,
                                                      const format::ModelFolder& folder, std::size_t n_slots) {
  std::vector<std::filesystem::path> files;
  std::vector<std::string> names;
  for (std::uint32_t i = 0; i < folder.n_files(); ++i) {
    files.push_back(folder.file(i).path());
    names.push_back(files.back().string());
  }
  store::StreamingOptions s;
  s.n_slots = n_slots;
  // One lease must always fit; half of the slots lets a prompt read its next batch ahead.
  s.max_lease = std::max(most_top_k(spec), std::min<std::size_t>(n_slots / 2, 64));
  s.make_reader = [&](const io::MemoryRegions& regions) {
    io::ReaderOptions r;
    r.kind = reader_kind(options.io);
    return io::make_reader(files, regions, r);
  };
  return std::make_unique<store::StreamingStore>(binding.experts, std::move(names), s);
}

}  // namespace

ExpertSetup make_expert_store(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding,
                              const format::ModelFolder& folder, backend::Backend& backend) {
  const std::size_t all = n_experts(binding);
  const auto [ctx, chunk] = session::session_sizes(options.planned, spec.max_context);
  const model::MemoryPlan plan = model::plan_memory(spec, binding, ctx, chunk, options.planned.kv);
  const std::uint64_t used = io::process_memory().resident;
  const std::uint64_t fixed = used + plan.session() + kMargin;
  if (options.ram_bytes == 0 || fixed + plan.experts <= options.ram_bytes)
    return {std::make_unique<store::ResidentStore>(binding.experts, folder, backend.allocator(), backend.copier(), options.progress),
            fmt::format("all {} experts in memory", all)};

  const std::uint64_t slot = store::StreamingStore::slot_bytes(binding.experts);
  const std::size_t least = most_top_k(spec);
  if (options.ram_bytes < fixed + least * slot)
    fail(ErrorCode::OutOfMemory,
         "a memory ceiling of {} is too low: {} in use (trunk {}), {} for the session ({} positions), {} for {} experts of {}; at least {} is needed",
         format_bytes(options.ram_bytes), format_bytes(used), format_bytes(plan.trunk), format_bytes(plan.session() + kMargin), ctx,
         format_bytes(least * slot), least, format_bytes(slot), format_bytes(fixed + least * slot));
  const std::size_t n_slots = std::min<std::size_t>(all, (options.ram_bytes - fixed) / slot);
  auto streaming = make_streaming(options, spec, binding, folder, n_slots);
  const io::ReaderInfo info = streaming->reader_info();
  std::string text = fmt::format("{} of {} experts in memory, streamed by {}{}", n_slots, all, io::reader_kind_name(info.kind),
                                 info.n_direct == info.n_files ? "" : " through the page cache");
  return {std::move(streaming), std::move(text)};
}

}  // namespace moeflux::engine
