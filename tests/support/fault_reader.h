// A reader around another one that breaks chosen reads.
#pragma once

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "io/async_reader.h"

namespace moeflux::test {

// What happens to a read that matches, and how often; the first rule with times left wins.
struct Fault {
  std::function<bool(const io::ReadRequest&)> matches = {};  // empty: all
  int times = 1;                                             // -1: always
  int error = 0;                                             // an errno value instead of the data
  std::optional<std::uint64_t> keep_bytes = {};              // a short read
  std::optional<std::uint64_t> flip_bit = {};                // counted from the first wanted byte
  std::chrono::nanoseconds delay{0};
};

class FaultReader final : public io::AsyncReader {
 public:
  explicit FaultReader(std::unique_ptr<io::AsyncReader> inner) : inner_(std::move(inner)) {}

  void add(Fault fault) {
    const std::lock_guard lock(mutex_);
    faults_.push_back(std::move(fault));
  }
  std::size_t n_injected() const {
    const std::lock_guard lock(mutex_);
    return n_injected_;
  }

  int submit(std::span<const io::ReadRequest> requests) noexcept override {
    const std::lock_guard lock(mutex_);
    std::vector<io::ReadRequest> renamed(requests.begin(), requests.end());
    for (std::size_t i = 0; i < renamed.size(); ++i) renamed[i].tag = next_id_ + i;
    const int status = inner_->submit(renamed);
    if (status != 0) return status;
    for (const io::ReadRequest& request : requests) live_.emplace(next_id_++, Live{request, choose(request)});
    return 0;
  }
  std::size_t poll(std::span<io::ReadCompletion> out) noexcept override {
    absorb(std::chrono::nanoseconds(0));
    return take(out);
  }
  std::size_t wait(std::span<io::ReadCompletion> out, std::chrono::nanoseconds timeout) noexcept override {
    const auto deadline = Clock::now() + std::min<std::chrono::nanoseconds>(timeout, std::chrono::hours(1));
    while (true) {
      if (const std::size_t n = take(out); n != 0 || Clock::now() >= deadline || outstanding() == 0) return n;
      // Short naps: held-back completions come due without anybody telling.
      if (!absorb(std::chrono::microseconds(200))) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  std::size_t cancel(std::uint64_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    std::size_t n = 0;
    for (const auto& [id, live] : live_)
      if (live.request.tag == tag) n += inner_->cancel(id);
    return n;
  }
  std::size_t cancel_hints() noexcept override { return inner_->cancel_hints(); }
  std::size_t promote(std::uint64_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    std::size_t n = 0;
    for (const auto& [id, live] : live_)
      if (live.request.tag == tag) n += inner_->promote(id);
    return n;
  }
  std::size_t outstanding() const noexcept override {
    const std::lock_guard lock(mutex_);
    return live_.size() + held_.size();
  }
  io::ReaderStats stats() const noexcept override { return inner_->stats(); }
  io::ReaderInfo info() const override { return inner_->info(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Live {
    io::ReadRequest request;
    std::optional<Fault> fault;
  };
  struct Held {
    io::ReadCompletion completion;
    Clock::time_point due;
  };

  std::optional<Fault> choose(const io::ReadRequest& request) {
    for (Fault& fault : faults_) {
      if (fault.times == 0 || (fault.matches && !fault.matches(request))) continue;
      if (fault.times > 0) --fault.times;
      ++n_injected_;
      return fault;
    }
    return std::nullopt;
  }
  // Whether anything came from the inner reader.
  bool absorb(std::chrono::nanoseconds timeout) {
    io::ReadCompletion buffer[16];
    const std::size_t n = timeout.count() == 0 ? inner_->poll(buffer) : inner_->wait(buffer, timeout);
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < n; ++i) {
      const auto it = live_.find(buffer[i].tag);
      buffer[i].tag = it->second.request.tag;
      const Clock::time_point due = damage(it->second, buffer[i]);
      live_.erase(it);
      held_.push_back({buffer[i], due});
    }
    return n != 0;
  }
  Clock::time_point damage(const Live& live, io::ReadCompletion& completion) {
    if (!live.fault || completion.status != 0) return Clock::now();
    const Fault& fault = *live.fault;
    if (fault.error != 0) {
      completion.status = fault.error;
      completion.bytes = 0;
    }
    if (fault.keep_bytes) completion.bytes = std::min(completion.bytes, *fault.keep_bytes);
    if (fault.flip_bit && *fault.flip_bit / 8 < completion.bytes) {
      std::byte* const data = live.request.window + io::aligned_window(live.request.offset, 0).skew;
      data[*fault.flip_bit / 8] ^= static_cast<std::byte>(1U << (*fault.flip_bit % 8));
    }
    return Clock::now() + fault.delay;
  }
  std::size_t take(std::span<io::ReadCompletion> out) {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    std::size_t n = 0;
    for (std::size_t i = 0; i < held_.size() && n < out.size();) {
      if (held_[i].due <= now) {
        out[n++] = held_[i].completion;
        held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    return n;
  }

  std::unique_ptr<io::AsyncReader> inner_;
  mutable std::mutex mutex_;
  std::vector<Fault> faults_;
  std::map<std::uint64_t, Live> live_;
  std::vector<Held> held_;
  std::uint64_t next_id_ = 0;
  std::size_t n_injected_ = 0;
};

}  // namespace moeflux::test
