// Copies between the host and a device that go on by themselves: the way experts move between main memory and the device's.
//
// start() queues a job of one or more parts, poll() and wait() hand back one completion for each. Jobs of one direction run in the
// order they were started, the two directions at the same time; a completion may be taken by any thread, once. All members are
// thread-safe, none throws. From start() to its completion the memory of both sides belongs to the copier: the source must not
// change, the destination must not be touched.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace moeflux {

enum class CopyDirection : std::uint8_t { ToDevice, ToHost };

struct CopyPart {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;  // the host side is pinned memory (Backend::pinned_allocator)
  std::size_t bytes = 0;
};

struct CopyCompletion {
  std::uint64_t tag = 0;
  CopyDirection direction = CopyDirection::ToDevice;
  bool ok = false;  // false: the destination's content is unspecified
};

class AsyncCopier {
 public:
  // Returns when nothing is in flight any more.
  virtual ~AsyncCopier() = default;

  // False: refused, nothing was queued and there will be no completion.
  [[nodiscard]] virtual bool start(CopyDirection direction, std::uint64_t tag, std::span<const CopyPart> parts) noexcept = 0;
  // Takes finished jobs, up to out.size(), without waiting. 0: none.
  virtual std::size_t poll(std::span<CopyCompletion> out) noexcept = 0;
  // The same, waiting for the first. 0: the time is over, or nothing is outstanding.
  virtual std::size_t wait(std::span<CopyCompletion> out, std::chrono::nanoseconds timeout) noexcept = 0;
  virtual std::size_t outstanding() const noexcept = 0;  // started, and the completion not yet taken
  virtual std::string failure() const = 0;               // why a job failed or was refused, for messages
};

}  // namespace moeflux
