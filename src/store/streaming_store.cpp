#include "store/streaming_store.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/error.h"

namespace moeflux::store {

StreamingStore::StreamingStore(ExpertCatalog catalog, std::vector<std::string> file_names, const StreamingOptions& options)
    : catalog_(std::move(catalog)),
      layout_(catalog_),
      max_lease_(options.max_lease),
      experts_per_layer_(most_experts(catalog_)),
      region_(io::Region::allocate(mul_or_fail<std::uint64_t>(options.n_slots, layout_.slot_bytes(), "expert slots"))),
      slots_(options.n_slots),
      slot_of_(catalog_.layers.size() * static_cast<std::size_t>(experts_per_layer_), -1),
      policy_(experts_by_layer(catalog_)),
      reads_(catalog_, layout_, std::move(file_names), region_.span(), options.n_slots, options.make_reader,
             [this](std::uint32_t slot, bool good) { read_done(slot, good); }) {
  if (max_lease_ == 0 || max_lease_ > options.n_slots)
    fail(ErrorCode::InvalidArgument, "{} expert slots cannot hold a lease of {} experts", options.n_slots, max_lease_);
  for (std::size_t s = options.n_slots; s-- > 0;) free_.push_back(static_cast<std::uint32_t>(s));
}

StreamingStore::~StreamingStore() = default;

std::uint32_t StreamingStore::key(LayerIdx layer, ExpertIdx expert) const noexcept {
  return static_cast<std::uint32_t>(static_cast<std::int64_t>(raw(layer)) * experts_per_layer_ + raw(expert));
}

// A slot nobody uses: free, or the least valuable one that is neither pinned nor loading.
bool StreamingStore::take_slot(std::uint32_t& slot) {
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
    return true;
  }
  const auto victim = policy_.choose_victim([&](ExpertKey k) {
    const Slot& s = slots_[static_cast<std::size_t>(slot_of_[key(k.layer, k.expert)])];
    return s.pins > 0 || s.state == State::Loading;
  });
  if (!victim) return false;
  evict(*victim, slot);
  return true;
}

// The same for a hint, which takes less: no slot that was filled just now or by another hint, and none that is worth more
// than what it would bring.
bool StreamingStore::take_slot_for_hint(std::uint32_t& slot, double value) {
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
    return true;
  }
  const auto victim = policy_.choose_victim([&](ExpertKey k) {
    const Slot& s = slots_[static_cast<std::size_t>(slot_of_[key(k.layer, k.expert)])];
    return s.pins > 0 || s.state == State::Loading || s.hinted || visits_ - s.loaded_at < kJustLoaded;
  });
  if (!victim || policy_.value(*victim) >= value) return false;
  evict(*victim, slot);
  return true;
}

void StreamingStore::evict(ExpertKey victim, std::uint32_t& slot) {
  slot = static_cast<std::uint32_t>(slot_of_[key(victim.layer, victim.expert)]);
  if (slots_[slot].hinted) ++stats_.hints_wasted;
  forget(slot);
}

void StreamingStore::forget(std::uint32_t slot) noexcept {
  Slot& s = slots_[slot];
  slot_of_[key(s.layer, s.expert)] = -1;
  policy_.erase({s.layer, s.expert});
  s = Slot{};
}

void StreamingStore::start_load(std::uint32_t slot, LayerIdx layer, ExpertIdx expert) {
  Slot& s = slots_[slot];
  s = Slot{};
  s.state = State::Loading;
  s.loaded_at = visits_;
  s.layer = layer;
  s.expert = expert;
  reads_.begin(slot, layer, expert);
  slot_of_[key(layer, expert)] = static_cast<std::int32_t>(slot);
  policy_.insert({layer, expert});
}

// All pieces are back: ready, once more, or failed. A failed slot that nobody has pinned is simply free again.
void StreamingStore::read_done(std::uint32_t slot, bool good) {
  Slot& s = slots_[slot];
  if (good) {
    s.state = State::Ready;
  } else if (reads_.may_retry(slot) && s.pins > 0) {
    reads_.queue(slot, io::ReadPriority::Demand);
    reads_.submit();
    return;
  } else if (s.pins > 0) {
    s.state = State::Failed;
  } else {
    forget(slot);
    free_.push_back(slot);
  }
  changed_.notify_all();
}

void StreamingStore::wait_for_completion(std::unique_lock<std::mutex>& lock) {
  SlotReads::Completions done;
  lock.unlock();
  const std::size_t n = reads_.wait(done, kPatience);
  if (n == 0) std::this_thread::yield();  // another thread may hold what we wait for
  lock.lock();
  reads_.take({done, n});
}

