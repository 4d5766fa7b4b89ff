#include "io/process.h"

#include <charconv>
#include <string>
#include <string_view>

#include "core/error.h"
#include "io/file.h"

#include <fcntl.h>
#include <unistd.h>

namespace moeflux::io {
namespace {

// "VmRSS:     1234 kB" -> bytes.
std::uint64_t field(std::string_view text, std::string_view name) {
  const std::size_t at = text.find(name);
  if (at == std::string_view::npos) return 0;
  std::string_view rest = text.substr(at + name.size());
  rest.remove_prefix(std::min(rest.find_first_of("0123456789"), rest.size()));
  std::uint64_t kib = 0;
  std::from_chars(rest.data(), rest.data() + rest.size(), kib);
  return kib * 1024;
}

}  // namespace

ProcessMemory process_memory() {
  const int fd = ::open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::string text(8192, '\0');  // the file has about 1500 bytes and comes in one read
  const ssize_t n = ::read(fd, text.data(), text.size());
  ::close(fd);
  text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return {field(text, "VmRSS:"), field(text, "VmHWM:")};
}

}  // namespace moeflux::io
