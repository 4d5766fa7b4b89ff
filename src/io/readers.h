// The two readers, behind make_reader().
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "io/async_reader.h"
#include "io/direct_file.h"

namespace moeflux::io {

// Clocks overflow when more than this is added to now.
inline constexpr std::chrono::nanoseconds kForever = std::chrono::hours(24 * 365);

// Both take the files over only when they succeed. Null: io_uring does not work here, and `why` says so.
std::unique_ptr<AsyncReader> make_uring_reader(std::vector<DirectFile>& files, const MemoryRegions& regions,
                                               const ReaderOptions& options, std::string& why);
// `note` goes to info(): why it is this reader. Throws OutOfMemory when threads cannot be started.
std::unique_ptr<AsyncReader> make_pread_reader(std::vector<DirectFile>& files, const MemoryRegions& regions,
                                               const ReaderOptions& options, std::string note);

// Fills what both know.
ReaderInfo describe_files(const std::vector<DirectFile>& files);

}  // namespace moeflux::io
