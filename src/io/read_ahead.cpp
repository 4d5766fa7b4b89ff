#include "io/read_ahead.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/checked.h"

namespace moeflux::io {
namespace {

constexpr std::size_t kMaxParts = 256;
constexpr std::size_t kMaxSlots = 64;  // small jobs: more in flight speeds nothing up
constexpr std::chrono::seconds kPatience{1};

std::size_t n_slots(const ReadAheadOptions& options) {
  return static_cast<std::size_t>(std::clamp<std::uint64_t>(options.memory_bytes / std::max<std::uint64_t>(options.job_bytes, 1), 2, kMaxSlots));
}

}  // namespace

ReadAhead::ReadAhead(std::span<const std::filesystem::path> files, const ReadAheadOptions& options, NextJob next_job)
    : next_job_(std::move(next_job)),
      job_bytes_(round_up(std::max<std::uint64_t>(options.job_bytes, 1), kDirectAlign)),
      slots_(n_slots(options)),
      region_(Region::allocate(mul_or_fail<std::uint64_t>(slots_.size(), job_bytes_, "read-ahead"))) {
  ReaderOptions reader = options.reader;
  reader.max_requests = static_cast<std::uint32_t>(slots_.size() * kMaxParts);
  reader_ = make_reader(files, {region_.span()}, reader);
}

ReadAhead::~ReadAhead() = default;

void ReadAhead::start(std::size_t index) {
  Slot& slot = slots_[index];
  slot.left = slot.parts.size();
  slot.status = 0;
  requests_.clear();
  for (std::size_t p = 0; p < slot.parts.size(); ++p) {
    const ReadPart& part = slot.parts[p];
    ReadRequest r;
    r.file = part.file;
    r.offset = part.offset;
    r.bytes = part.bytes;
    r.window = region_.data() + index * job_bytes_ + part.window_at;
    r.tag = index * kMaxParts + p;
    requests_.push_back(r);
  }
  const bool fits = std::all_of(slot.parts.begin(), slot.parts.end(), [&](const ReadPart& p) {
    const std::uint64_t room = aligned_window(p.offset, p.bytes).bytes;
    return room <= job_bytes_ && p.window_at <= job_bytes_ - room;
  });
  const int status = !fits || slot.parts.size() > kMaxParts ? EINVAL : slot.parts.empty() ? 0 : reader_->submit(requests_);
  if (status == 0) return;
  slot.left = 0;
  slot.status = status;
}

void ReadAhead::complete(const ReadCompletion& done) {
  const std::size_t index = done.tag / kMaxParts, part = done.tag % kMaxParts;
  Slot& slot = slots_[index];
  if (slot.status == 0 && (done.status != 0 || done.bytes != slot.parts[part].bytes)) {
    slot.status = done.status != 0 ? done.status : kEnded;
    slot.failed = part;
  }
  if (--slot.left > 0 || slot.status == 0 || std::exchange(slot.retried, true)) return;
  start(index);
}

bool ReadAhead::next(Job& out) {
  if (std::exchange(lent_, false)) {
    first_ = (first_ + 1) % slots_.size();
    --n_started_;
  }
  while (!ended_ && n_started_ < slots_.size()) {
    const std::size_t index = (first_ + n_started_) % slots_.size();
    slots_[index].parts.clear();
    slots_[index].retried = false;
    if (!next_job_(slots_[index].parts)) {
      ended_ = true;
      break;
    }
    start(index);
    ++n_started_;
  }
  if (n_started_ == 0) return false;
  Slot& slot = slots_[first_];
  ReadCompletion done[64];
  while (slot.left > 0) {
    const std::size_t n = reader_->wait(done, kPatience);
    for (std::size_t i = 0; i < n; ++i) complete(done[i]);
  }
  out = {region_.data() + first_ * job_bytes_, slot.parts, slot.status, slot.failed};
  lent_ = true;
  return true;
}

}  // namespace moeflux::io
