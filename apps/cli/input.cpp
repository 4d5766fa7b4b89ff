#include "cli/input.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <system_error>

#include "cli/fail.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

// Far above every context; keeps a wrong file (a model, /dev/zero) from filling the memory.
constexpr std::size_t kMaxTextBytes = std::size_t{256} << 20;

std::string message_of(int error) { return std::generic_category().message(error); }

std::string read_descriptor(int fd, std::string_view name) {
  std::string text;
  std::vector<char> buffer(std::size_t{1} << 16);
  for (;;) {
    const ssize_t n = ::read(fd, buffer.data(), buffer.size());
    if (n == 0) return text;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EISDIR) fail(ErrorCode::InvalidArgument, "{}: is a folder", name);
    if (n < 0) fail(ErrorCode::Io, "{}: reading failed: {}", name, message_of(errno));
    text.append(buffer.data(), static_cast<std::size_t>(n));
    if (text.size() > kMaxTextBytes)
      fail(ErrorCode::InvalidArgument, "{}: more than {} MiB of text", name, kMaxTextBytes >> 20);
  }
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

bool is_separator(char c) {
  return c == ',' || c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\v' || c == '\f';
}

// Length of the UTF-8 sequence at the start of the text, 0 when there is none. Overlong forms, surrogates and
// values above U+10FFFF are none.
std::size_t utf8_length(std::string_view text) noexcept {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = at(0);
  if (lead < 0x80) return 1;
  const std::size_t n = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < n) return 0;
  for (std::size_t i = 1; i < n; ++i)
    if ((at(i) & 0xc0U) != 0x80) return 0;
  const unsigned second = at(1);
  const bool bad = (lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
                   (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f);
  return bad ? 0 : n;
}

}  // namespace

std::string read_text_file(const std::string& path, std::string_view what) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(ErrorCode::InvalidArgument, "cannot open the {} {}: {}", what, path, message_of(errno));
  const Descriptor file(fd);
  return read_descriptor(file.get(), path);
}

std::string read_text(const std::optional<std::string>& argument, const std::optional<std::string>& file,
                      std::string_view what) {
  if (argument) return *argument;
  if (file) return read_text_file(*file, fmt::format("{} file", what));
  if (stdin_is_terminal())
    fail(ErrorCode::InvalidArgument,
         "no {}: none was given, and standard input is a terminal (-f reads a file)", what);
  return read_descriptor(STDIN_FILENO, "standard input");
}

std::vector<TokenId> parse_token_ids(std::string_view text, std::string_view source) {
  std::vector<TokenId> tokens;
  std::size_t i = 0;
  while (i < text.size()) {
    if (is_separator(text[i])) {
      ++i;
      continue;
    }
    std::size_t end = i;
    while (end < text.size() && !is_separator(text[end])) ++end;
    const std::string_view word = text.substr(i, end - i);
    std::int32_t value = 0;
    const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error == std::errc::result_out_of_range)
      fail(ErrorCode::InvalidArgument, "{}: token id {} is out of range", source, word.substr(0, 40));
    if (error != std::errc{} || rest != word.data() + word.size())
      fail(ErrorCode::InvalidArgument, "{}: {} at byte {} is no token id", source,
           quote_bytes(word.substr(0, 40)), i);
    tokens.push_back(TokenId{value});
    i = end;
  }
  if (tokens.empty()) fail(ErrorCode::InvalidArgument, "{}: no token ids", source);
  return tokens;
}

std::string join_ids(std::span<const TokenId> tokens) {
  std::string text;
  for (const TokenId token : tokens) {
    if (!text.empty()) text += ',';
    text += std::to_string(raw(token));
  }
  return text;
}

std::string quote_bytes(std::string_view bytes) {
  std::string text = "\"";
  while (!bytes.empty()) {
    const char c = bytes.front();
    const std::size_t n = utf8_length(bytes);
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (c == '\n') {
      text += "\\n";
    } else if (c == '\t') {
      text += "\\t";
    } else if (c == '\r') {
      text += "\\r";
    } else if (n == 0 || (n == 1 && (c < ' ' || c == '\x7f'))) {
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      text += bytes.substr(0, n);
    }
    bytes.remove_prefix(n == 0 ? 1 : n);
  }
  return text + "\"";
}

bool is_utf8(std::string_view bytes) noexcept {
  while (!bytes.empty()) {
    const std::size_t n = utf8_length(bytes);
    if (n == 0) return false;
    bytes.remove_prefix(n);
  }
  return true;
}

}  // namespace moeflux::cli
