#include "store/tiered_store.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/error.h"

namespace moeflux::store {
namespace {

constexpr std::size_t kCopyBatch = 64;                    // completions taken at once
// For a read, and for a copy, which takes less. Another thread may have taken what we wait for and sent it on: reads become copies.
constexpr std::chrono::microseconds kReadPatience{1000}, kCopyPatience{200};
// Experts that come to the device after a step: few where the device knows its text already, more where it misses much.
constexpr std::size_t kLeastPromotions = 2, kPromotionShare = 1024;
constexpr double kPromotionMargin = 1.25;                 // worth this much more than what they push out, which is read over the link then
constexpr std::size_t kMostWanted = 4096;                 // of one step, or several at once

std::uint64_t largest_record(const ExpertCatalog& catalog) {
  std::uint64_t most = kRecordAlign;
  for (const ExpertLayer& l : catalog.layers)
    if (l.n_experts > 0) most = std::max(most, l.layout.bytes);
  return most;
}

Buffer slots_of(Allocator& allocator, std::size_t n, std::uint64_t bytes) {
  return allocator.allocate(mul_or_fail<std::uint64_t>(n, bytes, "expert slots"), kRecordAlign);
}

}  // namespace

std::uint64_t TieredStore::slot_bytes(const ExpertCatalog& catalog) { return largest_record(catalog); }

TieredStore::TieredStore(ExpertCatalog catalog, std::vector<std::string> file_names, const TieredOptions& options, Allocator& device,
                         Allocator& pinned, std::unique_ptr<AsyncCopier> copier)
    : catalog_(std::move(catalog)),
      layout_(catalog_),
      on_freed_(options.on_freed),
      n_spare_(options.n_spare),
      n_kept_(options.n_device - std::min(options.n_device, options.n_spare)),
      experts_per_layer_(most_experts(catalog_)),
      slot_bytes_(largest_record(catalog_)),
      device_buffer_(slots_of(device, options.n_device, slot_bytes_)),
      host_buffer_(slots_of(pinned, options.n_host, slot_bytes_)),
      staging_buffer_(slots_of(pinned, options.n_staging, layout_.slot_bytes())),
      device_(options.n_device),
      host_(options.n_host),
      staging_(options.n_staging, -1),
      device_of_(catalog_.layers.size() * static_cast<std::size_t>(experts_per_layer_), -1),
      host_of_(device_of_.size(), -1),
      table_(device_of_.size(), -1),
      device_reads_host_(options.device_reads_host),
      scanning_(catalog_.layers.size(), 0),
      policy_(experts_by_layer(catalog_), 2),
      copier_(std::move(copier)),
      reads_(catalog_, layout_, std::move(file_names), {staging_buffer_.data(), staging_buffer_.bytes()}, options.n_staging, options.make_reader,
             [this](std::uint32_t staging, bool good) { read_done(staging, good); }) {
  if (n_spare_ == 0 || n_spare_ > options.n_device || options.n_staging == 0)
    fail(ErrorCode::InvalidArgument, "{} device slots and {} for reads cannot hold a lease of {} experts", options.n_device, options.n_staging, n_spare_);
  for (std::size_t s = device_.size(); s-- > 0;) free_device_.push_back(static_cast<std::uint32_t>(s));
  for (std::size_t s = staging_.size(); s-- > 0;) free_staging_.push_back(static_cast<std::uint32_t>(s));
  for (std::size_t s = 0; s < host_.size(); ++s) free_host_.push(host_, static_cast<std::uint32_t>(s));
  waiting_.reserve(device_.size());
  wanted_.reserve(kMostWanted);
  for (const ExpertLayer& l : catalog_.layers) n_experts_ += static_cast<std::size_t>(l.n_experts);
  n_absent_ = n_experts_;
  std::size_t most = 1;
  for (const ExpertLayer& l : catalog_.layers) most = std::max(most, l.pieces_per_expert);
  parts_.reserve(most);
}

TieredStore::~TieredStore() = default;

std::uint32_t TieredStore::index(ExpertKey key) const noexcept {
  return static_cast<std::uint32_t>(static_cast<std::int64_t>(raw(key.layer)) * experts_per_layer_ + raw(key.expert));
}

// All experts or none: what was pinned on the way is given back when there is no room.
bool TieredStore::pin_all(LayerIdx layer, std::span<const ExpertIdx> experts, Ticket& ticket, bool at_rest) {
  ticket.slots.clear();
  ticket.hits.clear();
  std::size_t n_missing = 0;
  for (ExpertIdx e : experts) n_missing += device_of_[index({layer, e})] < 0 ? 1 : 0;
  if (n_missing > free_device_.size()) return false;
  for (ExpertIdx e : experts) {  // hits first, so that no miss evicts one of them
    const std::int32_t at = device_of_[index({layer, e})];
    if (at >= 0) ++device_[static_cast<std::size_t>(at)].pins;
  }
  stats_.requests += experts.size();
  for (ExpertIdx e : experts) {
    const ExpertKey key{layer, e};
    const std::int32_t at = device_of_[index(key)];
    if (at < 0) {
      const std::uint32_t slot = free_device_.back();
      free_device_.pop_back();
      const bool in_memory = host_of_[index(key)] >= 0;
      stats_.host_hits += in_memory ? 1 : 0;
      load(slot, key, make_room(key, at_rest), io::ReadPriority::Demand);
      ticket.slots.push_back(slot);
      ticket.hits.push_back(in_memory);
      continue;
    }
    DeviceSlot& s = device_[static_cast<std::size_t>(at)];
    ticket.slots.push_back(static_cast<std::uint32_t>(at));
    ticket.hits.push_back(!s.loading() && !s.hinted);
    stats_.hits += s.state == DeviceSlot::State::Ready ? 1 : 0;
    if (!s.hinted) continue;
    s.hinted = false;
    ++stats_.hints_used;
    if (s.loading() && s.staging >= 0) reads_.promote(static_cast<std::uint32_t>(s.staging));
  }
  reads_.submit();
  return true;
}

bool TieredStore::try_pin(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket) { return try_pin_as(layer, experts, ticket, false); }
std::uint32_t TieredStore::pin(LayerIdx layer, std::span<const ExpertIdx> experts) { return pin_as(layer, experts, false); }
std::uint32_t TieredStore::pin_at_rest(LayerIdx layer, std::span<const ExpertIdx> experts) { return pin_as(layer, experts, true); }

bool TieredStore::try_pin_as(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket, bool at_rest) {
  const std::lock_guard lock(mutex_);
  resting_ = resting_ || at_rest;
  drain();
  if (free_tickets_.empty()) {
    free_tickets_.push_back(static_cast<std::uint32_t>(tickets_.size()));
    Ticket& fresh = tickets_.emplace_back();
    fresh.slots.reserve(n_spare_);
    fresh.hits.reserve(n_spare_);
    free_tickets_.reserve(tickets_.size());
  }
  if (!pin_all(layer, experts, tickets_[free_tickets_.back()], at_rest)) return false;
  ticket = free_tickets_.back();
  free_tickets_.pop_back();
  return true;
}

std::uint32_t TieredStore::pin_as(LayerIdx layer, std::span<const ExpertIdx> experts, bool at_rest) {
  if (experts.size() > n_spare_) fail(ErrorCode::Internal, "a lease of {} experts, at most {} were planned", experts.size(), n_spare_);
  std::uint32_t ticket = 0;
  if (try_pin_as(layer, experts, ticket, at_rest)) return ticket;
  const Waiting waiting(*this);
  while (!try_pin_as(layer, experts, ticket, at_rest)) {
    std::unique_lock lock(mutex_);
    if (copier_->outstanding() > 0 || reads_.outstanding() > 0)
      wait_for_completion(lock);
    else
      changed_.wait_for(lock, kPatience);
  }
  return ticket;
}

bool TieredStore::ready(std::uint32_t ticket, std::size_t i) noexcept {
  const std::lock_guard lock(mutex_);
  drain();
  return !device_[tickets_[ticket].slots[i]].loading();  // a failure is known at once, too
}

bool TieredStore::hit(std::uint32_t ticket, std::size_t i) noexcept {
  const std::lock_guard lock(mutex_);
  return tickets_[ticket].hits[i] != 0;
}

ExpertView TieredStore::wait(std::uint32_t ticket, std::size_t i) {
  std::unique_lock lock(mutex_);
  drain();
  const std::uint32_t slot = tickets_[ticket].slots[i];
  while (device_[slot].loading()) wait_for_completion(lock);
  const DeviceSlot& s = device_[slot];
  if (s.state == DeviceSlot::State::Failed) {
    if (!s.copy_failed) reads_.raise(s.failure);
    fail(ErrorCode::Internal, "layer {}, expert {}: cannot be copied to the device: {}", raw(s.key.layer), raw(s.key.expert), copier_->failure());
  }
  return view_record(catalog_.layer(s.key.layer).layout, device_memory(slot));
}

void TieredStore::unpin(std::uint32_t ticket) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t slot : tickets_[ticket].slots)
    if (--device_[slot].pins == 0) release(slot);
  free_tickets_.push_back(ticket);
  changed_.notify_all();
}

