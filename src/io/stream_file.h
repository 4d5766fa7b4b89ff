// Writing a large file from front to back at the speed of the disk.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace moeflux::io {

// A new file of known size. Bytes are collected in a few aligned buffers and written by a thread of its own
// past the page cache where the file system allows that, so that gigabytes of new data push nothing else out
// of memory. Space is reserved at once. One thread at a time. Failures are Io, naming the file; the
// half-written file is the caller's to remove.
class StreamFile {
 public:
  StreamFile(std::filesystem::path path, std::uint64_t size);
  ~StreamFile();
  StreamFile(const StreamFile&) = delete;
  StreamFile& operator=(const StreamFile&) = delete;

  // May throw for an earlier piece.
  void append(std::span<const std::byte> bytes);
  // Everything is on disk under its name. Internal: not as many bytes as announced.
  void finish();

 private:
  static constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
  static constexpr std::size_t kAlignment = 4096;
  static constexpr std::size_t kBuffers = 6;
  static constexpr std::size_t kWriters = 3;  // writes in flight: one alone leaves the disk idle between two

  struct Free {
    void operator()(std::byte* p) const noexcept;
  };

  void open();
  void reserve();
  void hand_over();  // the full buffer to the writers; waits for a free one
  void wait_idle();
  void stop() noexcept;
  void write_loop() noexcept;
  int write_at(std::uint64_t offset, std::span<const std::byte> bytes) noexcept;  // 0 or errno
  [[noreturn]] void fail_io(const char* what, int error) const;

  const std::filesystem::path path_;
  const std::uint64_t size_;
  int fd_ = -1;
  std::array<std::unique_ptr<std::byte, Free>, kBuffers> buffers_;
  std::size_t used_ = 0;  // bytes in the buffer being filled
  std::uint64_t appended_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t n_full_ = 0, n_claimed_ = 0,
                n_written_ = 0;        // buffers handed over, taken by a writer, written
  std::array<bool, kBuffers> busy_{};  // handed over and not yet written
  int error_ = 0;                      // of a writer
  bool stop_ = false;
  std::vector<std::thread> writers_;
};

}  // namespace moeflux::io
