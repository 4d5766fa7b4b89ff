// A reader whose reads complete when the test says so, in the order it says.
#pragma once

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "io/async_reader.h"
#include "io/file.h"

namespace moeflux::test {

class ManualReader final : public io::AsyncReader {
 public:
  // Which of the pending requests completes next; called (under the reader's lock) when somebody waits and
  // nothing is done. Without one, waiters wait for complete() or fail() from another thread.
  using Chooser = std::function<std::size_t(std::span<const io::ReadRequest> pending)>;

  explicit ManualReader(std::span<const std::filesystem::path> files, Chooser chooser = {})
      : chooser_(std::move(chooser)) {
    for (const std::filesystem::path& path : files) files_.push_back(io::File::open(path));
  }

  // In the order of submission. Both calls below take an index into it.
  std::vector<io::ReadRequest> pending() const {
    const std::lock_guard lock(mutex_);
    return pending_;
  }
  // Reads now and completes; `at_most` cuts it short as the end of a file does.
  void complete(std::size_t i, std::uint64_t at_most = ~std::uint64_t{0}) {
    const std::lock_guard lock(mutex_);
    finish(i, 0, at_most);
  }
  void fail(std::size_t i, int error) {
    const std::lock_guard lock(mutex_);
    finish(i, error, 0);
  }
  std::size_t n_submitted() const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::size_t>(stats_.requests);
  }

  int submit(std::span<const io::ReadRequest> requests) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const io::ReadRequest& r : requests)
      if (r.file >= files_.size() ||
          (r.bytes != 0 && reinterpret_cast<std::uintptr_t>(r.window) % io::kDirectAlign != 0))
        return EINVAL;
    stats_.requests += requests.size();
    pending_.insert(pending_.end(), requests.begin(), requests.end());
    return 0;
  }
  std::size_t poll(std::span<io::ReadCompletion> out) noexcept override {
    const std::lock_guard lock(mutex_);
    return take(out);
  }
  std::size_t wait(std::span<io::ReadCompletion> out, std::chrono::nanoseconds timeout) noexcept override {
    std::unique_lock lock(mutex_);
    if (done_.empty() && !pending_.empty() && chooser_) finish(chooser_(pending_), 0, ~std::uint64_t{0});
    changed_.wait_for(lock, timeout, [this] { return !done_.empty() || pending_.empty(); });
    return take(out);
  }
  std::size_t cancel(std::uint64_t tag) noexcept override {
    return cancel_if([tag](const io::ReadRequest& r) { return r.tag == tag; });
  }
  std::size_t cancel_hints() noexcept override {
    return cancel_if([](const io::ReadRequest&) { return true; });
  }
  std::size_t promote(std::uint64_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    std::size_t n = 0;
    for (io::ReadRequest& r : pending_) {
      if (r.priority != io::ReadPriority::Hint || r.tag != tag) continue;
      r.priority = io::ReadPriority::Demand;
      ++n;
    }
    return n;
  }
  std::size_t outstanding() const noexcept override {
    const std::lock_guard lock(mutex_);
    return pending_.size();
  }
  io::ReaderStats stats() const noexcept override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  io::ReaderInfo info() const override {
    io::ReaderInfo info;
    info.n_files = files_.size();
    info.note = "by hand";
    return info;
  }

 private:
  // What lies around the wanted bytes is trash, as it may be with real blocks.
  void finish(std::size_t i, int status, std::uint64_t at_most) {
    const io::ReadRequest r = pending_.at(i);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    std::uint64_t bytes = 0;
    const io::AlignedWindow w = io::aligned_window(r.offset, r.bytes);
    if (r.bytes != 0) std::memset(r.window, 0xA5, w.bytes);
    if (status == 0) {
      const std::uint64_t size = files_[r.file].size();
      bytes = std::min({r.bytes, at_most, size - std::min(size, r.offset)});
      if (bytes != 0)
        files_[r.file].read_exact(r.offset, {r.window + w.skew, static_cast<std::size_t>(bytes)});
    }
    stats_.bytes += bytes;
    ++stats_.completed;
    done_.push_back({r.tag, status, bytes});
    changed_.notify_all();
  }
  template <class Matches>
  std::size_t cancel_if(Matches matches) noexcept {
    const std::lock_guard lock(mutex_);
    std::size_t n = 0;
    for (std::size_t i = 0; i < pending_.size();) {
      if (pending_[i].priority == io::ReadPriority::Hint && matches(pending_[i])) {
        done_.push_back({pending_[i].tag, ECANCELED, 0});
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
        ++stats_.cancelled;
        ++n;
      } else {
        ++i;
      }
    }
    if (n != 0) changed_.notify_all();
    return n;
  }
  std::size_t take(std::span<io::ReadCompletion> out) {
    const std::size_t n = std::min(out.size(), done_.size());
    std::copy_n(done_.begin(), n, out.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(n));
    return n;
  }

  Chooser chooser_;
  std::vector<io::File> files_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<io::ReadRequest> pending_;
  std::deque<io::ReadCompletion> done_;
  io::ReaderStats stats_;
};

}  // namespace moeflux::test