void TieredStore::drain() {
  CopyCompletion copies[kCopyBatch];
  for (std::size_t n; (n = copier_->poll(copies)) > 0;)
    for (std::size_t i = 0; i < n; ++i) copy_done(copies[i]);
  reads_.drain();
}

// Asks again and again, as the copier does: the device stands still meanwhile, and waking up a thread takes a tenth of a read's time.
std::size_t TieredStore::wait_for_reads(SlotReads::Completions& reads) noexcept {
  const auto end = std::chrono::steady_clock::now() + kReadPatience;
  for (;;) {
    if (const std::size_t n = reads_.wait(reads, std::chrono::nanoseconds(0)); n > 0) return n;
    if (std::chrono::steady_clock::now() >= end) return 0;
    std::this_thread::yield();
  }
}

void TieredStore::wait_for_completion(std::unique_lock<std::mutex>& lock) {
  CopyCompletion copies[kCopyBatch];
  SlotReads::Completions reads;
  const bool copying = copier_->outstanding() > 0;
  lock.unlock();
  std::size_t n_copies = 0, n_reads = 0;
  if (copying)
    n_copies = copier_->wait(copies, kCopyPatience);
  else
    n_reads = wait_for_reads(reads);
  if (n_copies + n_reads == 0) std::this_thread::yield();  // another thread may hold what we wait for
  lock.lock();
  for (std::size_t i = 0; i < n_copies; ++i) copy_done(copies[i]);
  reads_.take({reads, n_reads});
  drain();
}

