#include "engine/expert_setup.h"

#include <algorithm>

#include "core/error.h"
#include "engine/budget.h"
#include "io/async_reader.h"
#include "io/machine.h"
#include "store/resident_store.h"
#include "store/streaming_store.h"

namespace moeflux::engine {
namespace {

std::unique_ptr<store::StreamingStore> make_streaming(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding,
                                                      const format::ModelFolder& folder, std::size_t n_slots) {
  std::vector<std::string> names;
  for (const std::filesystem::path& p : weight_files(folder)) names.push_back(p.string());
  store::StreamingOptions s;
  s.n_slots = n_slots;
  // One lease must always fit; half of the slots lets a prompt read its next batch ahead.
  s.max_lease = std::max(most_top_k(spec), std::min<std::size_t>(n_slots / 2, 64));
  s.make_reader = [&](const io::MemoryRegions& regions) { return make_model_reader(folder, options.io, regions); };
  return std::make_unique<store::StreamingStore>(binding.experts, std::move(names), s);
}

}  // namespace

io::ReaderKind reader_kind(IoKind kind) {
  return kind == IoKind::Uring ? io::ReaderKind::Uring : kind == IoKind::Pread ? io::ReaderKind::Pread : io::ReaderKind::Auto;
}

std::vector<std::filesystem::path> weight_files(const format::ModelFolder& folder) {
  std::vector<std::filesystem::path> files;
  for (std::uint32_t i = 0; i < folder.n_files(); ++i) files.push_back(folder.file(i).path());
  return files;
}

std::unique_ptr<io::AsyncReader> make_model_reader(const format::ModelFolder& folder, IoKind kind, const io::MemoryRegions& regions) {
  io::ReaderOptions r;
  r.kind = reader_kind(kind);
  return io::make_reader(weight_files(folder), regions, r);
}

bool use_bands(const EngineOptions& options, const backend::Backend& backend) noexcept {
  return options.precision == Precision::Fast && backend.wants_bands();
}

ExpertSetup make_expert_store(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding,
                              const format::ModelFolder& folder, backend::Backend& backend) {
  const std::uint64_t used = io::process_memory().resident;
  ExpertSetup setup;
  setup.memory = split_memory(options, spec, binding, used - std::min(used, binding.trunk_bytes()));
  const MemorySplit& m = setup.memory;
  require_enough(m);
  if (m.all_in_memory) {
    setup.store = std::make_unique<store::ResidentStore>(binding.experts, folder, backend.allocator(), backend.copier(), options.progress,
                                                         use_bands(options, backend));
    setup.description = fmt::format("all {} experts in memory", m.n_experts);
    return setup;
  }
  auto streaming = make_streaming(options, spec, binding, folder, m.n_slots);
  const io::ReaderInfo info = streaming->reader_info();
  setup.description = fmt::format("{} of {} experts in memory, streamed by {}{}", m.n_slots, m.n_experts, io::reader_kind_name(info.kind),
                                  info.n_direct == info.n_files ? "" : " through the page cache");
  setup.store = std::move(streaming);
  return setup;
}

}  // namespace moeflux::engine
