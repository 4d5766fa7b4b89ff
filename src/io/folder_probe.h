// How fast the disk under a folder is read, the way experts are.
#pragma once

#include <moeflux/types.h>

#include <cstdint>
#include <filesystem>
#include <vector>

#include "io/async_reader.h"
#include "io/machine.h"

namespace moeflux::io {

struct FolderProbeOptions {
  std::vector<std::uint32_t> depths = {1, 2, 4};
  double seconds = 0.4;                                    // for each depth
  std::uint64_t request_bytes = 2 * 1024 * 1024;           // about an expert; smaller files are left alone
  std::uint64_t temporary_bytes = std::uint64_t{1} << 28;  // where nothing large enough is there
};

struct FolderProbe {
  ReaderProbe reader;
  std::uint64_t n_files = 0, file_bytes = 0;  // read from
  bool temporary = false;                     // one of our own
  std::vector<DiskProbe> rates;               // one for each depth
};

// Reads random places of the files in the folder (or of the file `path`) that hold at least one request and
// have no holes. Where there are none it writes a file of random bytes that has no name, so nothing is ever
// left behind. `progress` may be empty.
// InvalidArgument: nothing stands at the path, or no folder or file. Io: it cannot be read, or
// not written to.
FolderProbe probe_folder(const std::filesystem::path& path, const FolderProbeOptions& options,
                         const ProgressSink& progress);

}  // namespace moeflux::io
