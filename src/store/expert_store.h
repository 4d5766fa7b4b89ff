// The only way to reach a routed expert.
//
// acquire() pins the wanted experts and returns at once; slots may still be loading. The lease is the pin: while it
// lives none of its experts can be evicted. Results never depend on what was in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <moeflux/types.h>

#include "store/expert_record.h"

namespace moeflux::store {

class ExpertStore;

// Move-only pin on a set of experts of one layer, in the order they were asked for.
class ExpertLease {
 public:
  ExpertLease() = default;
  ExpertLease(ExpertLease&& other) noexcept { swap(other); }
  ExpertLease& operator=(ExpertLease&& other) noexcept {
    ExpertLease tmp(std::move(other));
    swap(tmp);
    return *this;
  }
  ExpertLease(const ExpertLease&) = delete;
  ExpertLease& operator=(const ExpertLease&) = delete;
  ~ExpertLease();

  std::size_t size() const noexcept { return size_; }
  explicit operator bool() const noexcept { return store_ != nullptr; }
  // Expert i is in memory: wait(i) will not block.
  bool ready(std::size_t i) const noexcept;
  // Expert i was in memory before anybody asked for it or foretold it: nothing had to be read.
  bool hit(std::size_t i) const noexcept;
  // Blocks until expert i is in memory. Throws Io or InvalidModel naming file, layer and expert when it could not be
  // read; the lease stays valid and the other experts with it.
  ExpertView wait(std::size_t i);

 private:
  friend class ExpertStore;
  ExpertLease(ExpertStore* store, std::uint32_t ticket, std::size_t size) : store_(store), ticket_(ticket), size_(size) {}
  void swap(ExpertLease& other) noexcept {
    std::swap(store_, other.store_);
    std::swap(ticket_, other.ticket_);
    std::swap(size_, other.size_);
  }
  ExpertStore* store_ = nullptr;
  std::uint32_t ticket_ = 0;
  std::size_t size_ = 0;
};

// Counters since the store was made. Requests count experts, not bytes.
struct StoreStats {
  std::uint64_t requests = 0;
  std::uint64_t hits = 0;  // where they are computed
  std::uint64_t bytes_read = 0;  // by acquire and hint; loading at start is not counted
  // Experts read on a hint; of them asked for later, and evicted before anybody asked.
  std::uint64_t hints_issued = 0, hints_used = 0, hints_wasted = 0;
  // Of a store with a device: requests that were in main memory, and bytes copied to the device and back.
  std::uint64_t host_hits = 0, bytes_to_device = 0, bytes_to_host = 0;
};

// All experts of a layer, side by side in memory for as long as the store lives. first.gate empty: they are not.
struct ResidentExperts {
  ExpertView first;          // of expert 0
  std::uint64_t stride = 0;  // bytes to the next
  std::int64_t n_experts = 0;
};

// Slots of a device that hold a layer's experts, each at another time: expert e lies `stride` times its slot behind `first`.
// first.gate empty: the store has none.
struct SlotExperts {
  ExpertView first;          // as if in slot 0
  std::uint64_t stride = 0;  // bytes to the next
  std::int64_t n_experts = 0;
  std::int64_t host_offset = 0;  // bytes from `first` to what is slot 0 of main memory, where the device reads that too
  std::byte* memory = nullptr;   // slot 0 itself
};

// A slot of the device that lend_slots() gave away, and the expert whose bytes it holds now.
struct FilledSlot {
  std::int32_t slot = -1;
  LayerIdx layer{};
  ExpertIdx expert{};
};

// Thread-safe: sessions share one.
class ExpertStore {
 public:
  virtual ~ExpertStore() = default;