void TieredStore::visit(LayerIdx layer, std::span<const ExpertIdx> experts, std::span<const std::uint32_t> counts, std::uint32_t n_tokens) noexcept {
  const std::lock_guard lock(mutex_);
  ++visits_;
  scanning_[static_cast<std::size_t>(raw(layer))] = n_tokens > 1;
  policy_.on_visit(layer, experts, counts, n_tokens);
}

void TieredStore::poll() noexcept {
  const std::lock_guard lock(mutex_);
  drain();
}

// A hint is kept or nothing. It leaves room for a lease, waits for no staging slot, and takes no place that was filled just now,
// by another hint or is worth more than what it brings.
void TieredStore::hint(LayerIdx layer, std::span<const ExpertIdx> experts, float confidence) noexcept {
  const std::lock_guard lock(mutex_);
  drain();
  const double value = policy_.value(layer, confidence);
  for (ExpertIdx e : experts) {
    const ExpertKey key{layer, e};
    if (device_of_[index(key)] >= 0) continue;
    if (free_device_.size() <= n_spare_ / 2 || (host_of_[index(key)] < 0 && free_staging_.empty())) break;
    if (policy_.size(kDeviceTier) >= n_kept_) {
      if (!may_evict(false)) break;
      const auto victim = policy_.choose_victim([&](ExpertKey k) {
        const DeviceSlot& s = device_[static_cast<std::size_t>(device_of_[index(k)])];
        return s.busy() || s.hinted || visits_ - s.loaded_at < kJustLoaded;
      }, kDeviceTier);
      if (!victim || policy_.value(*victim) >= value) break;
      evict(*victim);
    }
    const std::uint32_t slot = free_device_.back();
    free_device_.pop_back();
    load(slot, key, true, io::ReadPriority::Hint);
    ++stats_.hints_issued;
  }
  reads_.submit();
}

SlotExperts TieredStore::slot_layer(LayerIdx layer) const noexcept {
  const ExpertLayer& l = catalog_.layer(layer);
  if (l.n_experts == 0) return {};
  const std::int64_t offset = device_reads_host_ && !host_.empty() ? host_buffer_.data() - device_buffer_.data() : 0;
  return {view_record(l.layout, device_buffer_.data()), slot_bytes_, l.n_experts, offset, device_buffer_.data()};
}

