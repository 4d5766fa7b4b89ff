#include "io/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace moeflux::io {
namespace {

[[noreturn]] void fail_output(const std::filesystem::path& path, const char* what, int error) {
  fail(ErrorCode::Io, "{}: {}: {}", path.string(), what, std::generic_category().message(error));
}

// Without this a power loss may forget the rename.
void sync_folder_of(const std::filesystem::path& target) {
  const std::filesystem::path folder = target.has_parent_path() ? target.parent_path() : ".";
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int result = fd < 0 ? -1 : ::fsync(fd);
  const int error = errno;
  if (fd >= 0) ::close(fd);
  // EINVAL: this file system has no such thing as syncing a folder.
  if (result != 0 && error != EINVAL)
    fail_output(target, "the file is in place, but its folder could not be fsynced", error);
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& target) : target_(target) {
  // The system's calls end a path at NUL: such a path would quietly name another file.
  if (target.native().find('\0') != std::string::npos)
    fail(ErrorCode::Io, "{}: a path cannot contain NUL", target.c_str());
  if (!target.has_filename()) fail(ErrorCode::Io, "\"{}\": names no file to write", target.string());
  // Other writers of the same target, in this process or others, get names of their own.
  constexpr int kMaxAttempts = 1000;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    path_ =
        target.parent_path() / fmt::format(".{}.{}-{}.tmp", target.filename().string(), ::getpid(), attempt);
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ >= 0) return;
    if (errno != EEXIST && errno != EINTR) break;
  }
  fail_output(target_, "cannot create a temporary file beside it", errno);
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!renamed_) ::unlink(path_.c_str());
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_output(target_, "writing failed", errno);
    written_ += static_cast<std::uint64_t>(n);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void OutputFile::commit() {
  if (::fsync(fd_) != 0) fail_output(target_, "fsync failed", errno);
  // Some file systems (network, quota) report a failed write only here.
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) fail_output(target_, "closing failed", errno);
  if (::rename(path_.c_str(), target_.c_str()) != 0) fail_output(target_, "cannot replace", errno);
  renamed_ = true;
  sync_folder_of(target_);
}

}  // namespace moeflux::io
