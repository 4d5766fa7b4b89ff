#include "core/thread_pool.h"

#include <algorithm>

namespace moeflux {
namespace {

constexpr std::uint32_t kOpen = 1, kAtWork = 1;
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

ThreadPool::ThreadPool(int n_threads) : n_threads_(clamp_threads(n_threads)), fits_(n_threads_ <= usable_cores()), shares_(static_cast<std::size_t>(n_threads_)), seats_(static_cast<std::size_t>(n_threads_)) {
  workers_.reserve(static_cast<std::size_t>(n_threads_ - 1));
  for (int i = 1; i < n_threads_; ++i) workers_.emplace_back([this, i] { worker_main(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_seq_cst);
  job_.fetch_add(2 | kOpen, std::memory_order_seq_cst);  // to wake them: nobody begins it
  job_.notify_all();
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
  const std::uint32_t job = (job_.load(std::memory_order_relaxed) | kOpen) + 2;
  job_.store(job, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) job_.notify_all();

  drain(0);

  job_.store(job & ~kOpen, std::memory_order_seq_cst);
  for (std::size_t i = 1; i < seats_.size(); ++i)
    for (int spins = 0; seats_[i].job.load(std::memory_order_seq_cst) == job; ++spins)
      spins < kSpins ? pause() : std::this_thread::yield();
}

// Another one than `seen`, whether open or not.
std::uint32_t ThreadPool::next_job(std::uint32_t seen) noexcept {
  std::uint32_t now = job_.load(std::memory_order_seq_cst);
  for (int spins = 0; now >> 1 == seen >> 1; ++spins) {
    if (n_awake_.load(std::memory_order_relaxed) > 0) {
      pause();
      spins = 0;
    } else if (spins < kSpins) {
      pause();
    } else {
      parked_.fetch_add(1, std::memory_order_seq_cst);
      job_.wait(now, std::memory_order_seq_cst);
      parked_.fetch_sub(1, std::memory_order_seq_cst);
      spins = 0;
    }
    now = job_.load(std::memory_order_seq_cst);
  }
  return now;
}

void ThreadPool::worker_main(int worker) {
  std::atomic<std::uint32_t>& seat = seats_[static_cast<std::size_t>(worker)].job;
  for (std::uint32_t job = 0;;) {
    job = next_job(job);
    if (stop_.load(std::memory_order_seq_cst)) return;
    if ((job & kOpen) == 0) continue;  // too late
    seat.store(job, std::memory_order_seq_cst);
    if (job_.load(std::memory_order_seq_cst) == job) drain(worker);
    seat.store(job & ~kAtWork, std::memory_order_release);
  }
}

}  // namespace moeflux
