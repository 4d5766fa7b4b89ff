// Reading experts from disk into slots: the part that all stores with a bounded number of slots share.
//
// An expert is read as a few pieces that land in the windows of its slot (slot_layout.h). When all are back they are checked
// (short reads, a pack's checksum, which another thread computes) and changed where memory holds them otherwise than the file; then
// the owner is told. Not thread-safe: the owner's lock protects it, except wait(), which is called without.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/async_reader.h"
#include "store/check_queue.h"
#include "store/expert_record.h"
#include "store/slot_layout.h"

namespace moeflux::store {

inline constexpr std::chrono::milliseconds kPatience{50};  // between two looks at the world while waiting
inline constexpr std::uint64_t kJustLoaded = 2;            // visits of a layer for which a slot is out of a hint's reach

// Makes the reader over the slots' memory; files in the order of the folder. Tests bring their own.
using MakeReader = std::function<std::unique_ptr<io::AsyncReader>(const io::MemoryRegions&)>;

class SlotReads {
 public:
  // All pieces of the slot's expert are back; good: it can be used. Called by submit(), drain() and take(). May queue the slot
  // again and submit.
  using Done = std::function<void(std::uint32_t slot, bool good)>;

  // `memory` holds n_slots of layout.slot_bytes(); catalog, layout and memory outlive this.
  SlotReads(const ExpertCatalog& catalog, const SlotLayout& layout, std::vector<std::string> file_names, std::span<std::byte> memory,
            std::size_t n_slots, const MakeReader& make_reader, Done done);

  static constexpr std::size_t kBatch = 64;  // completions taken at once
  using Completions = io::ReadCompletion[kBatch];

  // The slot is to hold this expert; nothing is read yet.
  void begin(std::uint32_t slot, LayerIdx layer, ExpertIdx expert) noexcept { loads_[slot] = {.layer = layer, .expert = expert}; }
  void queue(std::uint32_t slot, io::ReadPriority priority);
  bool under_way(std::uint32_t slot) const noexcept { return loads_[slot].pieces_left > 0 || loads_[slot].checking; }
  // A failed read is tried once more.
  bool may_retry(std::uint32_t slot) const noexcept;
  void submit();
  void promote(std::uint32_t slot) noexcept;  // its hints become demand reads

  void drain();  // takes what has completed
  // Waits for completions, or computes a checksum; the owner's lock is not held. take() then tells of them, with the lock.
  std::size_t wait(Completions& out, std::chrono::nanoseconds patience) noexcept;
  void take(std::span<const io::ReadCompletion> completions);
  void settle();  // until every checksum is known: for whoever counts
  std::size_t outstanding() const noexcept { return reader_->outstanding() + (checks_ ? checks_->pending() : 0); }

  std::byte* memory(std::uint32_t slot) const noexcept { return memory_.data() + slot * layout_.slot_bytes(); }
  std::uint64_t bytes_read() const noexcept { return bytes_read_; }
  io::ReaderInfo info() const { return reader_->info(); }

  // Why a slot's expert could not be read, to be kept when the slot goes to another.
  struct Failure {
    LayerIdx layer{};
    ExpertIdx expert{};
    std::size_t piece = 0;
    int status = 0;
  };
  Failure failure(std::uint32_t slot) const noexcept;
  // Throws Io or InvalidModel naming file, layer and expert.
  [[noreturn]] void raise(const Failure& failure) const;

 private:
  struct Load {
    LayerIdx layer{};
    ExpertIdx expert{};
    std::uint8_t attempts = 0;
    bool checking = false;  // all pieces are back, the verdict is not
    std::uint32_t pieces_left = 0;
    int status = 0;  // of the first piece that failed; kShort: the file ended; kBroken: checksum
    std::size_t failed_piece = 0;
  };
  static constexpr int kShort = -1, kBroken = -2;

  std::uint64_t tag(std::uint32_t slot, std::size_t piece) const noexcept { return static_cast<std::uint64_t>(slot) * SlotLayout::kMaxPieces + piece; }
  void complete(const io::ReadCompletion& c);
  int transform(std::uint32_t slot) noexcept;  // 0 or an errno value
  void all_back(std::uint32_t slot);
  void take_verdicts();
  void finish(std::uint32_t slot);

  const ExpertCatalog& catalog_;
  const SlotLayout& layout_;
  const std::vector<std::string> file_names_;
  const std::span<std::byte> memory_;
  const Done done_;
  std::vector<Load> loads_;  // by slot
  std::vector<io::ReadRequest> queued_, submitted_;
  bool submitting_ = false;
  std::uint64_t bytes_read_ = 0;
  std::vector<CheckQueue::Verdict> verdicts_;
  std::unique_ptr<CheckQueue> checks_;       // null: no checksums here
  std::unique_ptr<io::AsyncReader> reader_;  // last: stops before the rest goes
};

// Experts of each layer, as policies want them, and the most of any.
std::vector<std::int64_t> experts_by_layer(const ExpertCatalog& catalog);
std::int64_t most_experts(const ExpertCatalog& catalog);

}  // namespace moeflux::store
