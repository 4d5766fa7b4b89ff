#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace moeflux::io {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

// The system's calls end a path at NUL: such a path would quietly name another file.
void refuse_nul(const std::filesystem::path& path) {
  if (path.native().find('\0') != std::string::npos)
    fail(ErrorCode::Io, "{}: a path cannot contain NUL", path.c_str());
}

}  // namespace

File File::open(const std::filesystem::path& path) {
  refuse_nul(path);
  File file;
  file.path_ = path;
  // O_NONBLOCK: a pipe must be refused below, not waited for. It means nothing to regular files.
  do {
    file.fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  } while (file.fd_ < 0 && errno == EINTR);
  if (file.fd_ < 0) fail(ErrorCode::Io, "{}: cannot open: {}", path.string(), reason(errno));

  struct stat info {};
  if (::fstat(file.fd_, &info) != 0) fail(ErrorCode::Io, "{}: cannot stat: {}", path.string(), reason(errno));
  if (S_ISDIR(info.st_mode)) fail(ErrorCode::Io, "{}: is a folder, not a file", path.string());
  if (!S_ISREG(info.st_mode)) fail(ErrorCode::Io, "{}: not a regular file", path.string());
  file.size_ = static_cast<std::uint64_t>(info.st_size);
  return file;
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      size_(std::exchange(other.size_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

void File::read_exact(std::uint64_t offset, std::span<std::byte> out) const {
  if (fd_ < 0) fail(ErrorCode::Internal, "read from a file that is not open");
  constexpr auto kMaxOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (offset > kMaxOffset || out.size() > kMaxOffset - offset)
    fail(ErrorCode::Io, "{}: offset {} + {} bytes is beyond what a file can hold", path_.string(), offset,
         out.size());

  std::size_t done = 0;
  while (done < out.size()) {
    const std::uint64_t at = offset + done;
    const ssize_t got = ::pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      fail(ErrorCode::Io, "{}: reading {} bytes at offset {}: {}", path_.string(), out.size() - done, at,
           reason(errno));
    if (got == 0)
      fail(ErrorCode::Io,
           "{}: the file ends early: {} of the {} bytes at offset {} are missing (it had {} bytes)",
           path_.string(), out.size() - done, out.size(), offset, size_);
    done += static_cast<std::size_t>(got);
  }
}

std::string read_text_file(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const File file = File::open(path);
  if (file.size() > max_bytes)
    fail(ErrorCode::InvalidModel, "{}: too large: {} bytes, at most {} are accepted", path.string(),
         file.size(), max_bytes);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read_exact(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace moeflux::io
