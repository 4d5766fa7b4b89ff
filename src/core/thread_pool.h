// Fork-join over a fixed set of threads: the only way moeflux computes in parallel.
//
// A pool belongs to one engine. run() gives every thread an even share of neighbouring task numbers, which it
// takes in ascending order (so that memory is read in order); who is done takes the later half of what another
// has left. It returns when all are done. Results must not depend on which thread ran which task: a task owns its output elements.
//
// Workers spin for some microseconds after a job, because the next one usually follows at once, then
// park (but see stay_awake). A worker that wakes too late for a job is not waited for, so a pool with more threads than
// cores is slow but never stuck.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace moeflux {

class ThreadPool {
 public:
  // n_threads counts the calling thread; n_threads < 1 means one per usable core.
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return n_threads_; }

  // Calls fn(task, worker) for every task in [0, n_tasks), n_tasks < 2^31; worker in [0, size()) is unique among the
  // calls that run at the same moment, so it may index scratch memory. fn must not throw and must not
  // call run(). Callable from any thread; concurrent callers take turns.
  template <class F>
  void run(std::int64_t n_tasks, F&& fn) {
    using Fn = std::remove_reference_t<F>;
    static_assert(std::is_nothrow_invocable_v<Fn&, std::int64_t, int>, "tasks are noexcept");
    run_erased(
        n_tasks, [](void* ctx, std::int64_t task, int worker) noexcept { (*static_cast<Fn*>(ctx))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

  // Inside a task: makes `task` the caller's as well, if it is the next one of this worker and nobody has it yet. fn will not
  // be called for it. For who can go on with less effort than begin anew.
  bool take(std::int64_t task, int worker) noexcept;

  // Between stay_awake(true) and stay_awake(false), which nest, workers do not park: for jobs that come at short notice, some hundred
  // microseconds after one another. Says nothing to a pool with more threads than cores.
  void stay_awake(bool awake) noexcept {
    if (fits_) n_awake_.fetch_add(awake ? 1 : -1, std::memory_order_relaxed);
  }

 private:
  using TaskFn = void (*)(void* ctx, std::int64_t task, int worker) noexcept;

  void run_erased(std::int64_t n_tasks, TaskFn fn, void* ctx);
  void worker_main(int worker);
  std::uint32_t next_job(std::uint32_t seen) noexcept;
  void drain(int worker) noexcept;
  bool steal(int worker) noexcept;

  const int n_threads_;
  const bool fits_;  // a core a thread
  std::mutex turn_;  // one job at a time

  // The job. Written before it is opened, stable until everybody who sat down has finished.
  TaskFn fn_ = nullptr;
  void* ctx_ = nullptr;
  // Tasks [next, end) as next << 32 | end: both change at once, the owner takes from the front, others from behind.
  struct alignas(64) Share {
    std::atomic<std::uint64_t> range{0};
  };
  std::vector<Share> shares_;  // of each thread
  // number of the job << 1 | open. A worker sits down with the job's number, then looks whether the job is open still; the caller closes
  // it, then waits for those who sit. Either the worker sees that it is closed or the caller sees the worker; nobody writes what
  // others write, so it takes no longer with many threads.
  alignas(64) std::atomic<std::uint32_t> job_{0};
  struct alignas(64) Seat {
    std::atomic<std::uint32_t> job{0};  // number << 1 | at work
  };
  alignas(64) std::vector<Seat> seats_;  // of each thread
  std::atomic<int> parked_{0}, n_awake_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

// Cores this process may use.
int usable_cores() noexcept;

}  // namespace moeflux
