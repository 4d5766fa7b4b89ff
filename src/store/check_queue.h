// Checksums of records that have just been read, beside everything else: by a thread of its own, and by whoever waits for one.
//
// Whoever computes tokens does not compute checksums as long as there is somebody else to do it. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "store/record_check.h"

namespace moeflux::store {

class CheckQueue {
 public:
  struct Item {
    std::uint32_t slot = 0;
    std::span<const std::byte> bytes;  // stay as they are until the verdict has been taken
    RecordCheck check;
  };
  struct Verdict {
    std::uint32_t slot = 0;
    bool good = false;
  };

  explicit CheckQueue(std::size_t most);  // items at a time: nothing is allocated later
  ~CheckQueue();
  CheckQueue(const CheckQueue&) = delete;
  CheckQueue& operator=(const CheckQueue&) = delete;

  // The thread hears of items by wake(), once for all of them: more than `keep` wait, the rest is the caller's, who helps next.
  void add(const Item& item);
  void wake(std::size_t keep);
  // Items without a verdict that was taken.
  std::size_t pending() const;
  // Verdicts that are there; clears `out` first.
  void take(std::vector<Verdict>& out);
  // Computes one that nobody has begun, or waits up to that long for one that somebody has. False: there was neither.
  bool help(std::chrono::nanoseconds patience);

 private:
  void work();
  // mutex_ held; gives it back meanwhile.
  void check_one(std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable added_, done_;
  std::vector<Item> waiting_;  // a ring would keep the order; the last one is as good as any
  std::vector<Verdict> verdicts_;
  std::size_t running_ = 0;
  std::atomic<std::uint64_t> n_done_{0};  // verdicts ever given
  bool stop_ = false;
  std::thread thread_;  // last
};

}  // namespace moeflux::store
