// Reading a long list of file parts in order, several ahead of whoever uses them, past the page cache: how whole models are
// copied and checked at the speed of the disk in little memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "io/async_reader.h"
#include "io/region.h"

namespace moeflux::io {

// Bytes of a file that go to a window (see async_reader.h) of a job's memory.
struct ReadPart {
  std::uint32_t file = 0;
  std::uint64_t offset = 0, bytes = 0;
  std::uint64_t window_at = 0;  // a multiple of kDirectAlign
};

struct ReadAheadOptions {
  std::uint64_t job_bytes = 0;                // memory of one job: room for all its windows
  std::uint64_t memory_bytes = 64u << 20;     // of all jobs under way; at least two are
  ReaderOptions reader = {};
};

// A job is a list of parts that are wanted together; jobs come back in the order they were named. One thread at a time.
class ReadAhead {
 public:
  // Writes the parts of the next job (at most 256) into the empty vector; false: there are no more. Called from next().
  using NextJob = std::function<bool(std::vector<ReadPart>&)>;

  struct Job {
    std::byte* memory = nullptr;
    std::span<const ReadPart> parts;
    int status = 0;          // 0; an errno value, after one more attempt; kEnded: the file ends early
    std::size_t failed = 0;  // the part that did
    // The wanted bytes of a part.
    std::span<std::byte> data(std::size_t part) const noexcept {
      return {memory + parts[part].window_at + parts[part].offset % kDirectAlign, static_cast<std::size_t>(parts[part].bytes)};
    }
  };
  static constexpr int kEnded = -1;

  // Throws as make_reader and Region::allocate do.
  ReadAhead(std::span<const std::filesystem::path> files, const ReadAheadOptions& options, NextJob next_job);
  ~ReadAhead();

  // The next job, whole or failed; its memory is the caller's until the call after. False: no more.
  bool next(Job& out);

 private:
  struct Slot {
    std::vector<ReadPart> parts;
    std::size_t left = 0;  // parts under way
    int status = 0;
    std::size_t failed = 0;
    bool retried = false;
  };

  void start(std::size_t slot);
  void complete(const ReadCompletion& done);

  NextJob next_job_;
  const std::uint64_t job_bytes_;
  std::vector<Slot> slots_;  // a ring: [first_, first_ + n_started_)
  std::size_t first_ = 0, n_started_ = 0;
  bool lent_ = false;  // the first slot is the caller's
  bool ended_ = false;
  std::vector<ReadRequest> requests_;
  Region region_;
  std::unique_ptr<AsyncReader> reader_;  // last: stops before the memory goes
};

}  // namespace moeflux::io
