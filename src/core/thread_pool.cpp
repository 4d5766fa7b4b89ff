#include "core/thread_pool.h"

#include <algorithm>

namespace moeflux {
namespace {

constexpr std::uint64_t kOpen = 1u << 15;
constexpr std::uint64_t kJoinedMask = kOpen - 1;
constexpr int kMaxThreads = 1024;
// About 20 us on current cores: longer than the gap between two ops of a token, much shorter than a
// scheduling quantum, so an idle pool costs nothing noticeable.
constexpr int kSpins = 4000;

inline void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

constexpr std::uint64_t range_of(std::int64_t next, std::int64_t end) noexcept {
  return static_cast<std::uint64_t>(next) << 32 | static_cast<std::uint64_t>(end);
}
constexpr std::int64_t next_of(std::uint64_t range) noexcept { return static_cast<std::int64_t>(range >> 32); }
constexpr std::int64_t end_of(std::uint64_t range) noexcept { return static_cast<std::int64_t>(range & 0xffffffffu); }

int clamp_threads(int n) {
  if (n < 1) n = usable_cores();
  return std::clamp(n, 1, kMaxThreads);
}

}  // namespace

int usable_cores() noexcept { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

ThreadPool::ThreadPool(int n_threads) : n_threads_(clamp_threads(n_threads)), shares_(static_cast<std::size_t>(n_threads_)) {
  workers_.reserve(static_cast<std::size_t>(n_threads_ - 1));
  for (int i = 1; i < n_threads_; ++i) workers_.emplace_back([this, i] { worker_main(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_release);
  wake_.fetch_add(1, std::memory_order_seq_cst);
  wake_.notify_all();
  for (std::thread& t : workers_) t.join();
}

bool ThreadPool::take(std::int64_t task, int worker) noexcept {
  std::atomic<std::uint64_t>& own = shares_[static_cast<std::size_t>(worker)].range;
  std::uint64_t range = own.load(std::memory_order_relaxed);
  while (next_of(range) == task && next_of(range) < end_of(range))
    if (own.compare_exchange_weak(range, range_of(task + 1, end_of(range)), std::memory_order_relaxed)) return true;
  return false;
}

// The later half of what some other thread has left becomes this one's share.
bool ThreadPool::steal(int worker) noexcept {
  for (int i = 1; i < n_threads_; ++i) {
    const int of = worker + i < n_threads_ ? worker + i : worker + i - n_threads_;
    std::atomic<std::uint64_t>& other = shares_[static_cast<std::size_t>(of)].range;
    std::uint64_t range = other.load(std::memory_order_relaxed);
    while (next_of(range) < end_of(range)) {
      const std::int64_t middle = next_of(range) + (end_of(range) - next_of(range)) / 2;
      if (!other.compare_exchange_weak(range, range_of(next_of(range), middle), std::memory_order_relaxed)) continue;
      shares_[static_cast<std::size_t>(worker)].range.store(range_of(middle, end_of(range)), std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

void ThreadPool::drain(int worker) noexcept {
  const std::atomic<std::uint64_t>& own = shares_[static_cast<std::size_t>(worker)].range;
  do {
    for (;;) {
      const std::uint64_t range = own.load(std::memory_order_relaxed);
      if (next_of(range) >= end_of(range)) break;
      if (const std::int64_t task = next_of(range); take(task, worker)) fn_(ctx_, task, worker);
    }
  } while (steal(worker));
}

void ThreadPool::run_erased(std::int64_t n_tasks, TaskFn fn, void* ctx) {
  if (n_tasks <= 0) return;
  const std::lock_guard lock(turn_);
  fn_ = fn;
  ctx_ = ctx;
  std::int64_t begin = 0;
  for (int i = 0; i < n_threads_; ++i) {
    const std::int64_t end = begin + n_tasks / n_threads_ + (i < n_tasks % n_threads_ ? 1 : 0);
    shares_[static_cast<std::size_t>(i)].range.store(range_of(begin, end), std::memory_order_relaxed);
    begin = end;
  }
  if (n_threads_ == 1 || n_tasks == 1) return drain(0);
  finished_.store(0, std::memory_order_relaxed);
  const std::uint64_t epoch = (gate_.load(std::memory_order_relaxed) >> 16) + 1;
  gate_.store(epoch << 16 | kOpen, std::memory_order_release);
  wake_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) wake_.notify_all();

  drain(0);

  const std::uint64_t closed = gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  const auto joined = static_cast<std::uint32_t>(closed & kJoinedMask);
  for (int spins = 0; finished_.load(std::memory_order_acquire) != joined; ++spins)
    spins < kSpins ? pause() : std::this_thread::yield();
}

void ThreadPool::worker_main(int worker) {
  std::uint32_t seen = 0;
  for (;;) {
    std::uint32_t now = wake_.load(std::memory_order_acquire);
    for (int spins = 0; now == seen && spins < kSpins; ++spins) {
      pause();
      now = wake_.load(std::memory_order_acquire);
    }
    if (now == seen) {
      parked_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(seen, std::memory_order_seq_cst);
      parked_.fetch_sub(1, std::memory_order_seq_cst);
      now = wake_.load(std::memory_order_acquire);
    }
    seen = now;
    if (stop_.load(std::memory_order_acquire)) return;

    std::uint64_t gate = gate_.load(std::memory_order_acquire);
    bool joined = false;
    while (!joined && (gate & kOpen) != 0)
      joined = gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire);
    if (!joined) continue;
    drain(worker);
    finished_.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace moeflux
