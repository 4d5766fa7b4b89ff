// An ExpertStore over three tiers: slots in device memory, where experts are computed; slots in pinned main memory; the disk.
//
// An expert lives in one tier. A miss that is in main memory is copied to a device slot and its place in main memory becomes free;
// the expert that makes room for it goes to main memory, or is dropped where it is worth less than everything there (it is on disk
// anyway). One CachePolicy judges all. A miss that is worth less than what it would push out, and most of what a prompt reads,
// only passes through a device slot while its lease lives and stays where it was.
//
// Of the device slots `n_spare` are never kept for long: leases pass through them, and experts that leave do not keep one waiting
// that comes. A lease needs at most n_spare of them, and whoever asks for one holds none (or takes what try_acquire gives): every
// slot that is not kept becomes free by itself or with a lease of another session, so acquire() cannot deadlock.
//
// Where the device can read main memory itself, an expert there is computed where it is, over the link, and the host has no part in it.
// After a step those it read are promoted where they are worth more than others on the device. A device that stores what it reads
// (Backend::run_routed) does so in spare slots that are lent to it for a step: such experts need no copy, and the link is free for others.
//
// A device slot holds a record as RecordLayout describes it, whatever the file's layout was; so does a slot in main memory. Reads
// land in staging slots first. A slot in main memory that has become free keeps its bytes until another expert needs it: an expert
// that comes back to it soon is not copied again.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/async_copier.h"
#include "core/buffer.h"
#include "store/expert_store.h"
#include "store/policy.h"
#include "store/slot_layout.h"
#include "store/slot_reads.h"
#include "store/tier_slots.h"

namespace moeflux::store {

struct TieredOptions {
  std::size_t n_device = 0;   // slots in device memory
  std::size_t n_spare = 0;    // of them not kept: the largest lease; at least the largest top-k, at most n_device
  std::size_t n_host = 0;     // slots in main memory; may be 0
  std::size_t n_staging = 0;  // reads in flight; at least 1
  bool device_reads_host = false;  // the table has main memory's slots, too; a miss is then only what is on disk
  MakeReader make_reader;
  std::function<void(std::byte* slot, std::size_t bytes)> on_freed = {};  // a slot's bytes are nobody's any more: for tests
};

class TieredStore final : public ExpertStore {
 public:
  // InvalidArgument: slots that cannot hold a lease. The catalog is copied; `file_names` are for messages. The allocators outlive
  // the store. OutOfMemory.
  TieredStore(ExpertCatalog catalog, std::vector<std::string> file_names, const TieredOptions& options, Allocator& device, Allocator& pinned,
              std::unique_ptr<AsyncCopier> copier);
  ~TieredStore() override;

  // Bytes of one slot of a tier (both alike), and of a staging slot.
  static std::uint64_t slot_bytes(const ExpertCatalog& catalog);
  static std::uint64_t staging_bytes(const ExpertCatalog& catalog) { return SlotLayout(catalog).slot_bytes(); }

  // Reads experts until both tiers are full, a share of each layer. Throws as ExpertLease::wait.
  void fill(const ProgressSink& progress);

  void visit(LayerIdx layer, std::span<const ExpertIdx> experts, std::span<const std::uint32_t> counts, std::uint32_t n_tokens) noexcept override;
  void hint(LayerIdx layer, std::span<const ExpertIdx> experts, float confidence) noexcept override;
  std::size_t max_lease() const noexcept override { return n_spare_; }
  std::size_t scan_batch() const noexcept override { return n_spare_ < 2 ? 1 : n_spare_ / 2; }  // two are under way at once
  void poll() noexcept override;
  StoreStats stats() const noexcept override;
  SlotExperts slot_layer(LayerIdx layer) const noexcept override;
  void begin_use() noexcept override;
  void end_use() noexcept override;
  std::size_t lend_slots(std::span<std::int32_t> slots) noexcept override;
  void take_back(std::span<const std::int32_t> lent, std::span<const FilledSlot> filled) noexcept override;
  std::uint64_t read_slots(std::uint64_t version, std::span<std::int32_t> table, std::size_t row) noexcept override;
  bool table_is_whole() const noexcept override;
  void used(LayerIdx layer, std::span<const ExpertIdx> experts, std::size_t n_stayed) noexcept override;
  io::ReaderInfo reader_info() const { return reads_.info(); }

  // For tests: slots of any kind that are pinned or in the middle of a move; and what is wrong with the books ("" is nothing).
  std::size_t busy_slots();
  std::string find_fault() const;
  enum class Tier : std::uint8_t { Device, Host, Disk };
  Tier tier_of(LayerIdx layer, ExpertIdx expert) const;

 protected:
  std::uint32_t pin(LayerIdx layer, std::span<const ExpertIdx> experts) override;
  std::uint32_t pin_at_rest(LayerIdx layer, std::span<const ExpertIdx> experts) override;
  bool try_pin(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket) override;
  bool ready(std::uint32_t ticket, std::size_t i) noexcept override;
  bool hit(std::uint32_t ticket, std::size_t i) noexcept override;
  ExpertView wait(std::uint32_t ticket, std::size_t i) override;
  void unpin(std::uint32_t ticket) noexcept override;

