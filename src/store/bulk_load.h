// Brings many runs of file bytes into memory at disk speed: neighbours in a file are read together, past the page cache, several
// reads in flight, and copied to their places by a few threads while the next are being read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "core/buffer.h"
#include "format/model_folder.h"
#include "store/record_check.h"

namespace moeflux::store {

struct BulkRead {
  format::Extent source;
  std::byte* to = nullptr;  // where the copier brings it
  std::uint64_t id = 0;     // the caller's
  std::optional<RecordCheck> check = {};  // what its bytes must hash to
};

struct BulkHooks {
  std::function<void(std::uint64_t bytes)> progress;         // bytes done so far, on the calling thread; may be empty
  std::function<void(std::uint64_t id)> arrived;             // a read is in place and checked; any thread; may be empty
  std::function<std::string(std::uint64_t id)> describe;     // "layer 3, expert 7: ", to begin a message with; any thread; may be empty
};

// Returns when everything is in place; `reads` come back in file order. Destinations must not overlap; the copier is called from
// several threads. A read that fails or does not match its checksum is tried once more through the page cache; then Io or
// InvalidModel (checksum) naming the file.
void bulk_load(const format::ModelFolder& folder, std::span<BulkRead> reads, Copier& copier, const BulkHooks& hooks = {});

}  // namespace moeflux::store
