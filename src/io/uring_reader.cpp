// Reads by io_uring.
//
// No thread of its own: whoever submits hands the reads to the kernel, whoever polls or waits collects. On a
// machine whose cores are all computing, a thread for this would first have to be scheduled. One waiter at a
// time sleeps in the kernel (the leader), others on a condition variable. The submission side of the ring is
// used under the lock only, and so is the completion side; the leader sleeps without the lock, in a call that
// touches neither.
#include <liburing.h>

#include <algorithm>
#include <bit>
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

using Clock = std::chrono::steady_clock;

std::string reason(int error) { return std::generic_category().message(error); }

// The kernel refuses to pin more than this as one buffer.
constexpr std::uint64_t kMaxPinned = std::uint64_t{1} << 30;
constexpr int kOpenAttempts = 20;
constexpr std::chrono::milliseconds kOpenPause(10);
// How long to leave a kernel alone that takes no submissions.
constexpr std::chrono::milliseconds kBusyPause(1);

class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (open_) io_uring_queue_exit(&ring_);
  }

  // 0 or errno.
  int open(std::uint32_t entries) {
    io_uring_params params{};
    int result = 0;
    // A ring counts as locked memory, and that of one just closed is given back a moment later.
    for (int attempt = 0; attempt < kOpenAttempts; ++attempt) {
      if (attempt != 0) std::this_thread::sleep_for(kOpenPause);
      params = {};
      result = io_uring_queue_init_params(entries, &ring_, &params);
      if (result != -ENOMEM) break;
    }
    if (result < 0) return -result;
    open_ = true;
    // Waiting with a timeout must not need a submission, and completions must not be lost.
    const std::uint32_t needed = IORING_FEAT_EXT_ARG | IORING_FEAT_NODROP;
    return (params.features & needed) == needed ? 0 : ENOSYS;
  }
  io_uring* get() noexcept { return &ring_; }

 private:
  io_uring ring_{};
  bool open_ = false;
};

class UringReader final : public AsyncReader {
 public:
  UringReader(const MemoryRegions& regions, const ReaderOptions& options, std::size_t n_files)
      : queue_(options, n_files, regions, options.depth) {}

  // 0 or errno; on success the files are ours.
  int open(std::vector<DirectFile>& files, const MemoryRegions& regions, const ReaderOptions& options) {
    depth_ = options.depth;
    // One entry for each piece and one to wake the leader.
    if (const int error = ring_.open(options.depth + 1); error != 0) return error;
    register_files(files);
    if (options.register_memory) register_memory(regions);
    files_.swap(files);
    return 0;
  }

  ~UringReader() override {
    const std::lock_guard lock(mutex_);
    queue_.drop_queued();
    closing_ = true;
    // Reads the kernel never took cannot write anywhere.
    while (in_kernel_ != 0) {
      sleep_in_kernel(kForever);
      reap();
    }
  }

  int submit(std::span<const ReadRequest> requests) noexcept override {
    const std::lock_guard lock(mutex_);
    const int status = queue_.submit(requests);
    if (status == 0) {
      issue();
      tell_waiters();
    }
    return status;
  }

  std::size_t poll(std::span<ReadCompletion> out) noexcept override {
    const std::lock_guard lock(mutex_);
    return collect(out);
  }

  std::size_t wait(std::span<ReadCompletion> out, std::chrono::nanoseconds timeout) noexcept override {
    const Clock::time_point deadline = Clock::now() + std::min(timeout, kForever);
    std::unique_lock lock(mutex_);
    while (true) {
      if (const std::size_t n = collect(out); n != 0 || out.empty()) return n;
      const Clock::time_point now = Clock::now();
      if (queue_.outstanding() == 0 || now >= deadline) return 0;
      if (leading_ || in_kernel_ == 0) {
        // No read is in the kernel though some are outstanding: it took none. Try again soon.
        const bool refused = !leading_;
        changed_.wait_until(lock, refused ? std::min(deadline, now + kBusyPause) : deadline);
        continue;
      }
      leading_ = true;
      lock.unlock();
      sleep_in_kernel(deadline - now);
      lock.lock();
      leading_ = false;
      reap();
      changed_.notify_all();
    }
  }

  std::size_t cancel(std::uint64_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    const std::size_t n = queue_.cancel_hints(&tag);
    tell_waiters();
    return n;
  }

  std::size_t cancel_hints() noexcept override {
    const std::lock_guard lock(mutex_);
    const std::size_t n = queue_.cancel_hints(nullptr);
    tell_waiters();
    return n;
  }

  std::size_t promote(std::uint64_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    const std::size_t n = queue_.promote(tag);
    issue();
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
    info.kind = ReaderKind::Uring;
    info.depth = depth_;
    info.registered_files = files_registered_;
    info.registered_memory = !pinned_.empty();
    for (const std::string& note : notes_) info.note += (info.note.empty() ? "" : "; ") + note;
    return info;
  }

 private:
  void register_files(const std::vector<DirectFile>& files) {
    std::vector<int> fds;
    for (const DirectFile& file : files) fds.push_back(file.file.fd());
    const int result = io_uring_register_files(ring_.get(), fds.data(), static_cast<unsigned>(fds.size()));
    files_registered_ = result == 0;
    if (result != 0) notes_.push_back("files are not registered: " + reason(-result));
  }

