#include <algorithm>
#include <array>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "io/async_reader.h"
#include "io/readers.h"

namespace moeflux::io {
namespace {

void check_options(const ReaderOptions& options) {
  // 4096 entries is what the kernel's ring takes; beyond 1024 a disk gains nothing.
  if (options.depth == 0 || options.depth > 1024)
    fail(ErrorCode::InvalidArgument, "reads in flight: {} is not within 1 to 1024", options.depth);
  if (options.n_threads == 0 || options.n_threads > 256)
    fail(ErrorCode::InvalidArgument, "threads for reading: {} is not within 1 to 256", options.n_threads);
  if (options.piece_bytes == 0 || options.piece_bytes % kDirectAlign != 0 ||
      options.piece_bytes > (std::uint64_t{1} << 30))
    fail(ErrorCode::InvalidArgument, "a read of {} bytes is not a multiple of {} up to 1 GiB",
         options.piece_bytes, kDirectAlign);
  if (options.max_requests == 0 || options.max_requests > (1U << 24))
    fail(ErrorCode::InvalidArgument, "{} outstanding requests are not within 1 to 2^24",
         options.max_requests);
}

// One block of the first file by io_uring itself: a ring that can be made may still refuse to read. Empty: it
// works.
std::string try_uring(const std::filesystem::path& path, bool& direct, std::string& direct_note) {
  std::vector<DirectFile> files;
  files.push_back(DirectFile::open(path, true));
  direct = files[0].direct;
  direct_note = files[0].note;
  const std::uint64_t wanted = std::min<std::uint64_t>(files[0].file.size(), kDirectAlign);
  alignas(kDirectAlign) std::array<std::byte, kDirectAlign> block{};
  ReaderOptions options;
  options.depth = 1;
  options.max_requests = 1;
  options.register_memory = false;
  std::string why;
  const std::unique_ptr<AsyncReader> reader = make_uring_reader(files, {std::span(block)}, options, why);
  if (reader == nullptr) return why;
  const ReadRequest request{.offset = 0, .bytes = kDirectAlign, .window = block.data()};
  ReadCompletion completion;
  if (reader->submit({&request, 1}) != 0) return "io_uring takes no read";
  if (reader->wait({&completion, 1}, std::chrono::seconds(10)) != 1)
    return "a read by io_uring does not come back";
  if (completion.status != 0)
    return "a read by io_uring failed: " + std::generic_category().message(completion.status);
  return completion.bytes == wanted ? "" : "a read by io_uring is incomplete";
}

}  // namespace

ReaderInfo describe_files(const std::vector<DirectFile>& files) {
  ReaderInfo info;
  info.n_files = files.size();
  for (const DirectFile& file : files) {
    if (file.direct) ++info.n_direct;
    if (info.note.empty()) info.note = file.note;  // one of a kind is enough
  }
  return info;
}

ReaderProbe probe_reader(const std::filesystem::path& path) {
  ReaderProbe probe;
  std::string direct_note;
  probe.note = try_uring(path, probe.direct, direct_note);
  probe.uring = probe.note.empty();
  if (!direct_note.empty()) probe.note += (probe.note.empty() ? "" : "; ") + direct_note;
  return probe;
}

std::unique_ptr<AsyncReader> make_reader(std::span<const std::filesystem::path> paths,
                                         const MemoryRegions& regions, const ReaderOptions& options) {
  check_options(options);
  std::vector<DirectFile> files;
  for (const std::filesystem::path& path : paths) files.push_back(DirectFile::open(path, options.direct));
  if (options.kind == ReaderKind::Pread || files.empty())
    return make_pread_reader(files, regions, options, {});

  bool direct = false;
  std::string ignored;
  std::string why = try_uring(paths[0], direct, ignored);
  if (why.empty()) {
    if (auto reader = make_uring_reader(files, regions, options, why)) return reader;
  }
  if (options.kind == ReaderKind::Uring) fail(ErrorCode::Unsupported, "{}", why);
  return make_pread_reader(files, regions, options, why);
}

std::string_view reader_kind_name(ReaderKind kind) noexcept {
  switch (kind) {
    case ReaderKind::Auto:
      return "auto";
    case ReaderKind::Uring:
      return "uring";
    case ReaderKind::Pread:
      return "pread";
  }
  return "";
}

}  // namespace moeflux::io
