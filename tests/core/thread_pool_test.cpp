#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace moeflux {
namespace {

void expect_each_task_once(ThreadPool& pool, std::int64_t n) {
  std::vector<int> hits(static_cast<std::size_t>(n), 0);  // plain ints: a task has one owner
  std::atomic<bool> worker_in_range{true};
  pool.run(n, [&](std::int64_t task, int worker) noexcept {
    ++hits[static_cast<std::size_t>(task)];
    if (worker < 0 || worker >= pool.size()) worker_in_range = false;
  });
  EXPECT_TRUE(worker_in_range);
  for (std::int64_t i = 0; i < n; ++i)
    ASSERT_EQ(hits[static_cast<std::size_t>(i)], 1) << "task " << i << " of " << n;
}

TEST(ThreadPool, EveryTaskOnce) {
  for (const int threads : {1, 2, 3, 5, 16}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const std::int64_t n : {0, 1, 2, 3, 17, 1000}) expect_each_task_once(pool, n);
  }
}

// A task may go on with those behind it: whoever takes one runs it, and nobody else does.
TEST(ThreadPool, TakenTasksAreNotHandedOut) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (const std::int64_t n : {1, 2, 17, 1000}) {
      std::vector<int> hits(static_cast<std::size_t>(n), 0);
      std::atomic<std::int64_t> calls{0};
      pool.run(n, [&](std::int64_t task, int worker) noexcept {
        ++calls;
        ++hits[static_cast<std::size_t>(task)];
        for (int i = 0; i < 3 && task + 1 < n && pool.take(task + 1, worker); ++i) ++hits[static_cast<std::size_t>(++task)];
      });
      for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(hits[static_cast<std::size_t>(i)], 1) << "task " << i << " of " << n;
      if (threads == 1) {
        EXPECT_EQ(calls, (n + 3) / 4);
      }
    }
  }
}

TEST(ThreadPool, OnlyTheNextTaskCanBeTaken) {
  ThreadPool pool(1);
  std::int64_t calls = 0;
  pool.run(4, [&](std::int64_t task, int worker) noexcept {
    ++calls;
    EXPECT_FALSE(pool.take(task, worker));
    EXPECT_FALSE(pool.take(task + 2, worker));
    EXPECT_FALSE(task == 3 && pool.take(task + 1, worker));
  });
  EXPECT_EQ(calls, 4);
}

TEST(ThreadPool, SizeDefaultsToCores) {
  EXPECT_EQ(ThreadPool(0).size(), usable_cores());
  EXPECT_EQ(ThreadPool(-3).size(), usable_cores());
  EXPECT_GE(usable_cores(), 1);
}

TEST(ThreadPool, ManyTinyJobs) {
  ThreadPool pool(3);
  std::atomic<std::int64_t> sum{0};
  for (int job = 0; job < 20000; ++job)
    pool.run(1 + job % 7,
             [&](std::int64_t task, int) noexcept { sum.fetch_add(task + 1, std::memory_order_relaxed); });
  std::int64_t want = 0;
  for (int job = 0; job < 20000; ++job) want += (1 + job % 7) * (2 + job % 7) / 2;
  EXPECT_EQ(sum.load(), want);
}

// Results written by tasks without atomics are visible to the caller, and what the caller wrote before to the
// tasks.
TEST(ThreadPool, MemoryIsHandedOver) {
  ThreadPool pool(4);
  std::vector<std::int64_t> in(64), out(64);
  for (std::int64_t round = 0; round < 2000; ++round) {
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = round + static_cast<std::int64_t>(i);
    pool.run(64, [&](std::int64_t t, int) noexcept {
      out[static_cast<std::size_t>(t)] = 2 * in[static_cast<std::size_t>(t)];
    });
    for (std::size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], 2 * in[i]);
  }
}

TEST(ThreadPool, WorkerNumbersAreUniqueAtAnyMoment) {
  ThreadPool pool(8);
  std::vector<std::atomic<int>> busy(8);
  std::atomic<bool> clash{false};
  for (int job = 0; job < 200; ++job)
    pool.run(50, [&](std::int64_t, int worker) noexcept {
      if (busy[static_cast<std::size_t>(worker)].fetch_add(1) != 0) clash = true;
      std::this_thread::yield();
      busy[static_cast<std::size_t>(worker)].fetch_sub(1);
    });
  EXPECT_FALSE(clash);
}

TEST(ThreadPool, TwoPoolsAtOnce) {
  const auto work = [] {
    ThreadPool pool(3);
    for (int i = 0; i < 300; ++i) expect_each_task_once(pool, 20);
  };
  std::thread other(work);
  work();
  other.join();
}

TEST(ThreadPool, ConcurrentCallersTakeTurns) {
  ThreadPool pool(4);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 300; ++i) expect_each_task_once(pool, 13);
    });
  for (std::thread& t : callers) t.join();
}

TEST(ThreadPool, WakesAfterParking) {
  ThreadPool pool(4);
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // far longer than workers spin
    expect_each_task_once(pool, 100);
  }
}

// Tasks that wait for each other: with as many tasks as threads, all of them must run at the same time.
// Parked workers have to be woken for it.
// Nested, with breaks in between, back to parking, and to the end while awake; with more threads than cores it says nothing.
TEST(ThreadPool, StaysAwake) {
  for (const int threads : {2, usable_cores() + 3}) {
    ThreadPool pool(threads);
    for (const int steps : {1, 1, -1, -1, 1}) {
      pool.stay_awake(steps > 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      expect_each_task_once(pool, 100);
    }
  }
}

TEST(ThreadPool, AllThreadsTakePart) {
  ThreadPool pool(4);
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::atomic<int> arrived{0};
    pool.run(4, [&](std::int64_t, int) noexcept {
      arrived.fetch_add(1);
      while (arrived.load() < 4) std::this_thread::yield();
    });
    EXPECT_EQ(arrived.load(), 4);
  }
}

TEST(ThreadPool, DestructionWhileIdle) {
  for (int i = 0; i < 50; ++i) {
    ThreadPool never_used(5);
    ThreadPool used(5);
    expect_each_task_once(used, 10);
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));  // some while parked
  }
}

}  // namespace
}  // namespace moeflux
