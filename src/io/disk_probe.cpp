#include <algorithm>
#include <system_error>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "io/file.h"
#include "io/machine.h"
#include "io/region.h"

namespace moeflux::io {
namespace {

// SplitMix64: places to read need no better.
std::uint64_t next_random(std::uint64_t& state) noexcept {
  state += 0x9E3779B97F4A7C15u;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Requests laid over the files one after the other, so that large files are read more often than small ones.
class Places {
 public:
  Places(std::span<const std::filesystem::path> files, const DiskProbeOptions& options)
      : request_bytes_(options.request_bytes), state_(options.seed) {
    for (const std::filesystem::path& path : files) {
      const std::uint64_t size = File::open(path).size();
      sizes_.push_back(size);
      total_ += requests_in(size);
      ends_.push_back(total_);
    }
    if (total_ == 0) fail(ErrorCode::InvalidArgument, "the disk cannot be probed: there is nothing to read");
  }

  ReadRequest next(std::byte* window, std::uint64_t tag) {
    const std::uint64_t chosen = next_random(state_) % total_;
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), chosen);
    const auto file = static_cast<std::size_t>(end - ends_.begin());
    const std::uint64_t index = chosen - (file == 0 ? 0 : ends_[file - 1]);
    ReadRequest request;
    request.file = static_cast<std::uint32_t>(file);
    request.offset = index * request_bytes_;
    request.bytes = std::min(request_bytes_, sizes_[file] - request.offset);
    request.window = window;
    request.tag = tag;
    return request;
  }

 private:
  std::uint64_t requests_in(std::uint64_t size) const {
    return size == 0 ? 0 : std::max<std::uint64_t>(size / request_bytes_, 1);
  }

  std::uint64_t request_bytes_;
  std::uint64_t state_;
  std::uint64_t total_ = 0;
  std::vector<std::uint64_t> sizes_, ends_;
};

}  // namespace

DiskProbe probe_disk(std::span<const std::filesystem::path> files, const DiskProbeOptions& options) {
  if (options.depth == 0 || options.request_bytes == 0 || options.request_bytes % kDirectAlign != 0)
    fail(ErrorCode::InvalidArgument, "a disk probe of {} reads of {} bytes cannot be", options.depth,
         options.request_bytes);
  Places places(files, options);
  const Region region = Region::allocate(options.depth * options.request_bytes);
  ReaderOptions reader_options;
  reader_options.kind = options.reader;
  reader_options.max_requests = options.depth;
  const std::unique_ptr<AsyncReader> reader = make_reader(files, {region.span()}, reader_options);
  const ReaderInfo info = reader->info();

  DiskProbe probe{.reader = info.kind, .direct = info.n_direct == info.n_files};
  const std::uint64_t start = now_ns();
  const auto limit = static_cast<std::uint64_t>(std::clamp(options.seconds, 0.0, 3600.0) * 1e9);
  const auto submit = [&](std::uint64_t slot) {
    const ReadRequest request = places.next(region.data() + slot * options.request_bytes, slot);
    if (const int status = reader->submit({&request, 1}); status != 0)
      fail(ErrorCode::Internal, "the reader refused a probe: {}", std::generic_category().message(status));
  };
  for (std::uint64_t slot = 0; slot < options.depth; ++slot) submit(slot);
  std::vector<ReadCompletion> done(options.depth);
  while (const std::size_t n = reader->wait(done, std::chrono::seconds(60))) {
    for (std::size_t i = 0; i < n; ++i) {
      if (done[i].status != 0)
        fail(ErrorCode::Io, "probing the disk: {}", std::generic_category().message(done[i].status));
      probe.bytes += done[i].bytes;
      if (now_ns() - start < limit) submit(done[i].tag);
    }
  }
  probe.seconds = static_cast<double>(now_ns() - start) / 1e9;
  return probe;
}

}  // namespace moeflux::io
