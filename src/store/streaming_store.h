// An ExpertStore with a bounded number of slots: hits are pinned, misses are read straight from disk into free slots.
//
// All slots lie in one region that is allocated once. A lease never needs more than max_lease() slots, and whoever asks
// for one holds none (or takes what try_acquire gives), so acquire() cannot deadlock: it waits at most for leases of other
// sessions to end. What is in memory never changes a result.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "format/model_folder.h"
#include "io/async_reader.h"
#include "io/region.h"
#include "store/expert_store.h"
#include "store/policy.h"
#include "store/slot_layout.h"
#include "store/slot_reads.h"

namespace moeflux::store {

struct StreamingOptions {
  std::size_t n_slots = 0;
  std::size_t max_lease = 0;  // experts; at least the largest top-k, at most n_slots
  MakeReader make_reader;
};

class StreamingStore final : public ExpertStore {
 public:
  // InvalidArgument: fewer slots than the largest lease. The catalog is copied; `file_names` are for messages.
  StreamingStore(ExpertCatalog catalog, std::vector<std::string> file_names, const StreamingOptions& options);
  ~StreamingStore() override;

  // Bytes one slot takes for this catalog: what the planner divides by.
  static std::uint64_t slot_bytes(const ExpertCatalog& catalog) { return SlotLayout(catalog).slot_bytes(); }

  void visit(LayerIdx layer, std::span<const ExpertIdx> experts, std::span<const std::uint32_t> counts, std::uint32_t n_tokens) noexcept override;
  void hint(LayerIdx layer, std::span<const ExpertIdx> experts, float confidence) noexcept override;
  std::size_t max_lease() const noexcept override { return max_lease_; }
  void poll() noexcept override;
  // Enough bytes in flight to keep a disk busy while the batch before is computed, few slots away from what decoding lives
  // on: two batches are a sixteenth of the slots.
  std::size_t scan_batch() const noexcept override {
    return std::min(std::clamp<std::size_t>(slots_.size() / 32, 8, 32), max_lease_);
  }
  StoreStats stats() const noexcept override;
  io::ReaderInfo reader_info() const { return reads_.info(); }

  // For tests: slots that are pinned or still loading.
  std::size_t busy_slots();

 protected:
  std::uint32_t pin(LayerIdx layer, std::span<const ExpertIdx> experts) override;
  bool try_pin(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket) override;
  bool ready(std::uint32_t ticket, std::size_t i) noexcept override;
  bool hit(std::uint32_t ticket, std::size_t i) noexcept override;
  ExpertView wait(std::uint32_t ticket, std::size_t i) override;
  void unpin(std::uint32_t ticket) noexcept override;

 private:
  enum class State : std::uint8_t { Free, Loading, Ready, Failed };
  struct Slot {
    State state = State::Free;
    bool hinted = false;         // loaded by a hint and not yet asked for
    LayerIdx layer{};
    ExpertIdx expert{};
    std::uint32_t pins = 0;
    std::uint64_t loaded_at = 0;  // visits_ then
  };
  struct Ticket {
    std::vector<std::uint32_t> slots;
    std::vector<std::uint8_t> hits;  // beside slots
  };
  static constexpr std::uint32_t kNone = UINT32_MAX;

  std::uint32_t key(LayerIdx layer, ExpertIdx expert) const noexcept;
  // All below: mutex_ held.
  bool pin_all(LayerIdx layer, std::span<const ExpertIdx> experts, Ticket& ticket);
  bool take_slot(std::uint32_t& slot);
  bool take_slot_for_hint(std::uint32_t& slot, double value);
  void evict(ExpertKey victim, std::uint32_t& slot);
  void start_load(std::uint32_t slot, LayerIdx layer, ExpertIdx expert);
  void read_done(std::uint32_t slot, bool good);
  void forget(std::uint32_t slot) noexcept;
  // Takes completions, waiting up to some time for one, with the lock released meanwhile.
  void wait_for_completion(std::unique_lock<std::mutex>& lock);

  const ExpertCatalog catalog_;
  const SlotLayout layout_;
  std::size_t max_lease_ = 0;
  std::int64_t experts_per_layer_ = 0;
  io::Region region_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a slot became ready, failed or unpinned
  std::vector<Slot> slots_;
  std::vector<std::int32_t> slot_of_;  // by key; -1: on disk
  std::vector<std::uint32_t> free_;
  std::vector<Ticket> tickets_;
  std::vector<std::uint32_t> free_tickets_;
  CachePolicy policy_;
  std::uint64_t visits_ = 0;
  StoreStats stats_;
  SlotReads reads_;  // last: stops before the memory goes
};

}  // namespace moeflux::store
