// What this machine offers: memory, cores, disk. Read from the system's own files; nothing here needs
// privileges.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "io/async_reader.h"

namespace moeflux::io {

// The control group this process lives in, with the limits of the groups above it. What has no limit is
// absent.
struct CgroupInfo {
  std::optional<std::uint64_t> memory_limit;      // the tightest
  std::optional<std::uint64_t> memory_available;  // below all limits, counting clean file pages as free
  std::uint64_t memory_usage = 0;                 // of the own group, file pages included
  std::optional<double> cpu_quota;                // cores' worth of time, the tightest
};

struct MachineInfo {
  std::string cpu_name;  // as the system has it; empty: unknown
  std::string kernel;    // its release; empty: unknown
  std::uint64_t ram_total = 0, ram_available = 0;
  CgroupInfo cgroup;
  std::uint32_t n_allowed_cpus = 1;  // by affinity
  std::uint32_t n_cores = 1;         // of them as many as the quota pays for; at least one
  std::uint64_t page_bytes = 4096;
  std::uint64_t huge_page_bytes = 0;  // 0: unknown
  std::string huge_pages;             // transparent ones: "always", "madvise", "never"; empty: unknown

  // What a process may still take: the smaller of the machine's and the group's.
  std::uint64_t usable_memory() const noexcept;
  // The ceiling of both.
  std::uint64_t memory_limit() const noexcept;
};

// `root` stands for "/": tests give a folder with proc and sys of their own. What cannot be read stays at its
// default. Affinity and page size are always those of this process.
MachineInfo probe_machine(const std::filesystem::path& root = "/");

// Of this process. Zeros where the system does not say.
struct ProcessMemory {
  std::uint64_t resident = 0, peak_resident = 0;  // VmRSS, VmHWM
};
ProcessMemory process_memory();

struct DiskProbeOptions {
  ReaderKind reader = ReaderKind::Auto;
  std::uint32_t depth = 4;                        // requests in flight
  std::uint64_t request_bytes = 2 * 1024 * 1024;  // a multiple of kDirectAlign
  double seconds = 0.3;
  std::uint64_t seed = 1;
};

struct DiskProbe {
  ReaderKind reader = ReaderKind::Pread;
  bool direct = false;  // false: partly from the page cache, and so no measure of the disk
  std::uint64_t bytes = 0;
  double seconds = 0;
  double bytes_per_second() const noexcept { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
};

// Reads random places of these files for about that long. Files without a whole request are read from their
// start. Throws Io when a file cannot be opened or read, InvalidArgument when there is nothing to read.
DiskProbe probe_disk(std::span<const std::filesystem::path> files, const DiskProbeOptions& options);

// Asks the system to forget the clean pages of a file, so that the next reads are cold. Throws Io.
void drop_from_page_cache(const std::filesystem::path& path);

}  // namespace moeflux::io
