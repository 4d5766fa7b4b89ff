// Ctrl-C stops a session, or other long work, instead of killing the process.
#pragma once

#include <moeflux/session.h>

#include <csignal>

namespace moeflux::cli {

// While it lives, the first SIGINT cancels the session and the second ends the process. One at a time. Where
// SIGINT is ignored (a background job of a script) it stays ignored.
class InterruptGuard {
 public:
  explicit InterruptGuard(Session& session) noexcept;
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  struct sigaction previous_ {};
};

// While it lives, the first SIGINT, SIGTERM or SIGHUP raises a flag that long work looks at; the second ends
// the process. One at a time. Signals that are ignored stay ignored.
class InterruptFlag {
 public:
  InterruptFlag() noexcept;
  ~InterruptFlag();
  InterruptFlag(const InterruptFlag&) = delete;
  InterruptFlag& operator=(const InterruptFlag&) = delete;

  bool raised() const noexcept;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  struct sigaction previous_[3]{};
};

}  // namespace moeflux::cli
