// What the planner says is what is used.
#include "model/planner.h"

#include <gtest/gtest.h>

#include "backend/cpu/cpu_backend.h"
#include "model/family.h"
#include "model/model.h"
#include "store/resident_store.h"
#include "support/tensor_file.h"

namespace moeflux::model {
namespace {

struct Loaded {
  format::ModelFolder folder;
  ParsedModel parsed;
  Binding binding;
};

Loaded load(const std::filesystem::path& path) {
  format::ModelFolder folder = format::ModelFolder::open(path);
  ParsedModel parsed = parse_model(folder);
  Binding binding = bind(folder, parsed.spec, parsed.names);
  return {std::move(folder), std::move(parsed), std::move(binding)};
}

TEST(Planner, DemoModelByHand) {
  const Loaded m = load(test::demo_model());
  const MemoryPlan plan = plan_memory(m.parsed.spec, m.binding, 1000, 16, KvType::F16);
  EXPECT_EQ(plan.kv, 2u * 2 * 1000 * 2 * 64 * 2);                          // 2 layers, k and v, 2 heads of 64, f16
  EXPECT_EQ(plan.recurrent, 6u * 4 * (4 * 64 * 64 + 3 * 512));             // 6 layers: state and 3 rows of 512 channels
  EXPECT_EQ(plan.logits, 3072u * 4 * (kLogitRows + 1));
  EXPECT_EQ(m.binding.expert_bytes(), 8u * 32 * 3 * 256 * 64 * 9 / 16);    // 4.5 bits a weight
  EXPECT_EQ(plan.experts, 8u * 32 * 28672);                                // 27,648 bytes in records of whole pages
  EXPECT_EQ(plan.engine(), plan.trunk + plan.experts);
}

TEST(Planner, TrunkBytesAreWhatTheModelLoads) {
  for (const auto& entry : std::filesystem::directory_iterator(test::fixtures())) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    const std::string name = entry.path().filename().string();
    const Loaded m = load(entry.path());
    const auto backend = backend::make_cpu_backend({.n_threads = 1, .isa = ""});
    const Model model(m.parsed.spec, m.binding, m.folder, *backend, {});
    std::uint64_t ropes = 0;  // computed, not stored
    for (const LayerSpec& l : m.parsed.spec.layers)
      if (const auto* gqa = std::get_if<GqaSpec>(&l.mixer))
        ropes += gqa->rope.inv_freq.size() * 4;
      else if (const auto* mla = std::get_if<MlaSpec>(&l.mixer))
        ropes += mla->rope.inv_freq.size() * 4;
    EXPECT_EQ(model.trunk_bytes(), m.binding.trunk_bytes() + ropes) << name;
  }
}

TEST(Planner, ActivationsGrowLinearly) {
  const Loaded m = load(test::demo_model());
  const auto one = activation_bytes(m.parsed.spec, 64), four = activation_bytes(m.parsed.spec, 256);
  EXPECT_NEAR(static_cast<double>(four), 4.0 * static_cast<double>(one), static_cast<double>(one) * 0.05);
}

TEST(Arena, ReportsWhatDoesNotFit) {
  HostAllocator allocator;
  Arena arena(allocator.allocate(1024, 64));
  arena.f32({4, 32});
  const std::size_t mark = arena.mark();
  arena.f32({4, 32});
  EXPECT_THROW(arena.f32({1, 1}), Error);
  arena.release(mark);
  EXPECT_EQ(arena.mark(), 512u);
}

}  // namespace
}  // namespace moeflux::model
