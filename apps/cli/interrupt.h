// Ctrl-C stops a session instead of killing the process.
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

}  // namespace moeflux::cli