void TieredStore::begin_use() noexcept {
  const std::lock_guard lock(mutex_);
  drain();
  ++n_users_;
}

void TieredStore::end_use() noexcept {
  const std::lock_guard lock(mutex_);
  if (--n_users_ > 0) return;
  resting_ = false;
  drain();
  promote_wanted();
}

// As many as promotions and a token's experts leave; none where nothing is kept anyway, or somebody waits for slots: who lends anew for every
// token would always be there first.
std::size_t TieredStore::lend_slots(std::span<std::int32_t> slots) noexcept {
  const std::lock_guard lock(mutex_);
  drain();
  if (!device_reads_host_ || n_kept_ == 0 || n_waiting_ > 0) return 0;
  const std::size_t stay = std::max<std::size_t>(n_spare_ / 8, 1), n = std::min(slots.size(), free_device_.size() - std::min(free_device_.size(), stay));
  for (std::size_t i = 0; i < n; ++i) {
    device_[free_device_.back()].state = DeviceSlot::State::Lent;
    slots[i] = static_cast<std::int32_t>(free_device_.back());
    free_device_.pop_back();
  }
  return n;
}

void TieredStore::take_back(std::span<const std::int32_t> lent, std::span<const FilledSlot> filled) noexcept {
  const std::lock_guard lock(mutex_);
  drain();
  for (const FilledSlot& f : filled) keep_filled(static_cast<std::uint32_t>(f.slot), {f.layer, f.expert});
  for (std::int32_t s : lent) {
    DeviceSlot& slot = device_[static_cast<std::size_t>(s)];
    if (slot.state == DeviceSlot::State::Lent) free_device(static_cast<std::uint32_t>(s));  // else it was kept
  }
}

// An expert that lives in main memory moves to a lent slot, which has its bytes. Whoever makes room must be in main memory, too: nothing is
// copied, and the table stays whole.
void TieredStore::keep_filled(std::uint32_t slot, ExpertKey key) {
  const std::int32_t home = host_of_[index(key)];
  if (device_of_[index(key)] >= 0 || home < 0 || !may_evict(true)) return;
  HostSlot& h = host_[static_cast<std::size_t>(home)];
  if (!h.kept || h.state != HostSlot::State::Ready || !h.has_bytes) return;
  if (policy_.size(kDeviceTier) >= n_kept_) {
    const auto victim = policy_.choose_victim([&](ExpertKey k) { return device_[static_cast<std::size_t>(device_of_[index(k)])].busy() || host_of_[index(k)] < 0; }, kDeviceTier);
    if (!victim || policy_.value(key) <= policy_.value(*victim)) return;
    evict(*victim);
  }
  DeviceSlot& s = device_[slot];
  s = DeviceSlot{};
  s.state = DeviceSlot::State::Ready;
  s.kept = true;
  s.key = key;
  s.loaded_at = visits_;
  device_of_[index(key)] = static_cast<std::int32_t>(slot);
  policy_.insert(key, kDeviceTier);
  h.kept = false;
  if (h.readers == 0) free_host(static_cast<std::uint32_t>(home), true);
  update_table(key);
}

std::int32_t TieredStore::table_entry(std::uint32_t index) const noexcept {
  const std::int32_t device = device_of_[index], host = host_of_[index];
  if (device >= 0 && device_[static_cast<std::size_t>(device)].kept && device_[static_cast<std::size_t>(device)].state == DeviceSlot::State::Ready) return device;
  if (!device_reads_host_ || host < 0) return -1;
  const HostSlot& h = host_[static_cast<std::size_t>(host)];
  return h.state == HostSlot::State::Ready && h.has_bytes ? -2 - host : -1;
}

void TieredStore::update_table(ExpertKey key) noexcept {
  std::int32_t& entry = table_[index(key)];
  const std::int32_t now = table_entry(index(key));
  if (entry == now) return;
  n_absent_ += now == -1 ? 1 : 0;
  n_absent_ -= entry == -1 ? 1 : 0;
  entry = now;
  ++table_version_;
}

bool TieredStore::table_is_whole() const noexcept {
  const std::lock_guard lock(mutex_);
  return n_absent_ == 0;
}

