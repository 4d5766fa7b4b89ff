#include "io/stream_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace moeflux::io {

void StreamFile::Free::operator()(std::byte* p) const noexcept { std::free(p); }

StreamFile::StreamFile(std::filesystem::path path, std::uint64_t size) : path_(std::move(path)), size_(size) {
  for (auto& buffer : buffers_) {
    buffer.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, kBufferBytes)));
    if (buffer == nullptr) throw std::bad_alloc();
  }
  open();
  try {
    reserve();
    const std::uint64_t n_buffers = size_ / kBufferBytes;  // the rest is written by finish()
    while (writers_.size() < std::min<std::uint64_t>(kWriters, n_buffers))
      writers_.emplace_back([this] { write_loop(); });
  } catch (...) {
    stop();
    ::close(fd_);
    throw;
  }
}

StreamFile::~StreamFile() {
  stop();
  if (fd_ >= 0) ::close(fd_);
}

void StreamFile::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& writer : writers_) writer.join();
  writers_.clear();
}

void StreamFile::open() {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  fd_ = ::open(path_.c_str(), kFlags, 0666);
  if (fd_ < 0) fail_io("cannot create", errno);
  // Asked for separately: a file system that refuses it may have created the file already.
  (void)::fcntl(fd_, F_SETFL, O_DIRECT);
}

void StreamFile::reserve() {
  int result = 0;
  do {
    result = ::fallocate(fd_, 0, 0, static_cast<off_t>(size_));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS)
    fail_io(fmt::format("no room for {} bytes", size_).c_str(), errno);
}

void StreamFile::append(std::span<const std::byte> bytes) {
  appended_ += bytes.size();
  while (!bytes.empty()) {
    const std::size_t n = std::min(bytes.size(), kBufferBytes - used_);
    std::memcpy(buffers_[n_full_ % kBuffers].get() + used_, bytes.data(), n);
    used_ += n;
    bytes = bytes.subspan(n);
    if (used_ == kBufferBytes) hand_over();
  }
}

void StreamFile::hand_over() {
  std::unique_lock lock(mutex_);
  busy_[n_full_++ % kBuffers] = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return error_ != 0 || !busy_[n_full_ % kBuffers]; });
  if (error_ != 0) fail_io("writing failed", error_);
  used_ = 0;
}

void StreamFile::wait_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return error_ != 0 || n_full_ == n_written_; });
  if (error_ != 0) fail_io("writing failed", error_);
}

void StreamFile::finish() {
  if (appended_ != size_)
    fail(ErrorCode::Internal, "{}: {} bytes were made, {} announced", path_.string(), appended_, size_);
  wait_idle();
  const std::uint64_t offset = n_full_ * kBufferBytes;
  if (used_ > 0) {
    // Direct writes have whole sectors; what is too much is cut off again.
    const std::size_t padded = (used_ + kAlignment - 1) / kAlignment * kAlignment;
    std::byte* last = buffers_[n_full_ % kBuffers].get();
    std::memset(last + used_, 0, padded - used_);
    if (const int error = write_at(offset, {last, padded})) fail_io("writing failed", error);
  }
  if (::ftruncate(fd_, static_cast<off_t>(size_)) != 0) fail_io("cannot set its size", errno);
  if (::fsync(fd_) != 0) fail_io("fsync failed", errno);
  // Some file systems report a failed write only here.
  if (::close(std::exchange(fd_, -1)) != 0) fail_io("closing failed", errno);
}

int StreamFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) noexcept {
  bool through_cache = false;
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    // Accepted when it was set, refused when it is used: some file systems do that.
    if (n < 0 && errno == EINVAL && !std::exchange(through_cache, true) && ::fcntl(fd_, F_SETFL, 0) == 0)
      continue;
    if (n < 0) return errno;
    // A short direct write ends on a sector, except on a full disk: the rest then says so.
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return 0;
}

void StreamFile::write_loop() noexcept {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || n_claimed_ < n_full_; });
    if (stop_ || error_ != 0) return;
    const std::uint64_t index = n_claimed_++;
    lock.unlock();
    const int error = write_at(index * kBufferBytes, {buffers_[index % kBuffers].get(), kBufferBytes});
    lock.lock();
    ++n_written_;
    busy_[index % kBuffers] = false;
    if (error != 0) error_ = error;
    changed_.notify_all();
  }
}

void StreamFile::fail_io(const char* what, int error) const {
  fail(ErrorCode::Io, "{}: {}: {}", path_.string(), what, std::generic_category().message(error));
}

}  // namespace moeflux::io
