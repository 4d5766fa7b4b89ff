// Files opened for reading at absolute offsets. The one door to the operating system is this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace moeflux::io {

// Move-only read handle. Reads are positioned, so any number of threads may share one.
class File {
 public:
  // Throws Io with the path and the system's reason; a directory or other non-regular file is refused
  // (without waiting: opening a pipe does not block). Links are followed.
  static File open(const std::filesystem::path& path);
  File() = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  const std::filesystem::path& path() const noexcept { return path_; }
  std::uint64_t size() const noexcept { return size_; }  // when it was opened
  int fd() const noexcept { return fd_; }

  // Fills `out` from `offset`. A file that ends early (truncated since it was opened, or an offset
  // beyond its end) is an Io error naming file, offset and the bytes that were missing. On an error the
  // content of `out` is unspecified.
  void read_exact(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  std::filesystem::path path_;
  std::uint64_t size_ = 0;
  int fd_ = -1;
};

// A whole small file. More than max_bytes is InvalidModel ("too large"); a missing file is Io.
std::string read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes);

// Replaces `path` with these parts in order: written to a temporary name in the same folder, fsynced,
// renamed, the folder fsynced. On any error the temporary is removed, what stood at `path` before is
// untouched, and Io thrown; the one exception is an error of the very last step, which says so.
void write_file_atomically(const std::filesystem::path& path,
                           std::span<const std::span<const std::byte>> parts);

}  // namespace moeflux::io
