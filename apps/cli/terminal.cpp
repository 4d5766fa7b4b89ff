#include "cli/terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string>
#include <system_error>

#include "cli/fail.h"

namespace moeflux::cli {
namespace {

// Returns 0 or the error.
int write_all(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n >= 0) {
      text.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {  // somebody made the pipe non-blocking
      pollfd wait{fd, POLLOUT, 0};
      ::poll(&wait, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

void prepare_standard_streams() noexcept {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  // Opened the wrong way round on purpose: using a closed stream still fails.
  constexpr int kModes[] = {O_WRONLY, O_RDONLY, O_RDONLY};
  for (int fd = 0; fd < 3; ++fd) {
    // The lowest free descriptor is given out, and all below fd are open by now.
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) (void)::open("/dev/null", kModes[fd]);
  }
}

void write_out(std::string_view text) {
  const int error = write_all(STDOUT_FILENO, text);
  if (error == EPIPE) throw BrokenPipe{};
  if (error != 0)
    fail(ErrorCode::Io, "cannot write to standard output: {}", std::generic_category().message(error));
}

void write_err(std::string_view text) noexcept { (void)write_all(STDERR_FILENO, text); }

void note(std::string_view text) { write_err(fmt::format("moeflux: {}\n", text)); }

bool stdin_is_terminal() noexcept { return ::isatty(STDIN_FILENO) == 1; }
bool stdout_is_terminal() noexcept { return ::isatty(STDOUT_FILENO) == 1; }
bool stderr_is_terminal() noexcept { return ::isatty(STDERR_FILENO) == 1; }

StatusLine::StatusLine(std::chrono::milliseconds delay)
    : enabled_(stderr_is_terminal()), next_(Clock::now() + delay) {}

StatusLine::~StatusLine() { clear(); }

bool StatusLine::due() const noexcept { return enabled_ && Clock::now() >= next_; }

void StatusLine::show(std::string_view text) {
  if (!due()) return;
  next_ = Clock::now() + std::chrono::milliseconds(100);
  visible_ = true;
  write_err(fmt::format("\r\x1b[K{}", text));
}

void StatusLine::clear() noexcept {
  if (visible_) write_err("\r\x1b[K");
  visible_ = false;
}

}  // namespace moeflux::cli
