#include "store/streaming_store.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#include "core/error.h"

namespace moeflux::store {
namespace {

constexpr std::size_t kCompletionBatch = 64;
constexpr std::chrono::milliseconds kPatience{50};  // between two looks at the world while waiting
constexpr std::uint8_t kAttempts = 2;               // a failed read is retried once
constexpr std::uint64_t kJustLoaded = 2;            // visits of a layer for which a slot is out of a hint's reach

std::int64_t most_experts(const ExpertCatalog& catalog) {
  std::int64_t most = 0;
  for (const ExpertLayer& l : catalog.layers) most = std::max(most, l.n_experts);
  return most;
}

std::vector<std::int64_t> experts_by_layer(const ExpertCatalog& catalog) {
  std::vector<std::int64_t> n;
  for (const ExpertLayer& l : catalog.layers) n.push_back(l.n_experts);
  return n;
}

}  // namespace

StreamingStore::StreamingStore(ExpertCatalog catalog, std::vector<std::string> file_names, const StreamingOptions& options)
    : catalog_(std::move(catalog)),
      file_names_(std::move(file_names)),
      layout_(catalog_),
      max_lease_(options.max_lease),
      experts_per_layer_(most_experts(catalog_)),
      region_(io::Region::allocate(mul_or_fail<std::uint64_t>(options.n_slots, layout_.slot_bytes(), "expert slots"))),
      slots_(options.n_slots),
      slot_of_(catalog_.layers.size() * static_cast<std::size_t>(experts_per_layer_), -1),
      policy_(experts_by_layer(catalog_)) {
  if (max_lease_ == 0 || max_lease_ > options.n_slots)
    fail(ErrorCode::InvalidArgument, "{} expert slots cannot hold a lease of {} experts", options.n_slots, max_lease_);
  for (std::size_t s = options.n_slots; s-- > 0;) free_.push_back(static_cast<std::uint32_t>(s));
  queued_.reserve(max_lease_ * SlotLayout::kMaxPieces / 16);
  reader_ = options.make_reader({region_.span()});
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
  slot_of_[key(layer, expert)] = static_cast<std::int32_t>(slot);
  policy_.insert({layer, expert});
}

void StreamingStore::queue_reads(std::uint32_t slot, io::ReadPriority priority) {
  Slot& s = slots_[slot];
  const auto pieces = catalog_.layer(s.layer).expert(s.expert);
  s.pieces_left = 0;
  s.status = 0;
  ++s.attempts;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    if (!SlotLayout::needs_read(pieces, p)) continue;
    ++s.pieces_left;
    io::ReadRequest r;
    r.file = pieces[p].source.file;
    r.priority = priority;
    r.offset = pieces[p].source.offset;
    r.bytes = pieces[p].source.bytes;
    r.window = slot_memory(slot) + layout_.window_at(s.layer, p);
    r.tag = static_cast<std::uint64_t>(slot) * SlotLayout::kMaxPieces + p;
    queued_.push_back(r);
    stats_.bytes_read += r.bytes;
  }
}

void StreamingStore::submit_queued() {
  if (queued_.empty()) return;
  const int status = reader_->submit(queued_);
  if (status != 0)  // refused as a whole: every piece has failed
    for (const io::ReadRequest& r : queued_) {
      Slot& s = slots_[r.tag / SlotLayout::kMaxPieces];
      s.attempts = kAttempts;
      if (s.status == 0) s.status = status;
      if (--s.pieces_left == 0) finish(static_cast<std::uint32_t>(r.tag / SlotLayout::kMaxPieces));
    }
  queued_.clear();
}

void StreamingStore::complete(const io::ReadCompletion& c) {
  const auto slot = static_cast<std::uint32_t>(c.tag / SlotLayout::kMaxPieces);
  const std::size_t piece = c.tag % SlotLayout::kMaxPieces;
  Slot& s = slots_[slot];
  const std::uint64_t wanted = catalog_.layer(s.layer).expert(s.expert)[piece].source.bytes;
  if (s.status == 0 && (c.status != 0 || c.bytes != wanted)) {
    s.status = c.status != 0 ? c.status : kShort;
    s.failed_piece = piece;
  }
  if (--s.pieces_left == 0) finish(slot);
}

// Where the record differs from the file. The slot is nobody's yet.
int StreamingStore::transform(std::uint32_t slot) noexcept {
  const Slot& s = slots_[slot];
  try {
    layout_.transform(catalog_, s.layer, s.expert, slot_memory(slot));
    return 0;
  } catch (const std::exception&) {
    return EINVAL;
  }
}

// As the pack's index has it, before anybody sees it.
bool StreamingStore::intact(std::uint32_t slot) const noexcept {
  const Slot& s = slots_[slot];
  const ExpertLayer& layer = catalog_.layer(s.layer);
  const auto check = layer.check(s.expert);
  const std::uint64_t offset = layer.expert(s.expert)[0].source.offset;
  return !check || check->passes({slot_memory(slot) + layout_.window_at(s.layer, 0) + offset % io::kDirectAlign, layer.layout.bytes});
}