// All experts or none: what was pinned on the way is given back when there is no room.
bool StreamingStore::pin_all(LayerIdx layer, std::span<const ExpertIdx> experts, Ticket& ticket) {
  std::vector<std::uint32_t>& slots = ticket.slots;
  slots.clear();
  ticket.hits.clear();
  std::size_t hits = 0;
  for (ExpertIdx e : experts) {  // hits first, so that no miss evicts one of them
    const std::int32_t at = slot_of_[key(layer, e)];
    if (at >= 0) ++slots_[static_cast<std::size_t>(at)].pins;
    slots.push_back(at >= 0 ? static_cast<std::uint32_t>(at) : kNone);
    const bool in_memory = at >= 0 && slots_[static_cast<std::size_t>(at)].state == State::Ready;
    ticket.hits.push_back(in_memory && !slots_[static_cast<std::size_t>(at)].hinted);
    hits += in_memory;
  }
  for (std::size_t i = 0; i < experts.size(); ++i) {
    if (slots[i] != kNone) continue;
    std::uint32_t slot = 0;
    if (!take_slot(slot)) {
      for (std::size_t k = 0; k < slots.size(); ++k) {
        if (slots[k] == kNone) continue;
        Slot& s = slots_[slots[k]];
        --s.pins;
        if (s.state == State::Loading && !reads_.under_way(slots[k])) {  // taken just now, nothing submitted
          forget(slots[k]);
          free_.push_back(slots[k]);
        }
      }
      return false;
    }
    start_load(slot, layer, experts[i]);
    slots_[slot].pins = 1;
    slots[i] = slot;
  }
  for (std::size_t i = 0; i < experts.size(); ++i) {
    Slot& s = slots_[slots[i]];
    if (s.state == State::Loading && !reads_.under_way(slots[i])) reads_.queue(slots[i], io::ReadPriority::Demand);
    if (s.hinted) {
      s.hinted = false;
      ++stats_.hints_used;
      if (s.state == State::Loading) reads_.promote(slots[i]);
    }
  }
  reads_.submit();
  stats_.requests += experts.size();
  stats_.hits += hits;
  return true;
}

bool StreamingStore::try_pin(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket) {
  const std::lock_guard lock(mutex_);
  reads_.drain();
  if (free_tickets_.empty()) {
    free_tickets_.push_back(static_cast<std::uint32_t>(tickets_.size()));
    Ticket& fresh = tickets_.emplace_back();
    fresh.slots.reserve(max_lease_);
    fresh.hits.reserve(max_lease_);
    free_tickets_.reserve(tickets_.size());
  }
  if (!pin_all(layer, experts, tickets_[free_tickets_.back()])) return false;
  ticket = free_tickets_.back();
  free_tickets_.pop_back();
  return true;
}

std::uint32_t StreamingStore::pin(LayerIdx layer, std::span<const ExpertIdx> experts) {
  if (experts.size() > max_lease_) fail(ErrorCode::Internal, "a lease of {} experts, at most {} were planned", experts.size(), max_lease_);
  std::uint32_t ticket = 0;
  while (!try_pin(layer, experts, ticket)) {
    std::unique_lock lock(mutex_);
    if (reads_.outstanding() > 0)
      wait_for_completion(lock);
    else
      changed_.wait_for(lock, kPatience);
  }
  return ticket;
}

bool StreamingStore::ready(std::uint32_t ticket, std::size_t i) noexcept {
  const std::lock_guard lock(mutex_);
  reads_.drain();
  return slots_[tickets_[ticket].slots[i]].state != State::Loading;  // a failure is known at once, too
}

bool StreamingStore::hit(std::uint32_t ticket, std::size_t i) noexcept {
  const std::lock_guard lock(mutex_);
  return tickets_[ticket].hits[i] != 0;
}

ExpertView StreamingStore::wait(std::uint32_t ticket, std::size_t i) {
  std::unique_lock lock(mutex_);
  reads_.drain();
  const std::uint32_t slot = tickets_[ticket].slots[i];
  while (slots_[slot].state == State::Loading) wait_for_completion(lock);
  const Slot& s = slots_[slot];
  if (s.state == State::Failed) reads_.raise(reads_.failure(slot));
  return layout_.view(catalog_, s.layer, s.expert, reads_.memory(slot));
}

void StreamingStore::unpin(std::uint32_t ticket) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t slot : tickets_[ticket].slots) {
    Slot& s = slots_[slot];
    if (--s.pins == 0 && s.state == State::Failed) {
      forget(slot);
      free_.push_back(slot);
    }
  }
  free_tickets_.push_back(ticket);
  changed_.notify_all();
}

void StreamingStore::visit(LayerIdx layer, std::span<const ExpertIdx> experts, std::span<const std::uint32_t> counts, std::uint32_t n_tokens) noexcept {
  const std::lock_guard lock(mutex_);
  ++visits_;
  policy_.on_visit(layer, experts, counts, n_tokens);
}

void StreamingStore::poll() noexcept {
  const std::lock_guard lock(mutex_);
  reads_.drain();
}

void StreamingStore::hint(LayerIdx layer, std::span<const ExpertIdx> experts, float confidence) noexcept {
  const std::lock_guard lock(mutex_);
  reads_.drain();
  const double value = policy_.value(layer, confidence);
  for (ExpertIdx e : experts) {
    if (slot_of_[key(layer, e)] >= 0) continue;
    std::uint32_t slot = 0;
    if (!take_slot_for_hint(slot, value)) break;
    start_load(slot, layer, e);
    slots_[slot].hinted = true;
    reads_.queue(slot, io::ReadPriority::Hint);
    ++stats_.hints_issued;
  }
  reads_.submit();
}

StoreStats StreamingStore::stats() const noexcept {
  const std::lock_guard lock(mutex_);
  StoreStats s = stats_;
  s.bytes_read = reads_.bytes_read();
  return s;
}

std::size_t StreamingStore::busy_slots() {
  const std::lock_guard lock(mutex_);
  reads_.drain();
  reads_.settle();
  return static_cast<std::size_t>(std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.pins > 0 || s.state == State::Loading; }));
}

}  // namespace moeflux::store
