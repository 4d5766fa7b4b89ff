// The books of TieredStore: what is known of each slot.
#pragma once

#include <cstdint>
#include <vector>

#include "store/policy.h"
#include "store/slot_reads.h"

namespace moeflux::store {

// A slot in device memory. It is free again when it is neither lent, kept, pinned, loading nor leaving.
struct DeviceSlot {
  enum class State : std::uint8_t { Free, Lent, Loading, Ready, Failed };  // Lent: to a user, who may fill it; no expert's
  State state = State::Free;
  bool kept = false;         // the expert lives here: it is in the policy's device tier
  bool leaving = false;      // its bytes are being copied to main memory, where the expert lives already
  bool hinted = false;       // loaded by a hint and not yet asked for
  bool copy_failed = false;  // Failed: the copy, not the read
  ExpertKey key{};
  std::uint32_t pins = 0;
  std::int32_t host = -1;     // the slot in main memory it is being copied from or to
  std::int32_t staging = -1;  // the staging slot it is being loaded through
  std::int32_t home = -1;     // the slot in main memory where its bytes go on to when they are here: it only passes through
  std::uint64_t loaded_at = 0;
  SlotReads::Failure failure = {};

  bool loading() const noexcept { return state == State::Loading; }
  bool busy() const noexcept { return pins > 0 || loading() || leaving || state == State::Lent; }
};

// A slot in main memory. In the free list while nobody lives there and nobody reads it.
struct HostSlot {
  enum class State : std::uint8_t { Free, Arriving, Ready };  // Free may still have an expert's bytes
  State state = State::Free;
  bool kept = false;          // the expert lives here: it is in the policy's host tier
  bool has_bytes = false;     // of `key`, whole
  ExpertKey key{};
  std::uint32_t readers = 0;  // copies to the device under way
  std::int32_t previous = -1, next = -1;  // in the free list

  bool busy() const noexcept { return readers > 0 || state == State::Arriving; }
};

// Free slots in the order they became free: the oldest bytes go first. Links live in the slots.
class HostFreeList {
 public:
  bool empty() const noexcept { return first_ < 0; }
  std::size_t size() const noexcept { return size_; }
  std::uint32_t first() const noexcept { return static_cast<std::uint32_t>(first_); }  // not of an empty list
  void push(std::vector<HostSlot>& slots, std::uint32_t slot) noexcept {
    HostSlot& s = slots[slot];
    s.previous = last_;
    s.next = -1;
    (last_ >= 0 ? slots[static_cast<std::size_t>(last_)].next : first_) = static_cast<std::int32_t>(slot);
    last_ = static_cast<std::int32_t>(slot);
    ++size_;
  }
  void remove(std::vector<HostSlot>& slots, std::uint32_t slot) noexcept {
    HostSlot& s = slots[slot];
    (s.previous >= 0 ? slots[static_cast<std::size_t>(s.previous)].next : first_) = s.next;
    (s.next >= 0 ? slots[static_cast<std::size_t>(s.next)].previous : last_) = s.previous;
    s.previous = s.next = -1;
    --size_;
  }
  std::uint32_t pop(std::vector<HostSlot>& slots) noexcept {
    const auto slot = static_cast<std::uint32_t>(first_);
    remove(slots, slot);
    return slot;
  }

 private:
  std::int32_t first_ = -1, last_ = -1;
  std::size_t size_ = 0;
};

}  // namespace moeflux::store
