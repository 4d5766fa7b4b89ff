#include "io/direct_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "core/error.h"
#include "io/async_reader.h"

namespace moeflux::io {
namespace {

// 0 or errno.
int read_first_block(int fd) {
  alignas(kDirectAlign) std::array<std::byte, kDirectAlign> block;
  ssize_t got = 0;
  do {
    got = ::pread(fd, block.data(), block.size(), 0);
  } while (got < 0 && errno == EINTR);
  return got < 0 ? errno : 0;
}

// 0 or errno.
int make_direct(int fd, int flags) {
  if (::fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) return errno;
  return read_first_block(fd);
}

}  // namespace

DirectFile DirectFile::open(const std::filesystem::path& path, bool direct) {
  DirectFile result{.file = File::open(path), .direct = false, .note = {}};
  const int fd = result.file.fd();
  // io_uring takes O_NONBLOCK at its word, even for a regular file, and gives EAGAIN for what is not in
  // memory.
  const int flags = ::fcntl(fd, F_GETFL) & ~(O_NONBLOCK | O_DIRECT);
  if (direct) {
    const int error = make_direct(fd, flags);
    result.direct = error == 0;
    if (result.direct) return result;
    result.note =
        fmt::format("{}: no direct reads here ({})", path.string(), std::generic_category().message(error));
  }
  if (::fcntl(fd, F_SETFL, flags) != 0)
    fail(ErrorCode::Io, "{}: cannot set flags: {}", path.string(), std::generic_category().message(errno));
  // Requests are whole records: what the kernel would read ahead is somebody else's.
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
  return result;
}

}  // namespace moeflux::io
