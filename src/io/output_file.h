// A new file, written front to back, that appears at its place whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace moeflux::io {

// Writes to a temporary name beside the target; commit() puts it in place. Without commit (an error, a
// cancelled run) the temporary vanishes with the object; a killed process leaves only the temporary
// (".NAME.PID-N.tmp"). Not thread-safe.
class OutputFile {
 public:
  // Throws Io when no file can be made there.
  explicit OutputFile(const std::filesystem::path& target);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  // Throws Io with the system's reason (no space left).
  void write(std::span<const std::byte> bytes);
  std::uint64_t bytes_written() const noexcept { return written_; }

  // Fsync, rename (replacing what stood there), fsync of the folder. Throws Io; what stood at the target is
  // untouched then, except after an error of the very last step, which says so.
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  std::uint64_t written_ = 0;
  int fd_ = -1;
  bool renamed_ = false;
};

}  // namespace moeflux::io
