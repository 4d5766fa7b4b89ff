#include "cli/synth/new_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <span>
#include <system_error>
#include <utility>

#include "cli/fail.h"
#include "cli/synth/stream_file.h"

namespace moeflux::cli::synth {
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

}  // namespace

NewFolder::NewFolder(const fs::path& target) : target_(without_slash(target)) {
  if (!target_.has_filename() || target_.filename() == "." || target_.filename() == "..")
    fail(ErrorCode::InvalidArgument, "\"{}\": names no folder to make", target.string());
  parent_ = target_.has_parent_path() ? target_.parent_path() : ".";
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(target_, ignored)))
    fail(ErrorCode::InvalidArgument, "{}: already there; nothing is overwritten", target_.string());
  constexpr int kMaxAttempts = 1000;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    temporary_ = parent_ / fmt::format(".{}.{}-{}.tmp", target_.filename().string(), ::getpid(), attempt);
    if (::mkdir(temporary_.c_str(), 0777) == 0) return;
    if (errno != EEXIST) break;
  }
  fail_io(target_, "cannot make a folder beside it", errno);
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(temporary_, ignored);
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
  int result = ::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE);
  // Old file systems cannot promise not to replace; an empty folder is then all that could be lost.
  if (result != 0 && (errno == EINVAL || errno == ENOSYS))
    result = ::rename(temporary_.c_str(), target_.c_str());
  if (result != 0) fail_io(target_, "cannot give the folder its name", errno);
  committed_ = true;
  sync_folder(parent_);
}

}  // namespace moeflux::cli::synth