// What the steps since nobody used the table have read from main memory comes to the device where it is worth more than what is there.
// A few at a time: promotions share the link with the next step.
void TieredStore::promote_wanted() {
  std::erase_if(wanted_, [&](ExpertKey key) { return device_of_[index(key)] >= 0; });
  const std::size_t n = std::min(wanted_.size(), std::max(kLeastPromotions, wanted_.size() * wanted_.size() / kPromotionShare));
  const auto most = wanted_.begin() + static_cast<std::ptrdiff_t>(n);
  std::partial_sort(wanted_.begin(), most, wanted_.end(), [&](ExpertKey a, ExpertKey b) { return policy_.value(a) > policy_.value(b); });
  for (ExpertKey key : std::span(wanted_.begin(), most)) {
    if (free_device_.size() <= n_spare_ / 2) break;
    if (device_of_[index(key)] >= 0 || host_of_[index(key)] < 0 || host_[static_cast<std::size_t>(host_of_[index(key)])].busy()) continue;
    if (policy_.size(kDeviceTier) >= n_kept_) {
      const auto victim = policy_.choose_victim([&](ExpertKey k) { return device_[static_cast<std::size_t>(device_of_[index(k)])].busy(); }, kDeviceTier);
      if (!victim || policy_.value(key) <= policy_.value(*victim) * kPromotionMargin) continue;
      evict(*victim);
    }
    const std::uint32_t slot = free_device_.back();
    free_device_.pop_back();
    load(slot, key, true, io::ReadPriority::Hint);
    device_[slot].hinted = false;
  }
  wanted_.clear();
}

std::uint64_t TieredStore::read_slots(std::uint64_t version, std::span<std::int32_t> table, std::size_t row) noexcept {
  const std::lock_guard lock(mutex_);
  resting_ = false;
  if (version == table_version_) return version;
  const auto width = static_cast<std::size_t>(experts_per_layer_);
  for (std::size_t l = 0; l < catalog_.layers.size(); ++l)
    std::copy_n(table_.begin() + static_cast<std::ptrdiff_t>(l * width), width, table.begin() + static_cast<std::ptrdiff_t>(l * row));
  return table_version_;
}

void TieredStore::used(LayerIdx layer, std::span<const ExpertIdx> experts, std::size_t n_stayed) noexcept {
  visit(layer, experts, {}, 1);
  const std::lock_guard lock(mutex_);
  stats_.requests += experts.size();
  for (ExpertIdx e : experts) {
    const ExpertKey key{layer, e};
    if (table_[index(key)] >= -1) {
      ++stats_.hits;
      continue;
    }
    ++stats_.host_hits;
    if (n_stayed > 0)
      --n_stayed;
    else
      stats_.bytes_to_device += record_bytes(key);
    if (wanted_.size() < wanted_.capacity()) wanted_.push_back(key);
  }
}

StoreStats TieredStore::stats() const noexcept {
  const std::lock_guard lock(mutex_);
  StoreStats s = stats_;
  s.bytes_read = reads_.bytes_read();
  return s;
}

void TieredStore::fill(const ProgressSink& progress) {
  std::uint64_t all = 0, done = 0;
  for (const ExpertLayer& l : catalog_.layers) all += static_cast<std::uint64_t>(l.n_experts) * l.layout.bytes;
  const auto batch = static_cast<std::int64_t>(scan_batch());
  std::vector<ExpertIdx> some;
  ExpertLease before;
  const auto finish = [&](ExpertLease lease) {
    for (std::size_t i = 0; i < lease.size(); ++i) lease.wait(i);
  };
  for (std::int64_t first = 0; first < experts_per_layer_; first += batch)
    for (std::size_t l = 0; l < catalog_.layers.size(); ++l) {
      some.clear();
      for (std::int64_t e = first; e < std::min(first + batch, catalog_.layers[l].n_experts); ++e) some.push_back(ExpertIdx(static_cast<std::int32_t>(e)));
      if (some.empty()) continue;
      {
        const std::lock_guard lock(mutex_);
        if (policy_.size(kDeviceTier) >= n_kept_ && free_host_.empty()) break;
      }
      const auto layer = LayerIdx(static_cast<std::int32_t>(l));
      ExpertLease lease = try_acquire(layer, some);
      finish(std::move(before));
      if (!lease) lease = acquire(layer, some);
      before = std::move(lease);
      done += some.size() * catalog_.layers[l].layout.bytes;
      if (progress) progress("experts", done, all);
    }
  finish(std::move(before));
}

}  // namespace moeflux::store
