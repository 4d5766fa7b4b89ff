#include "io/read_queue.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/clock.h"
#include "core/error.h"

namespace moeflux::io {
namespace {

constexpr std::uint64_t kMaxOffset = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
constexpr std::uint64_t kNotReached = std::numeric_limits<std::uint64_t>::max();
// A signal or a busy kernel passes. What lasts longer is an error like any other.
constexpr std::uint32_t kMaxRetries = 10000;
// Demand reads in flight beside which hints may go out: the last ones leave a disk partly idle.
constexpr std::uint32_t kLastDemand = 2;

bool is_passing(std::int64_t result) noexcept {
  // ECANCELED: the thread that submitted the read has ended; the read itself is as wanted as before.
  return result == -EINTR || result == -EAGAIN || result == -ECANCELED;
}

}  // namespace

ReadQueue::ReadQueue(const ReaderOptions& options, std::size_t n_files, MemoryRegions regions,
                     std::uint32_t depth)
    : piece_bytes_(options.piece_bytes),
      hint_depth_(options.hint_depth),
      n_files_(n_files),
      regions_(std::move(regions)),
      requests_(options.max_requests),
      pieces_(depth),
      done_(options.max_requests) {
  for (std::uint32_t i = options.max_requests; i-- > 0;) {
    requests_[i].next = free_request_;
    free_request_ = i;
  }
  free_pieces_.reserve(depth);
  for (ReadPiece& piece : pieces_) free_pieces_.push_back(&piece);
}

bool ReadQueue::valid(const ReadRequest& request) const noexcept {
  if (request.file >= n_files_) return false;
  if (request.offset > kMaxOffset - 2 * kDirectAlign) return false;
  if (request.bytes > kMaxOffset - 2 * kDirectAlign - request.offset) return false;
  if (request.bytes == 0) return true;
  const auto address = reinterpret_cast<std::uintptr_t>(request.window);
  if (address % kDirectAlign != 0) return false;
  const std::uint64_t room = aligned_window(request.offset, request.bytes).bytes;
  return std::any_of(regions_.begin(), regions_.end(), [&](const std::span<std::byte>& region) {
    const auto begin = reinterpret_cast<std::uintptr_t>(region.data());
    return address >= begin && address - begin <= region.size() && room <= region.size() - (address - begin);
  });
}

int ReadQueue::submit(std::span<const ReadRequest> requests) noexcept {
  for (const ReadRequest& request : requests)
    if (!valid(request)) return EINVAL;
  if (requests.size() > requests_.size() - n_live_ - n_done_) return EAGAIN;
  const std::uint64_t now = now_ns();
  for (const ReadRequest& wanted : requests) {
    const std::uint32_t index = free_request_;
    Request& request = requests_[index];
    free_request_ = request.next;
    const AlignedWindow window = aligned_window(wanted.offset, wanted.bytes);
    request = Request{};
    request.wanted = wanted;
    request.begin = request.cursor = window.offset;
    request.end = window.offset + (wanted.bytes == 0 ? 0 : window.bytes);
    request.reached = request.failed_at = kNotReached;
    request.submitted_ns = now;
    ++n_live_;
    ++stats_.requests;
    if (wanted.priority == ReadPriority::Hint) ++stats_.hints;
    if (wanted.bytes == 0) {
      complete(index);
    } else {
      append(list_of(request), index);
    }
  }
  return 0;
}

ReadPiece* ReadQueue::next() noexcept {
  std::uint32_t index = demand_.first;
  const bool idle = n_in_flight_ - n_hints_in_flight_ <= kLastDemand;
  if (index == kNone && idle && n_hints_in_flight_ < hint_depth_) index = hint_.first;
  if (index == kNone || free_pieces_.empty()) return nullptr;

  ReadPiece* const piece = free_pieces_.back();
  free_pieces_.pop_back();
  Request& request = requests_[index];
  *piece = ReadPiece{};
  piece->request = index;
  piece->file = request.wanted.file;
  piece->offset = request.cursor;
  piece->end = std::min(request.end, request.cursor + piece_bytes_);
  piece->target = request.wanted.window + (request.cursor - request.begin);
  piece->reached = piece->offset;
  piece->hint = request.wanted.priority == ReadPriority::Hint;
  request.cursor = piece->end;
  ++request.in_flight;
  if (request.cursor == request.end) unlink(index);

  if (n_in_flight_++ == 0) busy_since_ = now_ns();
  if (piece->hint) ++n_hints_in_flight_;
  ++stats_.pieces;
  stats_.max_in_flight = std::max(stats_.max_in_flight, n_in_flight_);
  return piece;
}

// Whether more of the piece can come; if not, what is missing has been noted in its request.
bool ReadQueue::again(ReadPiece& piece, std::int64_t result) noexcept {
  Request& request = requests_[piece.request];
  if (is_passing(result) && piece.n_retries < kMaxRetries) {
    ++piece.n_retries;
    piece.retried = true;
    return true;
  }
  if (result < 0) {
    if (piece.offset < request.failed_at) {
      request.failed_at = piece.offset;
      request.status = static_cast<int>(-result);
    }
    return false;
  }
  const auto got = static_cast<std::uint64_t>(result);
  stats_.bytes_moved += got;
  const std::uint64_t position = piece.offset + std::min(got, piece.bytes());
  const std::uint64_t needed = std::min(piece.end, request.wanted.offset + request.wanted.bytes);
  if (position >= needed) return false;
  if (position > piece.reached) {
    // Direct reads go on at a block only, so the last one is read once more; no progress then means the end.
    piece.reached = position;
    const std::uint64_t block = position - position % kDirectAlign;
    piece.target += block - piece.offset;
    piece.offset = block;
    return true;
  }
  request.reached = std::min(request.reached, piece.reached);
  return false;
}

bool ReadQueue::finish(ReadPiece* piece, std::int64_t result) noexcept {
  if (again(*piece, result)) {
    ++stats_.retries;
    return true;
  }
  release(piece);
  return false;
}

void ReadQueue::release(ReadPiece* piece) noexcept {
  const std::uint32_t index = piece->request;
  Request& request = requests_[index];
  --request.in_flight;
  if (piece->hint) --n_hints_in_flight_;
  free_pieces_.push_back(piece);
  if (--n_in_flight_ == 0) stats_.busy_ns += now_ns() - busy_since_;
  // What is left of a request that failed or met the end of the file cannot make it whole.
  const bool hopeless = request.status != 0 || request.reached != kNotReached;
  if (hopeless && request.queued) unlink(index);
  complete_if_idle(index);
}

void ReadQueue::complete_if_idle(std::uint32_t index) noexcept {
  const Request& request = requests_[index];
  if (!request.queued && request.in_flight == 0) complete(index);
}

void ReadQueue::complete(std::uint32_t index) noexcept {
  const Request& request = requests_[index];
  const ReadRequest& wanted = request.wanted;
  ReadCompletion completion{.tag = wanted.tag, .status = request.status, .bytes = wanted.bytes};
  if (completion.status != 0) {
    completion.bytes = 0;
  } else if (request.reached != kNotReached) {
    const std::uint64_t after = request.reached - std::min(request.reached, wanted.offset);
    completion.bytes = std::min(wanted.bytes, after);
    ++stats_.short_reads;
  }
  if (completion.status == ECANCELED) {
    ++stats_.cancelled;
  } else {
    ++stats_.completed;
    if (completion.status != 0) ++stats_.failed;
    stats_.bytes += completion.bytes;
    stats_.latency_ns += now_ns() - request.submitted_ns;
  }
  done_[(done_first_ + n_done_) % done_.size()] = completion;
  ++n_done_;
  free_request(index);
}

void ReadQueue::free_request(std::uint32_t index) noexcept {
  requests_[index].next = free_request_;
  free_request_ = index;
  --n_live_;
}

std::size_t ReadQueue::take(std::span<ReadCompletion> out) noexcept {
  const std::size_t n = std::min(out.size(), n_done_);
  for (std::size_t i = 0; i < n; ++i) {
    out[i] = done_[done_first_];
    done_first_ = (done_first_ + 1) % done_.size();
  }
  n_done_ -= n;
  return n;
}

std::size_t ReadQueue::cancel_hints(const std::uint64_t* tag) noexcept {
  std::size_t n = 0;
  for (std::uint32_t index = hint_.first; index != kNone;) {
    Request& request = requests_[index];
    const std::uint32_t following = request.next;
    if (tag == nullptr || request.wanted.tag == *tag) {
      unlink(index);
      request.status = ECANCELED;
      request.failed_at = 0;
      complete_if_idle(index);
      ++n;
    }
    index = following;
  }
  return n;
}

std::size_t ReadQueue::promote(std::uint64_t tag) noexcept {
  std::size_t n = 0;
  for (std::uint32_t index = hint_.first; index != kNone;) {
    Request& request = requests_[index];
    const std::uint32_t following = request.next;
    if (request.wanted.tag == tag) {
      unlink(index);
      request.wanted.priority = ReadPriority::Demand;
      append(demand_, index);
      ++n;
    }
    index = following;
  }
  return n;
}

void ReadQueue::drop_queued() noexcept {
  for (List* list : {&demand_, &hint_}) {
    while (list->first != kNone) {
      const std::uint32_t index = list->first;
      unlink(index);
      if (requests_[index].in_flight == 0) free_request(index);
    }
  }
}

ReadQueue::List& ReadQueue::list_of(const Request& request) noexcept {
  return request.wanted.priority == ReadPriority::Hint ? hint_ : demand_;
}

void ReadQueue::append(List& list, std::uint32_t index) noexcept {
  Request& request = requests_[index];
  request.queued = true;
  request.next = kNone;
  request.previous = list.last;
  (list.last == kNone ? list.first : requests_[list.last].next) = index;
  list.last = index;
}

void ReadQueue::unlink(std::uint32_t index) noexcept {
  Request& request = requests_[index];
  List& list = list_of(request);
  (request.previous == kNone ? list.first : requests_[request.previous].next) = request.next;
  (request.next == kNone ? list.last : requests_[request.next].previous) = request.previous;
  request.queued = false;
}

ReaderStats ReadQueue::stats() const noexcept {
  ReaderStats stats = stats_;
  if (n_in_flight_ != 0) stats.busy_ns += now_ns() - busy_since_;
  return stats;
}

}  // namespace moeflux::io
