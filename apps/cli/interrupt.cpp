#include "cli/interrupt.h"

#include <atomic>
#include <iterator>

namespace moeflux::cli {
namespace {

// A signal handler has no other way to reach the session.
std::atomic<Session*> interrupted_session{nullptr};
static_assert(std::atomic<Session*>::is_always_lock_free);

void on_interrupt(int /*signal*/) {
  if (Session* session = interrupted_session.load()) session->cancel();
}

std::atomic<bool> interrupt_flag{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void on_flag(int /*signal*/) { interrupt_flag = true; }

// Leaves an ignored signal alone.
void install(int signal, void (*handler)(int), struct sigaction& previous) noexcept {
  ::sigaction(signal, nullptr, &previous);
  if ((previous.sa_flags & SA_SIGINFO) == 0 && previous.sa_handler == SIG_IGN) return;
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

InterruptGuard::InterruptGuard(Session& session) noexcept {
  interrupted_session = &session;
  install(SIGINT, on_interrupt, previous_);
}

InterruptGuard::~InterruptGuard() {
  ::sigaction(SIGINT, &previous_, nullptr);
  interrupted_session = nullptr;
}

InterruptFlag::InterruptFlag() noexcept {
  interrupt_flag = false;
  for (std::size_t i = 0; i < std::size(kSignals); ++i) install(kSignals[i], on_flag, previous_[i]);
}

InterruptFlag::~InterruptFlag() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &previous_[i], nullptr);
}

bool InterruptFlag::raised() const noexcept { return interrupt_flag; }

}  // namespace moeflux::cli
