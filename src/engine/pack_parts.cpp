#include "engine/pack_parts.h"

#include <algorithm>
#include <system_error>

#include <fmt/format.h>

#include "engine/expert_setup.h"

namespace moeflux::engine {

io::ReadAheadOptions read_ahead(IoKind io, std::uint64_t job_bytes) {
  io::ReadAheadOptions options;
  options.job_bytes = job_bytes;
  options.reader.kind = reader_kind(io);
  return options;
}

bool ChunkList::next(std::vector<io::ReadPart>& parts) {
  while (at_ < extents_.size() && done_ == extents_[at_].bytes) {
    ++at_;
    done_ = 0;
  }
  if (at_ == extents_.size()) return false;
  const format::Extent& x = extents_[at_];
  const std::uint64_t n = std::min(kChunkBytes, x.bytes - done_);
  parts.push_back({x.file, x.offset + done_, n, 0});
  done_ += n;
  return true;
}

std::string read_failure(const io::ReadAhead::Job& job) {
  const io::ReadPart& part = job.parts[job.failed];
  return fmt::format("cannot read {} bytes at offset {}: {}", part.bytes, part.offset,
                     job.status == io::ReadAhead::kEnded ? "the file ends early" : std::generic_category().message(job.status));
}

}  // namespace moeflux::engine
