#include "engine/tier_setup.h"

#include <algorithm>
#include <array>

#include "core/checked.h"
#include "core/error.h"
#include "core/units.h"
#include "engine/budget.h"
#include "io/async_reader.h"
#include "model/planner.h"
#include "session/session.h"
#include "store/tiered_store.h"

namespace moeflux::engine {
namespace {

// Every chunk of a prompt brings the experts that are not on the device over the link once more, so chunks should be large; slots
// for experts are worth more beyond this share.
constexpr std::array<std::int64_t, 9> kDeviceChunks = {8192, 4096, 2048, 1024, 512, 256, 128, 64, 32};
constexpr double kDeviceChunkShare = 0.2;
// Spare slots: two batches of a prompt's experts, room for those that are on their way to main memory, and some a layer for what a step reads
// in main memory and leaves on the device.
constexpr std::size_t kMostSpare = 96, kSpareShare = 8;
// Reads under way: enough to keep a disk busy, not so much that it is missed elsewhere.
constexpr std::uint64_t kStagingBytes = 256u << 20;
constexpr std::uint64_t kMostStaging = 32, kLeastStaging = 4;

// `token_bytes`: the experts of one token, which must fit beside it.
std::int64_t choose_chunk(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, std::int64_t ctx, std::uint64_t vram,
                          std::uint64_t token_bytes) {
  if (options.planned.chunk_size != 0) return std::min(options.planned.chunk_size, ctx);
  for (std::int64_t chunk : kDeviceChunks) {
    const model::MemoryPlan plan = model::plan_memory(spec, binding, ctx, std::min(chunk, ctx), options.planned.kv);
    const bool fits = plan.trunk + plan.session() + kDeviceMargin + token_bytes <= vram;
    if (fits && static_cast<double>(plan.activations + plan.scratch) <= kDeviceChunkShare * static_cast<double>(vram)) return std::min(chunk, ctx);
  }
  return std::min(kDeviceChunks.back(), ctx);
}

DeviceSplit split_device(const model::MemoryPlan& plan, std::uint64_t vram, std::uint64_t slot_bytes, std::size_t top_k, std::size_t n_experts) {
  DeviceSplit d;
  d.vram_bytes = std::max<std::uint64_t>(vram, 1);
  d.trunk_bytes = plan.trunk;
  d.session_bytes = plan.session();
  d.other_bytes = kDeviceMargin;
  d.slot_bytes = slot_bytes;
  d.least_bytes = add_or_fail(d.fixed_bytes(), mul_or_fail<std::uint64_t>(top_k, slot_bytes, "device memory"), "device memory");
  if (d.vram_bytes < d.least_bytes) return d;
  const std::uint64_t fit = (d.vram_bytes - d.fixed_bytes()) / slot_bytes;
  d.n_spare = std::max<std::uint64_t>(top_k, std::min<std::uint64_t>(fit / kSpareShare, kMostSpare));
  d.n_slots = std::min<std::uint64_t>(fit, n_experts + d.n_spare);
  return d;
}

// Main memory: staging first, then slots; more than all experts are of no use.
void split_host(MemorySplit& s, std::uint64_t staging_bytes) {
  const std::uint64_t wanted = std::clamp<std::uint64_t>(kStagingBytes / staging_bytes, kLeastStaging, kMostStaging);
  s.least_bytes = add_or_fail(s.other_bytes, staging_bytes, "memory");
  if (s.ram_bytes < s.least_bytes) return;
  s.n_staging = std::min(wanted, (s.ram_bytes - s.other_bytes) / staging_bytes);
  s.other_bytes += s.n_staging * staging_bytes;
  s.n_slots = std::min(s.n_experts, (s.ram_bytes - s.other_bytes) / s.slot_bytes);
  s.expert_bytes = s.n_slots * s.slot_bytes;
}

}  // namespace

MemorySplit split_tiers(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding, std::uint64_t device_bytes,
                        std::uint64_t other_bytes) {
  MemorySplit s;
  s.ram_bytes = memory_ceiling(options);
  s.ctx_size = session::session_sizes(options.planned, spec.max_context).ctx;
  s.n_experts = count_experts(binding);
  s.slot_bytes = store::TieredStore::slot_bytes(binding.experts);
  const auto token_bytes = mul_or_fail<std::uint64_t>(most_top_k(spec), s.slot_bytes, "device memory");
  s.chunk_size = choose_chunk(options, spec, binding, s.ctx_size, device_bytes, token_bytes);
  s.other_bytes = add_or_fail(other_bytes, kHostMargin, "memory");
  const model::MemoryPlan plan = model::plan_memory(spec, binding, s.ctx_size, s.chunk_size, options.planned.kv);
  s.device = split_device(plan, device_bytes, s.slot_bytes, most_top_k(spec), s.n_experts);
  split_host(s, store::TieredStore::staging_bytes(binding.experts));
  return s;
}

void require_enough_tiers(const MemorySplit& s) {
  const DeviceSplit& d = s.device;
  if (d.vram_bytes < d.least_bytes)
    fail(ErrorCode::OutOfMemory,
         "{} of device memory are too little: trunk {}, session {} ({} positions, chunks of {}), {} for the experts of one token, {} besides; at least {} "
         "are needed (--vram), or less with a smaller context (-c) or chunk (--chunk)",
         format_bytes(d.vram_bytes), format_bytes(d.trunk_bytes), format_bytes(d.session_bytes), s.ctx_size, s.chunk_size,
         format_bytes(d.least_bytes - d.fixed_bytes()), format_bytes(d.other_bytes), format_bytes(d.least_bytes));
  if (s.ram_bytes < s.least_bytes)
    fail(ErrorCode::OutOfMemory, "a memory ceiling of {} is too low: {} for one expert on its way to the device, {} besides; at least {} is needed",
         format_bytes(s.ram_bytes), format_bytes(s.least_bytes - s.other_bytes), format_bytes(s.other_bytes), format_bytes(s.least_bytes));
}

ExpertSetup make_tiered_experts(const EngineOptions& options, const model::Binding& binding, const format::ModelFolder& folder,
                                const MemorySplit& split, TierMemory memory) {
  if (memory.copier == nullptr) fail(ErrorCode::Internal, "this backend's memory is not apart from the host's");
  std::vector<std::string> names;
  for (const std::filesystem::path& p : weight_files(folder)) names.push_back(p.string());
  store::TieredOptions t;
  t.n_device = split.device.n_slots;
  t.n_spare = split.device.n_spare;
  t.n_host = split.n_slots;
  t.n_staging = split.n_staging;
  t.device_reads_host = memory.device_reads_pinned;
  t.make_reader = [&](const io::MemoryRegions& regions) { return make_model_reader(folder, options.io, regions); };
  auto tiers = std::make_unique<store::TieredStore>(binding.experts, std::move(names), t, memory.device, memory.pinned, std::move(memory.copier));
  const std::uint64_t kept = t.n_device - t.n_spare;
  if (kept + t.n_host >= split.n_experts) tiers->fill(options.progress);
  const io::ReaderInfo info = tiers->reader_info();
  ExpertSetup setup;
  setup.memory = split;
  setup.description = fmt::format("{} of {} experts in device memory, {} in main memory, the rest read by {}{}", std::min(kept, split.n_experts),
                                  split.n_experts, std::min<std::uint64_t>(t.n_host, split.n_experts - std::min(kept, split.n_experts)),
                                  io::reader_kind_name(info.kind), info.n_direct == info.n_files ? "" : " through the page cache");
  setup.store = std::move(tiers);
  return setup;
}

}  // namespace moeflux::engine
