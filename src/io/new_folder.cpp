#include "io/new_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <span>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "io/stream_file.h"

namespace moeflux::io {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_io(const fs::path& path, const char* what, int error) {
  const bool users = error == ENOENT || error == ENOTDIR || error == EEXIST || error == ENAMETOOLONG;
  fail(users ? ErrorCode::InvalidArgument : ErrorCode::Io, "{}: {}: {}", path.string(), what,
       std::generic_category().message(error));
}

// "a/b/" names b.
fs::path without_slash(fs::path path) {
  while (!path.empty() && !path.has_filename() && path.has_relative_path()) path = path.parent_path();
  return path;
}

void sync_folder(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int result = fd < 0 ? -1 : ::fsync(fd);
  const int error = errno;
  if (fd >= 0) ::close(fd);
  // EINVAL: this file system has no such thing as syncing a folder.
  if (result != 0 && error != EINVAL) fail_io(path, "fsync failed", error);
}

fs::path parent_of(const fs::path& target) { return target.has_parent_path() ? target.parent_path() : "."; }

int open_folder(const fs::path& path) noexcept { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW); }

std::uint64_t bytes_in(const fs::path& folder) {
  std::uint64_t total = 0;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (at->is_regular_file(ignored)) total += at->file_size(ignored);
  }
  return total;
}

}  // namespace

NewFolder::NewFolder(const fs::path& target, const char* marker) : target_(without_slash(target)) {
  if (!target_.has_filename() || target_.filename() == "." || target_.filename() == "..")
    fail(ErrorCode::InvalidArgument, "\"{}\": names no folder to make", target.string());
  parent_ = parent_of(target_);
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(target_, ignored)))
    fail(ErrorCode::InvalidArgument, "{}: already there; nothing is overwritten", target_.string());
  constexpr int kMaxAttempts = 1000;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    temporary_ = parent_ / fmt::format(".{}.{}-{}.tmp", target_.filename().string(), ::getpid(), attempt);
    if (::mkdir(temporary_.c_str(), 0777) == 0) {
      fd_ = open_folder(temporary_);
      // Where a file system has no locks a leftover looks like one in use: it stays.
      if (fd_ >= 0) (void)::flock(fd_, LOCK_EX | LOCK_NB);
      if (marker == nullptr) return;
      marker_ = temporary_ / marker;
      const int fd = ::open(marker_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd >= 0) {
        ::close(fd);
        return;
      }
      const int error = errno;
      if (fd_ >= 0) ::close(fd_);
      ::rmdir(temporary_.c_str());
      errno = error;
      break;
    }
    if (errno != EEXIST) break;
  }
  fail_io(target_, "cannot make a folder beside it", errno);
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(temporary_, ignored);
  if (fd_ >= 0) ::close(fd_);
}

std::uint64_t NewFolder::free_bytes() const {
  std::error_code error;
  const fs::space_info space = fs::space(parent_, error);
  if (error) fail_io(parent_, "cannot tell its free space", error.value());
  return space.available;
}

void NewFolder::write_file(const char* name, std::string_view text) {
  StreamFile file(temporary_ / name, text.size());
  file.append(std::as_bytes(std::span(text)));
  file.finish();
}

void NewFolder::commit() {
  sync_folder(temporary_);
  if (!marker_.empty() && ::unlink(marker_.c_str()) != 0) fail_io(marker_, "cannot remove it", errno);
  int result = ::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE);
  // Old file systems cannot promise not to replace; an empty folder is then all that could be lost.
  if (result != 0 && (errno == EINVAL || errno == ENOSYS))
    result = ::rename(temporary_.c_str(), target_.c_str());
  if (result != 0) fail_io(target_, "cannot give the folder its name", errno);
  committed_ = true;
  if (!marker_.empty()) sync_folder(target_);
  sync_folder(parent_);
}

std::vector<TemporaryFolder> temporary_folders(const fs::path& target, const char* marker) {
  const fs::path plain = without_slash(target);
  const std::string begin = fmt::format(".{}.", plain.filename().string());
  std::vector<TemporaryFolder> found;
  std::error_code error;
  for (fs::directory_iterator at(parent_of(plain), error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(begin) || !name.ends_with(".tmp")) continue;
    const std::string_view middle = std::string_view(name).substr(begin.size(), name.size() - begin.size() - 4);
    std::error_code ignored;
    if (middle.find_first_not_of("0123456789-") != std::string_view::npos || !fs::exists(at->path() / marker, ignored)) continue;
    const int fd = open_folder(at->path());
    if (fd < 0) continue;  // not a folder, not ours, or gone
    const bool free = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
    ::close(fd);
    found.push_back({at->path(), !free, bytes_in(at->path())});
  }
  return found;
}

void remove_folder(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail_io(path, "cannot remove it", error.value());
}

}  // namespace moeflux::io
