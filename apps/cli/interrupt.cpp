#include "cli/interrupt.h"

#include <atomic>

namespace moeflux::cli {
namespace {

// A signal handler has no other way to reach the session.
std::atomic<Session*> interrupted_session{nullptr};
static_assert(std::atomic<Session*>::is_always_lock_free);

void on_interrupt(int /*signal*/) {
  if (Session* session = interrupted_session.load()) session->cancel();
}

}  // namespace

InterruptGuard::InterruptGuard(Session& session) noexcept {
  interrupted_session = &session;
  ::sigaction(SIGINT, nullptr, &previous_);
  if ((previous_.sa_flags & SA_SIGINFO) == 0 && previous_.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
}

InterruptGuard::~InterruptGuard() {
  ::sigaction(SIGINT, &previous_, nullptr);
  interrupted_session = nullptr;
}

}  // namespace moeflux::cli
