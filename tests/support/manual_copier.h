// A copier whose copies are made when the test says so, in the order it says; the "device" is another piece of host memory.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/async_copier.h"
#include "core/buffer.h"

namespace moeflux::test {

class ManualCopier final : public AsyncCopier {
 public:
  struct Job {
    CopyDirection direction;
    std::uint64_t tag;
    std::vector<CopyPart> parts;
  };
  // Which of the pending jobs is done next; called (under the copier's lock) when somebody waits and nothing is done. Without one,
  // waiters wait for complete() from another thread.
  using Chooser = std::function<std::size_t(std::size_t n_pending)>;
  explicit ManualCopier(Chooser chooser = {}) : chooser_(std::move(chooser)) {}

  std::size_t n_pending() const {
    const std::lock_guard lock(mutex_);
    return pending_.size();
  }
  void complete(std::size_t i, bool ok = true) {
    const std::lock_guard lock(mutex_);
    finish(i, ok);
  }
  // The next n jobs fail when they are done, or are not taken at all.
  void fail_next(int n) {
    const std::lock_guard lock(mutex_);
    to_fail_ = n;
  }
  void refuse_next(int n) {
    const std::lock_guard lock(mutex_);
    to_refuse_ = n;
  }

  bool start(CopyDirection direction, std::uint64_t tag, std::span<const CopyPart> parts) noexcept override {
    const std::lock_guard lock(mutex_);
    if (to_refuse_ > 0) {
      --to_refuse_;
      return false;
    }
    pending_.push_back({direction, tag, {parts.begin(), parts.end()}});
    return true;
  }
  std::size_t poll(std::span<CopyCompletion> out) noexcept override {
    const std::lock_guard lock(mutex_);
    return take(out);
  }
  std::size_t wait(std::span<CopyCompletion> out, std::chrono::nanoseconds timeout) noexcept override {
    std::unique_lock lock(mutex_);
    if (done_.empty() && !pending_.empty() && chooser_) finish(chooser_(pending_.size()), true);
    changed_.wait_for(lock, timeout, [this] { return !done_.empty() || pending_.empty(); });
    return take(out);
  }
  std::size_t outstanding() const noexcept override {
    const std::lock_guard lock(mutex_);
    return pending_.size() + done_.size();
  }
  std::string failure() const override { return "by hand"; }

 private:
  void finish(std::size_t i, bool ok) {
    const Job job = pending_.at(i);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    if (to_fail_ > 0) {
      --to_fail_;
      ok = false;
    }
    for (const CopyPart& p : job.parts)
      if (ok)
        std::memcpy(p.to, p.from, p.bytes);
      else
        std::memset(p.to, 0xEE, p.bytes);
    done_.push_back({job.tag, job.direction, ok});
    changed_.notify_all();
  }
  std::size_t take(std::span<CopyCompletion> out) {
    const std::size_t n = std::min(out.size(), done_.size());
    std::copy_n(done_.begin(), n, out.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(n));
    return n;
  }

  Chooser chooser_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Job> pending_;
  std::deque<CopyCompletion> done_;
  int to_fail_ = 0, to_refuse_ = 0;
};

// Copies when somebody looks: for tests that do not care about order. Allocates nothing when warm.
class PromptCopier final : public AsyncCopier {
 public:
  PromptCopier() { done_.reserve(1024); }  // tests count allocations
  bool start(CopyDirection direction, std::uint64_t tag, std::span<const CopyPart> parts) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const CopyPart& p : parts) std::memcpy(p.to, p.from, p.bytes);
    done_.push_back({tag, direction, true});
    return true;
  }
  std::size_t poll(std::span<CopyCompletion> out) noexcept override {
    const std::lock_guard lock(mutex_);
    const std::size_t n = std::min(out.size(), done_.size());
    std::copy_n(done_.begin(), n, out.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(n));
    return n;
  }
  std::size_t wait(std::span<CopyCompletion> out, std::chrono::nanoseconds) noexcept override { return poll(out); }
  std::size_t outstanding() const noexcept override {
    const std::lock_guard lock(mutex_);
    return done_.size();
  }
  std::string failure() const override { return ""; }

 private:
  mutable std::mutex mutex_;
  std::vector<CopyCompletion> done_;
};

// Host memory that knows what it has given out.
class KnownAllocator final : public Allocator {
 public:
  Buffer allocate(std::size_t bytes, std::size_t alignment) override {
    Buffer b = inner_.allocate(bytes, alignment);
    ranges_.emplace_back(b.data(), b.bytes());
    return b;
  }
  bool owns(const void* p) const {
    const auto* at = static_cast<const std::byte*>(p);
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& r) { return at >= r.first && at < r.first + r.second; });
  }

 protected:
  void release(std::byte*, std::size_t) noexcept override {}  // inner_'s buffers go back to it

 private:
  HostAllocator inner_;
  std::vector<std::pair<std::byte*, std::size_t>> ranges_;
};

}  // namespace moeflux::test
