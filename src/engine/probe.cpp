#include <moeflux/probe.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/thread_pool.h"
#include "engine/expert_setup.h"
#include "format/model_folder.h"
#include "io/machine.h"
#include "io/region_allocator.h"

namespace moeflux {
namespace {

// Larger than the last-level caches of server processors.
constexpr std::size_t kBufferBytes = std::size_t{512} << 20;
// Small enough for an even end on many threads, large enough for the prefetchers to run.
constexpr std::size_t kTaskBytes = std::size_t{4} << 20;
constexpr int kPasses = 16;

constexpr std::size_t kTaskWords = kTaskBytes / sizeof(std::uint64_t);

// Under a tight limit the probe takes a quarter of what is left, and may then measure a cache.
std::size_t n_tasks() {
  const std::uint64_t quarter = io::probe_machine().usable_memory() / 4;
  return std::clamp<std::size_t>(static_cast<std::size_t>(std::min<std::uint64_t>(kBufferBytes, quarter)) / kTaskBytes, 2, kBufferBytes / kTaskBytes);
}

}  // namespace

ProcessMemory process_memory() {
  const io::ProcessMemory memory = io::process_memory();
  return {memory.resident, memory.peak_resident};
}

void drop_model_from_page_cache(const std::filesystem::path& model) {
  for (const std::filesystem::path& file : engine::weight_files(format::ModelFolder::open(model))) io::drop_from_page_cache(file);
}

std::uint64_t default_ram_bytes() {
  constexpr std::uint64_t kOthers = std::uint64_t{256} << 20;
  const std::uint64_t resident = io::process_memory().resident;
  const io::MachineInfo machine = io::probe_machine();
  const std::uint64_t share = machine.usable_memory() / 10 * 9;
  const std::uint64_t ceiling = resident + (share > 2 * kOthers ? share - kOthers : share);
  // What is resident need not all be charged to the group: shared pages are somebody else's.
  return std::min(ceiling, machine.memory_limit() / 20 * 19);
}

MemoryBandwidth probe_memory_bandwidth(int n_threads) {
  ThreadPool pool(n_threads);
  const std::size_t tasks = n_tasks();
  io::RegionAllocator memory;  // where weights lie
  const Buffer buffer = memory.allocate(tasks * kTaskBytes, 64);
  auto* const words = buffer.as<std::uint64_t>();
  // Every page gets memory of its own before it is timed.
  pool.run(static_cast<std::int64_t>(tasks), [&](std::int64_t task, int) noexcept {
    std::uint64_t* begin = words + static_cast<std::size_t>(task) * kTaskWords;
    std::fill(begin, begin + kTaskWords, static_cast<std::uint64_t>(task) + 1);
  });
  std::uint64_t expected = 0;
  for (std::size_t task = 0; task < tasks; ++task) expected += kTaskWords * (task + 1);

  const backend::WordSum sum_words = backend::widest_word_sum();
  std::uint64_t best_ns = ~std::uint64_t{0};
  std::vector<std::uint64_t> sums(tasks);
  for (int pass = 0; pass < kPasses; ++pass) {
    const std::uint64_t start = now_ns();
    pool.run(static_cast<std::int64_t>(tasks), [&](std::int64_t task, int) noexcept {
      const auto i = static_cast<std::size_t>(task);
      sums[i] = sum_words(words + i * kTaskWords, kTaskWords);
    });
    best_ns = std::min(best_ns, now_ns() - start);
    std::uint64_t total = 0;
    for (const std::uint64_t sum : sums) total += sum;
    // Also what keeps a compiler from leaving the reads out.
    if (total != expected)
      fail(ErrorCode::Internal, "the memory probe read {} instead of {}", total, expected);
  }
  return {static_cast<double>(tasks * kTaskBytes) * 1e9 / static_cast<double>(std::max<std::uint64_t>(best_ns, 1)),
          tasks * kTaskBytes, pool.size()};
}

}  // namespace moeflux
