#include "store/check_queue.h"

namespace moeflux::store {

CheckQueue::CheckQueue(std::size_t most) {
  waiting_.reserve(most);
  verdicts_.reserve(most);
  thread_ = std::thread([this] { work(); });
}

CheckQueue::~CheckQueue() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  added_.notify_all();
  thread_.join();
}

void CheckQueue::add(const Item& item) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(item);
}

void CheckQueue::wake(std::size_t keep) {
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() <= keep) return;
  }
  added_.notify_one();
}

std::size_t CheckQueue::pending() const {
  const std::lock_guard lock(mutex_);
  return waiting_.size() + running_ + verdicts_.size();
}

void CheckQueue::take(std::vector<Verdict>& out) {
  out.clear();
  const std::lock_guard lock(mutex_);
  out.insert(out.end(), verdicts_.begin(), verdicts_.end());
  verdicts_.clear();
}

bool CheckQueue::help(std::chrono::nanoseconds patience) {
  std::unique_lock lock(mutex_);
  if (!verdicts_.empty()) return true;
  if (!waiting_.empty()) {
    check_one(lock);
    return true;
  }
  if (running_ == 0) return false;
  // A checksum takes some tens of microseconds, and so does waking up.
  constexpr int kLooks = 2000;
  const std::uint64_t before = n_done_.load(std::memory_order_acquire);
  lock.unlock();
  for (int i = 0; i < kLooks; ++i) {
    if (n_done_.load(std::memory_order_acquire) != before) return true;
    if (i % 16 == 15) std::this_thread::yield();
  }
  lock.lock();
  done_.wait_for(lock, patience, [this] { return !verdicts_.empty(); });
  return true;
}

void CheckQueue::check_one(std::unique_lock<std::mutex>& lock) {
  const Item item = waiting_.back();
  waiting_.pop_back();
  ++running_;
  lock.unlock();
  const bool good = item.check.passes(item.bytes);
  lock.lock();
  --running_;
  verdicts_.push_back({item.slot, good});
  n_done_.fetch_add(1, std::memory_order_release);
  done_.notify_all();
}

void CheckQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    added_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    check_one(lock);
  }
}

}  // namespace moeflux::store
