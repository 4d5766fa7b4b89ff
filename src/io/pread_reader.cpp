// Reads by a pool of threads, for systems without io_uring.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "io/read_queue.h"
#include "io/readers.h"

namespace moeflux::io {
namespace {

class PreadReader final : public AsyncReader {
 public:
  PreadReader(std::vector<DirectFile>& files, const MemoryRegions& regions, const ReaderOptions& options,
              std::string note)
      : note_(std::move(note)), queue_(options, files.size(), regions, options.n_threads) {
    files_.swap(files);
    threads_.reserve(options.n_threads);
    try {
      for (std::uint32_t i = 0; i < options.n_threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& e) {
      stop();
      files_.swap(files);
      fail(ErrorCode::OutOfMemory, "cannot start {} threads for reading: {}", options.n_threads, e.what());
    }
  }

  ~PreadReader() override { stop(); }

  int submit(std::span<const ReadRequest> requests) noexcept override {
    const std::lock_guard lock(mutex_);
    const int status = queue_.submit(requests);
    if (status == 0) wake();
    return status;
  }

  std::size_t poll(std::span<ReadCompletion> out) noexcept override {
    const std::lock_guard lock(mutex_);
    return take(out);
  }

  std::size_t wait(std::span<ReadCompletion> out, std::chrono::nanoseconds timeout) noexcept override {
    std::unique_lock lock(mutex_);
    done_.wait_for(lock, std::min(timeout, kForever),
                   [this] { return queue_.has_completions() || queue_.outstanding() == 0; });
    return take(out);
  }

  std::size_t cancel(std::uint64_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    const std::size_t n = queue_.cancel_hints(&tag);
    wake();
    return n;
  }

  std::size_t cancel_hints() noexcept override {
    const std::lock_guard lock(mutex_);
    const std::size_t n = queue_.cancel_hints(nullptr);
    wake();
    return n;
  }

  std::size_t promote(std::uint64_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    const std::size_t n = queue_.promote(tag);
    wake();
    return n;
  }

  std::size_t outstanding() const noexcept override {
    const std::lock_guard lock(mutex_);
    return queue_.outstanding();
  }

  ReaderStats stats() const noexcept override {
    const std::lock_guard lock(mutex_);
    return queue_.stats();
  }

  ReaderInfo info() const override {
    ReaderInfo info = describe_files(files_);
    info.kind = ReaderKind::Pread;
    info.depth = static_cast<std::uint32_t>(threads_.size());
    if (!note_.empty()) info.note = info.note.empty() ? note_ : note_ + "; " + info.note;
    return info;
  }

 private:
  void wake() noexcept {
    work_.notify_all();
    if (queue_.has_completions() || queue_.outstanding() == 0) done_.notify_all();
  }

  std::size_t take(std::span<ReadCompletion> out) noexcept {
    const std::size_t n = queue_.take(out);
    // Whoever waits for something that another thread has taken must see that nothing is left.
    if (queue_.has_completions() || queue_.outstanding() == 0) done_.notify_all();
    return n;
  }

  void work() noexcept {
    std::unique_lock lock(mutex_);
    while (true) {
      ReadPiece* piece = nullptr;
      work_.wait(lock, [&] { return stopping_ || (piece = queue_.next()) != nullptr; });
      if (piece == nullptr) return;
      do {
        lock.unlock();
        const std::int64_t result = read(*piece);
        lock.lock();
        if (!queue_.finish(piece, result)) piece = nullptr;
      } while (piece != nullptr);
      if (queue_.has_completions() || queue_.outstanding() == 0) done_.notify_all();
    }
  }

  std::int64_t read(const ReadPiece& piece) const noexcept {
    const ssize_t got = ::pread(files_[piece.file].file.fd(), piece.target,
                                static_cast<std::size_t>(piece.bytes()), static_cast<off_t>(piece.offset));
    return got < 0 ? -errno : got;
  }

  void stop() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      queue_.drop_queued();
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  std::vector<DirectFile> files_;
  const std::string note_;
  mutable std::mutex mutex_;
  std::condition_variable work_, done_;
  ReadQueue queue_;  // and stopping_: under mutex_
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<AsyncReader> make_pread_reader(std::vector<DirectFile>& files, const MemoryRegions& regions,
                                               const ReaderOptions& options, std::string note) {
  return std::make_unique<PreadReader>(files, regions, options, std::move(note));
}

}  // namespace moeflux::io
