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

namespace moeflux::cli::synth {

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
  static constexpr std::size_t kBuffers = 3;

  struct Free {
    void operator()(std::byte* p) const noexcept;
  };

  void open();
  void reserve();
  void hand_over();  // the full buffer to the thread; waits for a free one
  void wait_idle();
  void write_loop() noexcept;
  int write_at(std::uint64_t offset, std::span<const std::byte> bytes) noexcept;  // 0 or errno
  [[noreturn]] void fail_io(const char* what, int error) const;

  const std::filesystem::path path_;
  const std::uint64_t size_;
  int fd_ = -1;
  bool direct_ = false;
  std::array<std::unique_ptr<std::byte, Free>, kBuffers> buffers_;
  std::size_t used_ = 0;  // bytes in the buffer being filled
  std::uint64_t appended_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t n_full_ = 0, n_written_ = 0;  // buffers handed over and written so far
  int error_ = 0;                             // of the thread
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace moeflux::cli::synth