  // `experts` are distinct and at most max_lease(). Returns at once; with other sessions on the store it may wait for one
  // of their leases to end, so the caller must hold no lease itself.
  ExpertLease acquire(LayerIdx layer, std::span<const ExpertIdx> experts) {
    return ExpertLease(this, pin(layer, experts), experts.size());
  }
  // The same, by somebody who holds another lease: an empty lease when there is no room for it now.
  ExpertLease try_acquire(LayerIdx layer, std::span<const ExpertIdx> experts) {
    std::uint32_t ticket = 0;
    return try_pin(layer, experts, ticket) ? ExpertLease(this, ticket, experts.size()) : ExpertLease();
  }
  // Tells what a layer's visit by n_tokens tokens wants, before its leases: what the store may learn from. counts[i] tokens
  // chose experts[i]; empty for a single token.
  virtual void visit(LayerIdx layer, std::span<const ExpertIdx> experts, std::span<const std::uint32_t> counts, std::uint32_t n_tokens) noexcept = 0;
  // Experts that may be wanted soon, each with this probability: low priority, never blocks, may be dropped.
  virtual void hint(LayerIdx layer, std::span<const ExpertIdx> experts, float confidence) noexcept = 0;
  // Gives reads that wait for others a chance to go on. Cheap; called between ops.
  virtual void poll() noexcept {}
  // The most experts one lease may hold; never less than a token's top-k.
  virtual std::size_t max_lease() const noexcept = 0;
  // How many experts of a prompt should be asked for at once: what is read ahead while the ones before are computed.
  virtual std::size_t scan_batch() const noexcept = 0;
  virtual StoreStats stats() const noexcept = 0;
  // Everything is in memory already: hints are pointless.
  virtual bool resident() const noexcept { return false; }
  // For a backend that chooses experts by itself (Backend::run_routed): no lease is needed.
  virtual ResidentExperts resident_layer(LayerIdx) const noexcept { return {}; }

  // For a session whose device looks experts up by itself, in a table of slots it copies from here. Between begin_use() and
  // end_use() no expert of the table loses its slot, except to an acquire_at_rest() of the only user.
  virtual SlotExperts slot_layer(LayerIdx) const noexcept { return {}; }
  virtual void begin_use() noexcept {}
  virtual void end_use() noexcept {}
  // For a user whose device leaves what it reads from main memory in slots (Backend::run_routed): writes the numbers of some that are
  // nobody's, returns how many. They are the user's until take_back(), when its device is at rest. Experts stay there where they are worth
  // more than others on the device and nobody else uses the table. `filled` are some of `lent`, with all bytes of an expert.
  virtual std::size_t lend_slots(std::span<std::int32_t> /*slots*/) noexcept { return 0; }
  virtual void take_back(std::span<const std::int32_t> /*lent*/, std::span<const FilledSlot> /*filled*/) noexcept {}
  // The table [n_layers, row]: the slot of each expert that will stay where it is; -2 - s where it is slot s of main memory and the
  // device reads that; or -1. row is at least the most experts of a layer. Does nothing where `version` is the table's already; returns
  // the table's.
  virtual std::uint64_t read_slots(std::uint64_t version, std::span<std::int32_t> /*table*/, std::size_t /*row*/) noexcept { return version; }
  // Whether no expert is -1 there.
  virtual bool table_is_whole() const noexcept { return false; }
  // acquire() by a user whose device is at rest: nothing on it reads the table.
  ExpertLease acquire_at_rest(LayerIdx layer, std::span<const ExpertIdx> experts) {
    return ExpertLease(this, pin_at_rest(layer, experts), experts.size());
  }
  // visit() of a single token whose experts all were in the table; n_stayed of those in main memory were computed there, and not brought to the
  // device.
  virtual void used(LayerIdx layer, std::span<const ExpertIdx> experts, std::size_t /*n_stayed*/) noexcept { visit(layer, experts, {}, 1); }

 protected:
  friend class ExpertLease;
  // A ticket stands for one lease until unpin().
  virtual std::uint32_t pin(LayerIdx layer, std::span<const ExpertIdx> experts) = 0;
  virtual std::uint32_t pin_at_rest(LayerIdx layer, std::span<const ExpertIdx> experts) { return pin(layer, experts); }
  virtual bool try_pin(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket) = 0;
  virtual bool ready(std::uint32_t ticket, std::size_t i) noexcept = 0;
  virtual bool hit(std::uint32_t ticket, std::size_t i) noexcept = 0;
  virtual ExpertView wait(std::uint32_t ticket, std::size_t i) = 0;
  virtual void unpin(std::uint32_t ticket) noexcept = 0;
};

inline ExpertLease::~ExpertLease() {
  if (store_ != nullptr) store_->unpin(ticket_);
}
inline bool ExpertLease::ready(std::size_t i) const noexcept { return store_->ready(ticket_, i); }
inline bool ExpertLease::hit(std::size_t i) const noexcept { return store_->hit(ticket_, i); }
inline ExpertView ExpertLease::wait(std::size_t i) { return store_->wait(ticket_, i); }

}  // namespace moeflux::store
