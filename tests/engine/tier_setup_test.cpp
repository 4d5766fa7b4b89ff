// How device memory and main memory are divided, and that a store made from the split stays within it.
#include <gtest/gtest.h>

#include "engine/tier_setup.h"
#include "engine/budget.h"
#include "support/expect_error.h"
#include "support/loaded_model.h"
#include "support/manual_copier.h"

namespace moeflux::test {
namespace {

constexpr std::uint64_t kPlenty = std::uint64_t{1} << 40;

EngineOptions options_for(std::uint64_t ram) {
  EngineOptions o;
  o.model = demo_model();
  o.ram_bytes = ram;
  o.planned = {.ctx_size = 256, .chunk_size = 16};
  return o;
}

MemorySplit split(const Loaded& m, std::uint64_t ram, std::uint64_t vram) { return engine::split_tiers(options_for(ram), m.parsed.spec, m.binding, vram, 1000); }

// The least that is named works, and one byte less does not.
TEST(TierSetup, TheLeastIsTheLeast) {
  const Loaded m(demo_model());
  const MemorySplit any = split(m, kPlenty, kPlenty);
  const std::uint64_t vram = any.device.least_bytes, ram = any.least_bytes;
  const MemorySplit least = split(m, ram, vram);
  EXPECT_NO_THROW(engine::require_enough_tiers(least));
  EXPECT_EQ(least.device.n_slots, engine::most_top_k(m.parsed.spec));
  EXPECT_EQ(least.device.n_spare, least.device.n_slots);
  EXPECT_EQ(least.n_staging, 1u);
  EXPECT_EQ(least.n_slots, 0u);
  expect_error([&] { engine::require_enough_tiers(split(m, ram, vram - 1)); }, ErrorCode::OutOfMemory, {"device memory", "at least", "--vram"});
  expect_error([&] { engine::require_enough_tiers(split(m, ram - 1, vram)); }, ErrorCode::OutOfMemory, {"ceiling", "at least"});
}

// Whatever the ceilings, neither is exceeded, and there is always room for a lease.
TEST(TierSetup, NeverExceedsACeiling) {
  const Loaded m(demo_model());
  const MemorySplit any = split(m, kPlenty, kPlenty);
  EXPECT_EQ(any.n_slots, any.n_experts);
  EXPECT_EQ(any.device.n_slots, any.n_experts + any.device.n_spare);
  for (const std::uint64_t extra_vram : {0ull, 1ull, 100'000ull, 3'000'000ull, 50'000'000ull, 5'000'000'000ull})
    for (const std::uint64_t extra_ram : {0ull, 1ull, 200'000ull, 4'000'000ull, 60'000'000ull, 6'000'000'000ull}) {
      const MemorySplit s = split(m, any.least_bytes + extra_ram, any.device.least_bytes + extra_vram);
      EXPECT_LE(s.device.fixed_bytes() + s.device.n_slots * s.device.slot_bytes, s.device.vram_bytes);
      EXPECT_LE(s.other_bytes + s.expert_bytes, s.ram_bytes);
      EXPECT_GE(s.device.n_spare, engine::most_top_k(m.parsed.spec));
      EXPECT_GE(s.device.n_slots, s.device.n_spare);
      EXPECT_GE(s.n_staging, 1u);
    }
}

// Where the chunk is left open it is as large as a fifth of the device allows.
TEST(TierSetup, TheChunkFollowsTheDevice) {
  const Loaded m(demo_model());
  EngineOptions o = options_for(kPlenty);
  o.planned = {.ctx_size = 4096};
  std::int64_t before = 0;
  for (const std::uint64_t vram : {600'000'000ull, 700'000'000ull, 2'000'000'000ull, 100'000'000'000ull}) {
    const MemorySplit s = engine::split_tiers(o, m.parsed.spec, m.binding, vram, 0);
    EXPECT_GE(s.chunk_size, before);
    before = s.chunk_size;
  }
  EXPECT_EQ(before, 4096);
}

// The store takes what the split says and no more, and gives the same bytes. With room for all it reads them at once.
TEST(TierSetup, AStoreOfThatSplit) {
  const Loaded m(demo_model());
  auto tokens = to_tokens(TensorFile::load(fixtures() / "demo-golden/golden.safetensors").ints("tokens"));
  tokens.resize(40);
  const auto want = m.resident(tokens);
  const MemorySplit any = split(m, kPlenty, kPlenty);
  struct Counting final : Allocator {
    Buffer allocate(std::size_t bytes, std::size_t alignment) override {
      taken += bytes;
      return inner.allocate(bytes, alignment);
    }
    void release(std::byte*, std::size_t) noexcept override {}
    HostAllocator inner;
    std::uint64_t taken = 0;
  };
  for (const std::uint64_t percent : {std::uint64_t{0}, std::uint64_t{25}, std::uint64_t{100}})
    for (const std::uint64_t ram : {std::uint64_t{0}, any.n_experts / 3 * any.slot_bytes, kPlenty / 2}) {
      const MemorySplit s = split(m, any.least_bytes + ram, any.device.least_bytes + any.n_experts * any.slot_bytes * percent / 100);
      Counting device, pinned;
      engine::ExpertSetup setup = engine::make_tiered_experts(options_for(1), m.binding, m.folder, s, {device, pinned, std::make_unique<PromptCopier>()});
      EXPECT_EQ(device.taken, s.device.n_slots * s.device.slot_bytes);
      EXPECT_LE(pinned.taken, s.ram_bytes - 1000);
      const bool all = s.device.n_slots - s.device.n_spare + s.n_slots >= s.n_experts;
      const std::uint64_t read = setup.store->stats().bytes_read;
      EXPECT_EQ(read > 0, all);
      EXPECT_EQ(m.logits(*setup.store, tokens, 16, 30), want) << setup.description;
      if (all) {
        EXPECT_EQ(setup.store->stats().bytes_read, read);
      }
    }
}

}  // namespace
}  // namespace moeflux::test
