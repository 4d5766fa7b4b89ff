// What writing and verifying a pack share: reading many bytes in order.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <moeflux/options.h>

#include "format/model_folder.h"
#include "io/read_ahead.h"

namespace moeflux::engine {

io::ReadAheadOptions read_ahead(IoKind io, std::uint64_t job_bytes);

// Extents cut into jobs of one part each; the jobs of an extent follow each other and none spans two.
class ChunkList {
 public:
  static constexpr std::uint64_t kChunkBytes = 4u << 20;
  // A chunk that starts anywhere in a block.
  static constexpr std::uint64_t kJobBytes = kChunkBytes + io::kDirectAlign;

  void add(const format::Extent& extent) { extents_.push_back(extent); }
  bool next(std::vector<io::ReadPart>& parts);  // as ReadAhead::NextJob

 private:
  std::vector<format::Extent> extents_;
  std::size_t at_ = 0;
  std::uint64_t done_ = 0;  // of that extent
};

// "cannot read 4096 bytes at offset 0: Input/output error".
std::string read_failure(const io::ReadAhead::Job& job);

}  // namespace moeflux::engine
