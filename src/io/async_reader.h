// Many reads in flight, past the page cache: the way expert records come from disk.
//
// A reader serves a fixed set of files and fixed memory regions. submit() queues requests, poll() and wait()
// hand back one completion for each. All members are thread-safe, none throws, none allocates after
// construction.
//
// Direct reads move whole blocks of kDirectAlign bytes to memory aligned alike, while tensors lie at any byte
// of a file. So a request names the exact bytes it wants and a *window* of memory: aligned, with room for the
// blocks that enclose those bytes. The first wanted byte lands at window + skew:
//
//     const AlignedWindow w = aligned_window(offset, bytes);   // w.bytes of room; data at window + w.skew
//
// What lands in the window outside the wanted bytes is unspecified. Requests in flight must not share memory.
// From submit() to its completion a window belongs to the reader; once the completion is out (whatever its
// status) nothing writes there again.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moeflux::io {

// A multiple of the block size of every disk we know of, and the page size of most machines.
inline constexpr std::uint64_t kDirectAlign = 4096;

// The blocks that enclose the bytes [offset, offset + bytes).
struct AlignedWindow {
  std::uint64_t offset = 0;  // of the first block in the file
  std::uint64_t bytes = 0;   // of all blocks: the room a window needs
  std::uint64_t skew = 0;    // of the first wanted byte inside the window
};

constexpr AlignedWindow aligned_window(std::uint64_t offset, std::uint64_t bytes) noexcept {
  const std::uint64_t skew = offset % kDirectAlign;
  return {offset - skew, (skew + bytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign, skew};
}

// Demand: somebody waits. Hint: issued only while no demand request is queued and hardly any is in flight, a few
// at a time, and can be cancelled.
enum class ReadPriority : std::uint8_t { Demand, Hint };

struct ReadRequest {
  std::uint32_t file = 0;  // index among the reader's files
  ReadPriority priority = ReadPriority::Demand;
  std::uint64_t offset = 0, bytes = 0;  // any; zero bytes complete at once
  std::byte* window = nullptr;          // aligned to kDirectAlign, inside one of the reader's regions
  std::uint64_t tag = 0;                // the caller's; need not be unique
};

struct ReadCompletion {
  std::uint64_t tag = 0;
  // 0, or an errno value; ECANCELED: a hint that was cancelled. On an error the window's content is
  // unspecified.
  int status = 0;
  // The wanted bytes that are in the window, counted from the first. Fewer than asked for with status 0: the
  // file ended there.
  std::uint64_t bytes = 0;
};

struct ReaderStats {
  std::uint64_t requests = 0, hints = 0;       // submitted; requests counts both
  std::uint64_t completed = 0, cancelled = 0;  // cancelled ones are not among the completed
  std::uint64_t failed = 0, short_reads = 0;   // completions with an error; ended early
  std::uint64_t pieces = 0,
                retries = 0;        // reads given to the system; again after EINTR, EAGAIN, a short read
  std::uint64_t bytes = 0;          // wanted and delivered
  std::uint64_t bytes_moved = 0;    // whole blocks, as the disk sees it
  std::uint64_t busy_ns = 0;        // time with at least one piece in flight
  std::uint64_t latency_ns = 0;     // from submit to completion, summed over completed requests
  std::uint32_t max_in_flight = 0;  // pieces
};

enum class ReaderKind : std::uint8_t { Auto, Uring, Pread };

struct ReaderOptions {
  ReaderKind kind = ReaderKind::Auto;
  // Reads in flight at once. A disk is busy at a depth of 2 to 4 large reads; the rest is room for a whole
  // layer's misses to be in the kernel's hands, where they proceed while nobody polls.
  std::uint32_t depth = 128;
  // Of them hints: what a demand read may have to queue behind. A layer's worth: nobody polls while the next mixer runs, so
  // what is to be read meanwhile must be in the kernel's hands before.
  std::uint32_t hint_depth = 96;
  std::uint32_t n_threads = 8;   // of the pread pool, which is its depth
  // Larger requests are split. A multiple of kDirectAlign. The kernel splits further for the device; smaller
  // pieces only cost more calls (measured: 0.5 MiB 7.8, 1 MiB 8.5 to 8.9, whole records of 1.7 MB 8.6 to 9.1
  // GB/s).
  std::uint64_t piece_bytes = 2 * 1024 * 1024;
  std::uint32_t max_requests = 8192;  // submitted and not yet handed back
  bool direct = true;                 // false: through the page cache
  bool register_memory = true;        // pin the regions in the kernel (all their pages at once)
};

// What the reader turned out to be, for the statistics and for people.
struct ReaderInfo {
  ReaderKind kind = ReaderKind::Pread;
  std::uint32_t depth = 0;
  bool registered_memory = false, registered_files = false;
  std::size_t n_files = 0, n_direct = 0;  // files read past the page cache
  std::string note;                       // why something asked for is not so; empty: all is
};

class AsyncReader {
 public:
  // Drops what is queued and returns when nothing is in flight any more.
  virtual ~AsyncReader() = default;

  // All or none. 0; EAGAIN: more than max_requests would be outstanding; EINVAL: a request with an unknown
  // file, a window misaligned or outside the regions, or bytes beyond what a file can hold.
  [[nodiscard]] virtual int submit(std::span<const ReadRequest> requests) noexcept = 0;

  // Takes finished requests, up to out.size(), without waiting. 0: none.
  virtual std::size_t poll(std::span<ReadCompletion> out) noexcept = 0;
  // The same, waiting for the first. 0: the time is over, or nothing is outstanding.
  virtual std::size_t wait(std::span<ReadCompletion> out, std::chrono::nanoseconds timeout) noexcept = 0;

  // Hints with this tag, or all, that are not wholly issued complete with ECANCELED. Returns how many.
  virtual std::size_t cancel(std::uint64_t tag) noexcept = 0;
  virtual std::size_t cancel_hints() noexcept = 0;
  // Queued hints with this tag become demand requests. Returns how many.
  virtual std::size_t promote(std::uint64_t tag) noexcept = 0;

  // Submitted and not yet completed; completions that nobody took do not count.
  virtual std::size_t outstanding() const noexcept = 0;
  virtual ReaderStats stats() const noexcept = 0;
  virtual ReaderInfo info() const = 0;
};

using MemoryRegions = std::vector<std::span<std::byte>>;

// Files are opened here and stay open; regions must outlive the reader. Auto takes io_uring where it works,
// else the pread pool, and says why in info().note. Throws Io (a file cannot be opened), Unsupported (the
// kind asked for does not work here, with the reason), InvalidArgument (options).
std::unique_ptr<AsyncReader> make_reader(std::span<const std::filesystem::path> files,
                                         const MemoryRegions& regions, const ReaderOptions& options);

struct ReaderProbe {
  bool uring = false;   // io_uring read the file's first block
  bool direct = false;  // past the page cache
  std::string note;     // why not
};

// Tries io_uring and one direct read. Throws Io when the file cannot be opened or read at all.
ReaderProbe probe_reader(const std::filesystem::path& path);

std::string_view reader_kind_name(ReaderKind kind) noexcept;  // "auto", "uring", "pread"

}  // namespace moeflux::io
