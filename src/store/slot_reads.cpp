#include "store/slot_reads.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "core/error.h"

namespace moeflux::store {
namespace {

constexpr std::uint8_t kAttempts = 2;  // a failed read is retried once

}  // namespace

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

SlotReads::SlotReads(const ExpertCatalog& catalog, const SlotLayout& layout, std::vector<std::string> file_names, std::span<std::byte> memory,
                     std::size_t n_slots, const MakeReader& make_reader, Done done)
    : catalog_(catalog), layout_(layout), file_names_(std::move(file_names)), memory_(memory), done_(std::move(done)), loads_(n_slots) {
  std::size_t most = 0;
  for (const ExpertLayer& l : catalog.layers) most = std::max(most, l.pieces_per_expert);
  queued_.reserve(std::min<std::size_t>(n_slots * most, 4096));
  submitted_.reserve(queued_.capacity());
  if (std::any_of(catalog.layers.begin(), catalog.layers.end(), [](const ExpertLayer& l) { return l.n_experts > 0 && l.check(ExpertIdx(0)); })) {
    checks_ = std::make_unique<CheckQueue>(n_slots);
    verdicts_.reserve(n_slots);
  }
  reader_ = make_reader({memory});
}

bool SlotReads::may_retry(std::uint32_t slot) const noexcept { return loads_[slot].attempts < kAttempts; }

void SlotReads::queue(std::uint32_t slot, io::ReadPriority priority) {
  Load& s = loads_[slot];
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
    r.window = memory(slot) + layout_.window_at(s.layer, p);
    r.tag = tag(slot, p);
    queued_.push_back(r);
    bytes_read_ += r.bytes;
  }
}

// done() may queue and submit: that joins the batch at hand.
void SlotReads::submit() {
  if (submitting_) return;
  submitting_ = true;
  while (!queued_.empty()) {
    const int status = reader_->submit(queued_);
    submitted_.swap(queued_);
    queued_.clear();
    if (status == 0) continue;
    for (const io::ReadRequest& r : submitted_) {  // refused as a whole: every piece has failed
      const auto slot = static_cast<std::uint32_t>(r.tag / SlotLayout::kMaxPieces);
      loads_[slot].attempts = kAttempts;
      if (loads_[slot].status == 0) loads_[slot].status = status;
      if (--loads_[slot].pieces_left == 0) all_back(slot);
    }
  }
  submitting_ = false;
}

void SlotReads::promote(std::uint32_t slot) noexcept {
  for (std::size_t p = 0; p < catalog_.layer(loads_[slot].layer).pieces_per_expert; ++p) reader_->promote(tag(slot, p));
}

void SlotReads::complete(const io::ReadCompletion& c) {
  const auto slot = static_cast<std::uint32_t>(c.tag / SlotLayout::kMaxPieces);
  const std::size_t piece = c.tag % SlotLayout::kMaxPieces;
  Load& s = loads_[slot];
  const std::uint64_t wanted = catalog_.layer(s.layer).expert(s.expert)[piece].source.bytes;
  if (s.status == 0 && (c.status != 0 || c.bytes != wanted)) {
    s.status = c.status != 0 ? c.status : kShort;
    s.failed_piece = piece;
  }
  if (--s.pieces_left == 0) all_back(slot);
}

// Where the record differs from the file. The slot is nobody's yet.
int SlotReads::transform(std::uint32_t slot) noexcept {
  const Load& s = loads_[slot];
  try {
    layout_.transform(catalog_, s.layer, s.expert, memory(slot));
    return 0;
  } catch (const std::exception&) {
    return EINVAL;
  }
}

// A record of a pack is what its index says, before anybody sees it.
void SlotReads::all_back(std::uint32_t slot) {
  Load& s = loads_[slot];
  const ExpertLayer& layer = catalog_.layer(s.layer);
  const auto check = layer.check(s.expert);
  if (s.status != 0 || !check) return finish(slot);
  const std::uint64_t offset = layer.expert(s.expert)[0].source.offset;
  s.checking = true;
  checks_->add({slot, {memory(slot) + layout_.window_at(s.layer, 0) + offset % io::kDirectAlign, layer.layout.bytes}, *check});
}

void SlotReads::take_verdicts() {
  if (!checks_) return;
  std::vector<CheckQueue::Verdict> now;  // done() may come back here
  now.swap(verdicts_);
  checks_->take(now);
  for (const CheckQueue::Verdict& v : now) {
    loads_[v.slot].checking = false;
    if (!v.good) loads_[v.slot].status = kBroken;
    finish(v.slot);
  }
  verdicts_.swap(now);
}

void SlotReads::settle() {
  while (checks_ && checks_->pending() > 0) {
    checks_->help(std::chrono::seconds(1));
    take_verdicts();
  }
}

void SlotReads::finish(std::uint32_t slot) {
  Load& s = loads_[slot];
  if (s.status == 0) s.status = transform(slot);
  done_(slot, s.status == 0);
}

std::size_t SlotReads::wait(Completions& out, std::chrono::nanoseconds patience) noexcept {
  if (const std::size_t n = reader_->poll(out); n > 0) return n;
  if (checks_ && checks_->help(patience)) return 0;
  return reader_->wait(out, patience);
}

void SlotReads::drain() {
  Completions done;
  for (std::size_t n; (n = reader_->poll(done)) > 0;)
    for (const io::ReadCompletion& c : std::span(done, n)) complete(c);
  if (checks_) checks_->wake(0);
  take_verdicts();
}

void SlotReads::take(std::span<const io::ReadCompletion> completions) {
  for (const io::ReadCompletion& c : completions) complete(c);
  if (checks_) checks_->wake(1);  // who has waited for these computes one
  take_verdicts();
}

SlotReads::Failure SlotReads::failure(std::uint32_t slot) const noexcept {
  const Load& s = loads_[slot];
  return {s.layer, s.expert, s.failed_piece, s.status};
}

void SlotReads::raise(const Failure& f) const {
  const format::Extent& x = catalog_.layer(f.layer).expert(f.expert)[f.piece].source;
  const std::string what = f.status == kBroken ? fmt::format("the record {}", kDamaged)
                           : f.status == kShort ? "the file ends early"
                                               : std::generic_category().message(f.status);
  fail(f.status == kBroken ? ErrorCode::InvalidModel : ErrorCode::Io, "{}: layer {}, expert {}: cannot read {} bytes at offset {}: {}",
       file_names_[x.file], raw(f.layer), raw(f.expert), x.bytes, x.offset, what);
}

}  // namespace moeflux::store
