// model.safetensors.index.json: which shard holds which tensor.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/file.h"

namespace moeflux::format {

struct ShardIndex {
  struct Entry {
    std::string tensor;
    std::uint32_t shard = 0;  // into `shards`
  };
  std::vector<std::string> shards;   // plain file names, sorted, each once
  std::vector<Entry> entries;        // sorted by tensor, each once
  std::optional<double> total_size;  // metadata.total_size, where it is a number
};

// InvalidModel, naming file, tensor and rule: over 256 MiB, not a JSON object, no weight_map or an
// empty one, a tensor named twice, a shard that is not a plain file name. A shard may be a link to
// somewhere else: download caches keep the data apart and link to it, so the name is held to the
// folder and the link is followed.
ShardIndex read_shard_index(const io::File& file);

}  // namespace moeflux::format
