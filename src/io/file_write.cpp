#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "io/file.h"

namespace moeflux::io {
namespace {

[[noreturn]] void fail_io(const std::filesystem::path& path, const char* what, int error) {
  fail(ErrorCode::Io, "{}: {}: {}", path.string(), what, std::generic_category().message(error));
}

// A new file that vanishes again unless it is renamed to its place.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target) : target_(target) {
    // Other writers of the same target, in this process or others, get names of their own.
    constexpr int kMaxAttempts = 1000;
    for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
      path_ = target.parent_path() /
              fmt::format(".{}.{}-{}.tmp", target.filename().string(), ::getpid(), attempt);
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ >= 0) return;
      if (errno != EEXIST && errno != EINTR) break;
    }
    fail_io(target_, "cannot create a temporary file beside it", errno);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!renamed_) ::unlink(path_.c_str());
  }

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_io(target_, "writing failed", errno);
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
  }

  void move_to_target() {
    if (::fsync(fd_) != 0) fail_io(target_, "fsync failed", errno);
    // Some file systems (network, quota) report a failed write only here.
    const int fd = std::exchange(fd_, -1);
    if (::close(fd) != 0) fail_io(target_, "closing failed", errno);
    if (::rename(path_.c_str(), target_.c_str()) != 0) fail_io(target_, "cannot replace", errno);
    renamed_ = true;
  }

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  int fd_ = -1;
  bool renamed_ = false;
};

// Without this a power loss may forget the rename.
void sync_folder(const std::filesystem::path& target) {
  const std::filesystem::path folder = target.has_parent_path() ? target.parent_path() : ".";
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int result = fd < 0 ? -1 : ::fsync(fd);
  const int error = errno;
  if (fd >= 0) ::close(fd);
  // EINVAL: this file system has no such thing as syncing a folder.
  if (result != 0 && error != EINVAL)
    fail_io(target, "the file is in place, but its folder could not be fsynced", error);
}

}  // namespace

void write_file_atomically(const std::filesystem::path& path,
                           std::span<const std::span<const std::byte>> parts) {
  if (path.native().find('\0') != std::string::npos)
    fail(ErrorCode::Io, "{}: a path cannot contain NUL", path.c_str());
  if (!path.has_filename()) fail(ErrorCode::Io, "\"{}\": names no file to write", path.string());
  TemporaryFile file(path);
  for (const std::span<const std::byte> part : parts) file.write(part);
  file.move_to_target();
  sync_folder(path);
}

}  // namespace moeflux::io