 private:
  struct Ticket {
    std::vector<std::uint32_t> slots;
    std::vector<std::uint8_t> hits;  // beside slots: nothing had to be read
  };
  // Somebody waits for slots as long as it lives.
  class Waiting {
   public:
    explicit Waiting(TieredStore& store) : store_(store) { change(1); }
    ~Waiting() { change(-1); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    void change(int by) {
      const std::lock_guard lock(store_.mutex_);
      store_.n_waiting_ += static_cast<std::size_t>(by);
    }
    TieredStore& store_;
  };
  bool try_pin_as(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket, bool at_rest);
  std::uint32_t pin_as(LayerIdx layer, std::span<const ExpertIdx> experts, bool at_rest);
  static constexpr std::size_t kDeviceTier = 0, kHostTier = 1;  // of the policy

  std::uint32_t index(ExpertKey key) const noexcept;
  std::size_t record_bytes(ExpertKey key) const noexcept { return catalog_.layer(key.layer).layout.bytes; }
  std::byte* device_memory(std::uint32_t slot) const noexcept { return device_buffer_.data() + slot * slot_bytes_; }
  std::byte* host_memory(std::uint32_t slot) const noexcept { return host_buffer_.data() + slot * slot_bytes_; }
  // All below: mutex_ held.
  bool pin_all(LayerIdx layer, std::span<const ExpertIdx> experts, Ticket& ticket, bool at_rest);
  // What kept slots hold must stay there while somebody's device may read the table.
  bool may_evict(bool at_rest) const noexcept { return n_users_ == 0 || (at_rest && n_users_ == 1); }
  // Whether a slot in main memory may get another expert: not while somebody's device may read what is there.
  bool may_reuse_host() const noexcept { return !device_reads_host_ || n_users_ == 0 || (resting_ && n_users_ == 1); }
  std::int32_t table_entry(std::uint32_t index) const noexcept;
  void update_table(ExpertKey key) noexcept;
  void promote_wanted();
  void keep_filled(std::uint32_t slot, ExpertKey key);
  // tiered_moves.cpp: how experts come and go.
  bool make_room(ExpertKey key, bool at_rest);
  void load(std::uint32_t slot, ExpertKey key, bool keep, io::ReadPriority priority);
  void load_from_host(std::uint32_t slot, std::uint32_t host);
  void load_from_disk(std::uint32_t slot, io::ReadPriority priority);
  void start_waiting_reads();
  void evict(ExpertKey victim);
  bool take_host_slot(ExpertKey key, std::uint32_t& host);
  void read_done(std::uint32_t staging, bool good);
  void find_home(std::uint32_t slot);
  void settle_in_host(ExpertKey key, std::uint32_t host);
  void leave(std::uint32_t slot, std::uint32_t host);
  void homeless(std::uint32_t host);
  void leave_bytes_in_host(std::uint32_t slot, std::uint32_t staging);
  void copy_done(const CopyCompletion& c);
  void arrived(std::uint32_t slot, bool ok);
  void left(std::uint32_t slot, bool ok);
  void not_loaded(std::uint32_t slot);
  void release(std::uint32_t slot);
  void free_device(std::uint32_t slot);
  void free_host(std::uint32_t host, bool keeps_bytes);
  void free_staging(std::uint32_t staging);
  std::span<const CopyPart> record_parts(ExpertKey key, std::uint32_t staging, std::byte* to);
  void drain();
  // Takes completions, waiting up to some time for one, with the lock released meanwhile.
  std::size_t wait_for_reads(SlotReads::Completions& reads) noexcept;
  void wait_for_completion(std::unique_lock<std::mutex>& lock);

  const ExpertCatalog catalog_;
  const SlotLayout layout_;
  const std::function<void(std::byte*, std::size_t)> on_freed_;
  std::size_t n_spare_ = 0, n_kept_ = 0;  // n_kept_: device slots that may be kept
  std::int64_t experts_per_layer_ = 0;
  std::uint64_t slot_bytes_ = 0;
  Buffer device_buffer_, host_buffer_, staging_buffer_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a slot became ready, failed, free or unpinned
  std::vector<DeviceSlot> device_;
  std::vector<HostSlot> host_;
  std::vector<std::int32_t> staging_;                // the device slot that each loads; -1: free
  std::vector<std::int32_t> device_of_, host_of_;    // by index(); -1: not there
  std::vector<std::int32_t> table_;                  // by index(): what read_slots() says
  std::uint64_t table_version_ = 1;
  std::size_t n_experts_ = 0, n_absent_ = 0;  // absent: experts that are -1 in the table
  std::size_t n_users_ = 0;  // of the table
  std::size_t n_waiting_ = 0;  // for slots
  bool resting_ = false;     // the only user's device is at rest until it reads the table again
  const bool device_reads_host_;
  std::vector<ExpertKey> wanted_;  // read from main memory by the steps under way
  std::vector<std::uint32_t> free_device_, free_staging_;
  HostFreeList free_host_;
  std::vector<std::uint32_t> waiting_;               // device slots whose reads wait for a staging slot, first come first
  std::vector<std::uint8_t> scanning_;               // by layer: its last visit was by more than one token
  std::vector<CopyPart> parts_;
  std::vector<Ticket> tickets_;
  std::vector<std::uint32_t> free_tickets_;
  CachePolicy policy_;
  std::uint64_t visits_ = 0;
  StoreStats stats_;
  std::unique_ptr<AsyncCopier> copier_;
  SlotReads reads_;  // copier and reader last: they stop before the memory goes
};

}  // namespace moeflux::store
