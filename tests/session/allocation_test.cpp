// A step allocates nothing once the session is warm.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include <moeflux/error.h>

#include "store/tiered_store.h"
#include "support/evaluate.h"
#include "support/loaded_model.h"
#include "support/manual_copier.h"
#include "support/tensor_file.h"

namespace {
std::atomic<std::uint64_t> g_allocations{0};
}

void* operator new(std::size_t n) {
  g_allocations.fetch_add(1);
  if (void* p = std::malloc(n == 0 ? 1 : n)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t n, std::align_val_t) {
  return operator new(n);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace moeflux::test {
namespace {

class Allocation : public testing::TestWithParam<Precision> {};

TEST_P(Allocation, NoneInAWarmStep) {
  const auto engine = open_engine(demo_model(), {.precision = GetParam()});
  const auto session = engine->create_session({.ctx_size = 2048});
  for (int i = 0; i < 40; ++i) session->step(TokenId(i * 31 % 3000));
  const std::uint64_t before = g_allocations.load();
  for (int i = 0; i < 100; ++i) session->step(TokenId(i * 17 % 3000));
  EXPECT_EQ(g_allocations.load() - before, 0u);
}

// What this process takes is not known and varies a little: the ceiling goes up where too few experts fit and down where all
// do. Null: it did not settle.
std::unique_ptr<Engine> open_with_some_experts(EngineOptions options) {
  options.ram_bytes = 30'000'000;
  for (int i = 0; i < 1000; ++i) {
    try {
      auto engine = Engine::open(options);
      if (!engine->memory().all_in_memory && engine->memory().n_slots >= 24) return engine;
      if (engine->memory().all_in_memory)
        options.ram_bytes -= 300'000;
      else
        options.ram_bytes += 500'000;
    } catch (const Error& e) {
      if (e.code() != ErrorCode::OutOfMemory) throw;
      options.ram_bytes += 1'000'000;
    }
  }
  return nullptr;
}

// The same with experts that come from disk, foretold or not, and with the governor trying both.
TEST(AllocationStreaming, NoneInAWarmStep) {
  EngineOptions options;
  options.model = demo_model();
  options.n_threads = 2;
  options.planned.ctx_size = 512;
  for (const Prefetch prefetch : {Prefetch::On, Prefetch::Off, Prefetch::Auto}) {
    options.prefetch = prefetch;
    const auto engine = open_with_some_experts(options);
    ASSERT_NE(engine, nullptr);
    const auto session = engine->create_session(options.planned);
    for (int i = 0; i < 60; ++i) session->step(TokenId(i * 31 % 3000));
    const std::uint64_t before = g_allocations.load();
    for (int i = 0; i < 200; ++i) session->step(TokenId(i * 17 % 3000));
    EXPECT_EQ(g_allocations.load() - before, 0u);
    EXPECT_GT(session->stats().bytes_read, 0u);
    EXPECT_EQ(session->stats().hints_issued > 0, prefetch != Prefetch::Off);
  }
}

// The same with experts in three tiers: copies come and go, some experts are read.
TEST(AllocationTiered, NoneInAWarmStep) {
  const Loaded m(demo_model());
  store::TieredOptions o;
  o.n_device = 60;
  o.n_spare = 8;
  o.n_host = 100;
  o.n_staging = 4;
  o.make_reader = [&](const io::MemoryRegions& r) { return io::make_reader(m.files, r, {}); };
  for (const Prefetch prefetch : {Prefetch::On, Prefetch::Off}) {
    HostAllocator device, pinned;
    store::TieredStore experts(m.binding.experts, m.names(), o, device, pinned, std::make_unique<PromptCopier>());
    session::Parts parts{m.model, experts, *m.backend, m.precision};
    parts.prefetch = prefetch;
    session::Session session(parts, {.ctx_size = 512});
    for (int i = 0; i < 60; ++i) session.step(TokenId(i * 31 % 3000));
    const std::uint64_t before = g_allocations.load();
    for (int i = 0; i < 200; ++i) session.step(TokenId(i * 17 % 3000));
    EXPECT_EQ(g_allocations.load() - before, 0u);
    EXPECT_GT(session.stats().bytes_to_device, 0u);
    EXPECT_GT(session.stats().bytes_to_host, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Both, Allocation, testing::Values(Precision::Exact, Precision::Fast),
                         [](const auto& test) { return test.param == Precision::Exact ? "exact" : "fast"; });

}  // namespace
}  // namespace moeflux::test