  void register_memory(const MemoryRegions& regions) {
    std::vector<iovec> chunks;
    for (const std::span<std::byte>& region : regions)
      for (std::uint64_t at = 0; at < region.size(); at += kMaxPinned)
        chunks.push_back({region.data() + at,
                          static_cast<std::size_t>(std::min<std::uint64_t>(kMaxPinned, region.size() - at))});
    if (chunks.empty()) return;
    const int result =
        io_uring_register_buffers(ring_.get(), chunks.data(), static_cast<unsigned>(chunks.size()));
    if (result == 0) {
      pinned_ = std::move(chunks);
    } else {
      notes_.push_back(fmt::format("memory is not registered: {} (the limit of locked memory, ulimit -l?)",
                                   reason(-result)));
    }
  }

  // The registered buffer that holds the whole piece, or -1.
  int pinned_chunk(const ReadPiece& piece) const noexcept {
    for (std::size_t i = 0; i < pinned_.size(); ++i) {
      const auto* const base = static_cast<const std::byte*>(pinned_[i].iov_base);
      if (piece.target >= base && piece.target + piece.bytes() <= base + pinned_[i].iov_len)
        return static_cast<int>(i);
    }
    return -1;
  }

  void prepare(ReadPiece* piece) noexcept {
    io_uring_sqe* const sqe = io_uring_get_sqe(ring_.get());  // never null: one entry for each piece
    const int fd = files_registered_ ? static_cast<int>(piece->file) : files_[piece->file].file.fd();
    const auto bytes = static_cast<unsigned>(piece->bytes());
    if (const int chunk = pinned_chunk(*piece); chunk >= 0) {
      io_uring_prep_read_fixed(sqe, fd, piece->target, bytes, piece->offset, chunk);
    } else {
      io_uring_prep_read(sqe, fd, piece->target, bytes, piece->offset);
    }
    unsigned flags = files_registered_ ? IOSQE_FIXED_FILE : 0U;
    // Where the kernel could not start it without waiting, one of its workers shall wait.
    if (piece->retried) flags |= IOSQE_ASYNC;
    io_uring_sqe_set_flags(sqe, flags);
    io_uring_sqe_set_data(sqe, piece);
  }

  // Hands all that may be issued to the kernel. What it does not take stays in the ring until the next call.
  void issue() noexcept {
    while (ReadPiece* const piece = queue_.next()) prepare(piece);
    push();
  }

  void push() noexcept {
    while (io_uring_sq_ready(ring_.get()) != 0) {
      const int n = io_uring_submit(ring_.get());
      if (n == -EINTR) continue;
      if (n <= 0) return;
      in_kernel_ += static_cast<std::size_t>(n);
    }
  }

  void reap() noexcept {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(ring_.get(), &cqe) == 0) {
      auto* const piece = static_cast<ReadPiece*>(io_uring_cqe_get_data(cqe));
      const std::int64_t result = cqe->res;
      io_uring_cqe_seen(ring_.get(), cqe);
      --in_kernel_;
      if (piece == nullptr) {
        nudged_ = false;
      } else if (queue_.finish(piece, result)) {
        if (!closing_) prepare(piece);
      }
    }
    if (!closing_) issue();
  }

  std::size_t collect(std::span<ReadCompletion> out) noexcept {
    reap();
    const std::size_t n = queue_.take(out);
    tell_waiters();
    return n;
  }

  // Completions that nobody in the kernel will announce, or nothing left to wait for.
  void tell_waiters() noexcept {
    if (!queue_.has_completions() && queue_.outstanding() != 0) return;
    changed_.notify_all();
    if (!leading_ || nudged_) return;
    io_uring_sqe* const sqe = io_uring_get_sqe(ring_.get());
    if (sqe == nullptr) return;  // the kernel takes nothing, so nobody is asleep there for long
    io_uring_prep_nop(sqe);
    io_uring_sqe_set_data(sqe, nullptr);
    nudged_ = true;
    push();
  }

  // Returns when a completion is there, the time is over or a signal came. Touches neither side of the ring.
  void sleep_in_kernel(std::chrono::nanoseconds timeout) noexcept {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    __kernel_timespec time{};
    time.tv_sec = seconds.count();
    time.tv_nsec = (timeout - seconds).count();
    io_uring_getevents_arg argument{};
    argument.ts = reinterpret_cast<std::uintptr_t>(&time);
    io_uring_enter2(static_cast<unsigned>(ring_.get()->enter_ring_fd), 0, 1,
                    IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, reinterpret_cast<sigset_t*>(&argument),
                    sizeof argument);
  }

  std::vector<DirectFile> files_;
  mutable std::mutex mutex_;  // everything below
  std::condition_variable changed_;
  ReadQueue queue_;
  std::uint32_t depth_ = 0;
  std::size_t in_kernel_ = 0;  // submitted, not reaped
  bool leading_ = false;       // a waiter is asleep in the kernel
  bool nudged_ = false;        // and will be woken
  bool closing_ = false;
  std::vector<iovec> pinned_;
  bool files_registered_ = false;
  std::vector<std::string> notes_;
  Ring ring_;  // goes first: it lets go of memory and files
};

}  // namespace

std::unique_ptr<AsyncReader> make_uring_reader(std::vector<DirectFile>& files, const MemoryRegions& regions,
                                               const ReaderOptions& options, std::string& why) {
  auto reader = std::make_unique<UringReader>(regions, options, files.size());
  const int error = reader->open(files, regions, options);
  if (error == 0) return reader;
  why = error == ENOSYS ? std::string("io_uring is missing or too old in this kernel")
                        : "io_uring cannot be set up: " + reason(error);
  return nullptr;
}

}  // namespace moeflux::io