// All pieces are back: ready, once more, or failed. A failed slot that nobody has pinned is simply free again.
void StreamingStore::finish(std::uint32_t slot) {
  Slot& s = slots_[slot];
  if (s.status == 0 && !intact(slot)) s.status = kBroken;
  if (s.status == 0) s.status = transform(slot);
  if (s.status == 0) {
    s.state = State::Ready;
  } else if (s.attempts < kAttempts && s.pins > 0) {
    queue_reads(slot, io::ReadPriority::Demand);
    submit_queued();
    return;
  } else if (s.pins > 0) {
    s.state = State::Failed;
  } else {
    forget(slot);
    free_.push_back(slot);
  }
  changed_.notify_all();
}

void StreamingStore::drain() {
  io::ReadCompletion done[kCompletionBatch];
  for (std::size_t n; (n = reader_->poll(done)) > 0;)
    for (std::size_t i = 0; i < n; ++i) complete(done[i]);
}

void StreamingStore::wait_for_completion(std::unique_lock<std::mutex>& lock) {
  io::ReadCompletion done[kCompletionBatch];
  lock.unlock();
  const std::size_t n = reader_->wait(done, kPatience);
  if (n == 0) std::this_thread::yield();  // another thread may hold what we wait for
  lock.lock();
  for (std::size_t i = 0; i < n; ++i) complete(done[i]);
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
        if (s.state == State::Loading && s.pieces_left == 0) {  // taken just now, nothing submitted
          forget(slots[k]);
          free_.push_back(slots[k]);
        }
      }
      queued_.clear();
      return false;
    }
    start_load(slot, layer, experts[i]);
    slots_[slot].pins = 1;
    slots[i] = slot;
  }
  for (std::size_t i = 0; i < experts.size(); ++i) {
    Slot& s = slots_[slots[i]];
    if (s.state == State::Loading && s.pieces_left == 0) queue_reads(slots[i], io::ReadPriority::Demand);
    if (s.hinted) {
      s.hinted = false;
      ++stats_.hints_used;
      if (s.state == State::Loading)
        for (std::size_t p = 0; p < catalog_.layer(layer).pieces_per_expert; ++p) reader_->promote(static_cast<std::uint64_t>(slots[i]) * SlotLayout::kMaxPieces + p);
    }
  }
  submit_queued();
  stats_.requests += experts.size();
  stats_.hits += hits;
  return true;
}

bool StreamingStore::try_pin(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket) {
  const std::lock_guard lock(mutex_);
  drain();
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
    if (reader_->outstanding() > 0)
      wait_for_completion(lock);
    else
      changed_.wait_for(lock, kPatience);
  }
  return ticket;
}

bool StreamingStore::ready(std::uint32_t ticket, std::size_t i) noexcept {
  const std::lock_guard lock(mutex_);
  drain();
  return slots_[tickets_[ticket].slots[i]].state != State::Loading;  // a failure is known at once, too
}

bool StreamingStore::hit(std::uint32_t ticket, std::size_t i) noexcept {
  const std::lock_guard lock(mutex_);
  return tickets_[ticket].hits[i] != 0;
}

ExpertView StreamingStore::wait(std::uint32_t ticket, std::size_t i) {
  std::unique_lock lock(mutex_);
  drain();
  const std::uint32_t slot = tickets_[ticket].slots[i];
  while (slots_[slot].state == State::Loading) wait_for_completion(lock);
  const Slot& s = slots_[slot];
  if (s.state == State::Failed) fail(s.status == kBroken ? ErrorCode::InvalidModel : ErrorCode::Io, "{}", failure(s));
  return layout_.view(catalog_, s.layer, s.expert, slot_memory(slot));
}

std::string StreamingStore::failure(const Slot& s) const {
  const format::Extent& x = catalog_.layer(s.layer).expert(s.expert)[s.failed_piece].source;
  const std::string what = s.status == kBroken ? fmt::format("the record {}", kDamaged)
                           : s.status == kShort ? "the file ends early"
                                               : std::generic_category().message(s.status);
  return fmt::format("{}: layer {}, expert {}: cannot read {} bytes at offset {}: {}", file_names_[x.file], raw(s.layer), raw(s.expert), x.bytes, x.offset, what);
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
  drain();
}

void StreamingStore::hint(LayerIdx layer, std::span<const ExpertIdx> experts, float confidence) noexcept {
  const std::lock_guard lock(mutex_);
  drain();
  const double value = policy_.value(layer, confidence);
  for (ExpertIdx e : experts) {
    if (slot_of_[key(layer, e)] >= 0) continue;
    std::uint32_t slot = 0;
    if (!take_slot_for_hint(slot, value)) break;
    start_load(slot, layer, e);
    slots_[slot].hinted = true;
    queue_reads(slot, io::ReadPriority::Hint);
    ++stats_.hints_issued;
  }
  submit_queued();
}

StoreStats StreamingStore::stats() const noexcept {
  const std::lock_guard lock(mutex_);
  return stats_;
}

std::size_t StreamingStore::busy_slots() {
  const std::lock_guard lock(mutex_);
  drain();
  return static_cast<std::size_t>(std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.pins > 0 || s.state == State::Loading; }));
}

}  // namespace moeflux::store
