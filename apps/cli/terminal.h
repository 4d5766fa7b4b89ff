// Standard output and standard error.
//
// Standard output carries results, standard error everything else. Writes are unbuffered, so that text
// appears token by token and a failed write is noticed where it happens.
#pragma once

#include <chrono>
#include <string_view>

namespace moeflux::cli {

// Thrown when the reader of standard output has gone: the command ends without a word.
struct BrokenPipe {};

// Call once at start: failing writes become errors instead of signals, and the standard descriptors are never
// handed out for files where the caller closed them.
void prepare_standard_streams() noexcept;

// All of it. Throws BrokenPipe, or Error (Io).
void write_out(std::string_view text);
// Best effort: where standard error is gone nobody is there to be told.
void write_err(std::string_view text) noexcept;
// "moeflux: " + text + newline to standard error.
void note(std::string_view text);

bool stdin_is_terminal() noexcept;
bool stdout_is_terminal() noexcept;
bool stderr_is_terminal() noexcept;

// A line on the terminal that is rewritten in place. Shows nothing when standard error is no terminal,
// nothing before `delay` has passed, and redraws at a rate that a terminal over a network can follow. One
// thread at a time.
class StatusLine {
 public:
  explicit StatusLine(std::chrono::milliseconds delay = std::chrono::milliseconds(0));
  ~StatusLine();
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  // True when show() would draw now; saves the caller from formatting.
  bool due() const noexcept;
  void show(std::string_view text);
  void clear() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  bool enabled_;
  bool visible_ = false;
  Clock::time_point next_;
};

}  // namespace moeflux::cli
