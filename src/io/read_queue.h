// The bookkeeping both readers share: requests cut into pieces, two priorities, completions.
//
// Not thread-safe: the reader's lock protects it. No allocation after construction. The reader takes pieces
// with next(), reads them however it can, and reports each with finish().
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "io/async_reader.h"

namespace moeflux::io {

// A read in flight. The reader reads [offset, end) of the file to `target`.
struct ReadPiece {
  std::uint32_t file = 0;
  std::uint64_t offset = 0, end = 0;
  std::byte* target = nullptr;
  bool retried = false;  // the system was too busy, or said so

  std::uint64_t bytes() const noexcept { return end - offset; }

 private:
  friend class ReadQueue;
  std::uint32_t request = 0;
  std::uint32_t n_retries = 0;
  std::uint64_t reached = 0;  // the file position up to which data has come
  bool hint = false;
};

class ReadQueue {
 public:
  ReadQueue(const ReaderOptions& options, std::size_t n_files, MemoryRegions regions, std::uint32_t depth);

  int submit(std::span<const ReadRequest> requests) noexcept;  // as AsyncReader::submit
  // The next piece to read, or null: nothing may be issued now.
  ReadPiece* next() noexcept;
  // `result` as of pread: bytes, or a negative errno. True: the piece is to be read again (it has moved on).
  // False: it is done with, the pointer is dead.
  bool finish(ReadPiece* piece, std::int64_t result) noexcept;

  std::size_t take(std::span<ReadCompletion> out) noexcept;
  std::size_t cancel_hints(const std::uint64_t* tag) noexcept;  // null: all
  std::size_t promote(std::uint64_t tag) noexcept;
  void drop_queued() noexcept;  // everything that is not in flight; without completions

  bool has_completions() const noexcept { return n_done_ != 0; }
  std::size_t outstanding() const noexcept { return n_live_; }
  std::size_t in_flight() const noexcept { return n_in_flight_; }
  ReaderStats stats() const noexcept;

 private:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

  struct Request {
    ReadRequest wanted;
    std::uint64_t cursor = 0, end = 0;  // what is left to be issued, aligned
    std::uint64_t begin = 0;            // of the window in the file
    std::uint64_t reached = 0;          // the file's end, where a piece met it
    std::uint64_t submitted_ns = 0;
    std::uint32_t in_flight = 0;
    int status = 0;
    std::uint64_t failed_at = 0;  // position of the failed piece: the first in the file is the one reported
    bool queued = false;
    std::uint32_t previous = kNone, next = kNone;  // in its list, or the list of free ones
  };
  struct List {
    std::uint32_t first = kNone, last = kNone;
  };

  bool valid(const ReadRequest& request) const noexcept;
  void append(List& list, std::uint32_t index) noexcept;
  void unlink(std::uint32_t index) noexcept;
  List& list_of(const Request& request) noexcept;
  bool again(ReadPiece& piece, std::int64_t result) noexcept;
  void release(ReadPiece* piece) noexcept;
  void complete_if_idle(std::uint32_t index) noexcept;
  void complete(std::uint32_t index) noexcept;
  void free_request(std::uint32_t index) noexcept;

  const std::uint64_t piece_bytes_;
  const std::uint32_t hint_depth_;
  const std::size_t n_files_;
  const MemoryRegions regions_;
  std::vector<Request> requests_;
  std::uint32_t free_request_ = kNone;
  List demand_, hint_;
  std::vector<ReadPiece> pieces_;
  std::vector<ReadPiece*> free_pieces_;
  std::vector<ReadCompletion> done_;  // a ring: one place per request, so it cannot overflow
  std::size_t done_first_ = 0, n_done_ = 0;
  std::size_t n_live_ = 0;
  std::uint32_t n_in_flight_ = 0, n_hints_in_flight_ = 0;
  std::uint64_t busy_since_ = 0;
  ReaderStats stats_;
};

}  // namespace moeflux::io
