// What this machine gives and what this process takes, for benchmarks, planning and `moeflux doctor`.
#pragma once

#include <moeflux/options.h>
#include <moeflux/session.h>
#include <moeflux/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace moeflux {

struct ProcessMemory {
  std::uint64_t resident_bytes = 0;
  std::uint64_t peak_bytes = 0;  // the most that was ever resident
};
// Zeros where the system does not say.
ProcessMemory process_memory();

// The ceiling an engine keeps to where its options name none: nine tenths of what the machine and the control group of
// this process have free, less a quarter of a gigabyte for everybody else; at most nineteen twentieths of their limit.
std::uint64_t default_ram_bytes();

// Asks the system to forget what it keeps of the folder's weight files, so that the next reads are cold. Throws Io, and
// as Engine::open for a folder without weights.
void drop_model_from_page_cache(const std::filesystem::path& model);

// The processor, the memory and how experts would be read. What the system does not say is empty or 0.
struct MachineReport {
  std::string kernel;
  std::string cpu_name;
  std::vector<std::string> isas;  // kernel sets this CPU can run, best first: the first is what an engine takes
  int n_cpus = 1;                 // that this process may run on
  std::optional<double> cpu_quota;  // cores' worth of time its control group gets
  int n_threads = 1;              // of an engine that is not told otherwise

  std::uint64_t ram_bytes = 0, available_bytes = 0;  // of the machine
  std::optional<std::uint64_t> group_limit_bytes;    // of the control group and those above it, the tightest
  std::optional<std::uint64_t> group_available_bytes;
  std::uint64_t usable_bytes = 0;  // what a process may still take under both
  std::uint64_t page_bytes = 0, huge_page_bytes = 0;
  std::string huge_pages;  // transparent ones: "always", "madvise", "never"

  bool uring = false;
  std::string uring_note;  // why not
};
MachineReport probe_machine();

struct MemoryBandwidth {
  double bytes_per_second = 0;
  std::uint64_t buffer_bytes = 0;
  int n_threads = 0;
};
// Reading with all threads (n_threads < 1: one per usable core) from a buffer far larger than the caches: the
// best of several passes. Takes some tenths of a second and buffer_bytes of memory while it runs.
// OutOfMemory.
MemoryBandwidth probe_memory_bandwidth(int n_threads = 0);

struct DiskSpeed {
  double bytes_per_second = 0;
  bool direct = true;  // false: partly from the page cache, and so no measure of the disk
};
// Direct reads of random places in the model's own weight files for some tenths of a second. Throws as Engine::open.
DiskSpeed probe_disk_speed(const std::filesystem::path& model, IoKind io = IoKind::Auto);

// How fast decoding could be on this machine if arithmetic cost nothing: moves the bytes of given tokens and does nothing
// with them. Trunk, cache and experts that were in memory are read from memory by all threads; experts that were not are
// read from disk, straight from the model's files.
struct BytesProbeOptions {
  std::filesystem::path model;
  int n_threads = 0;
  IoKind io = IoKind::Auto;
  double other_bytes = 0;             // a token reads from memory besides trunk and experts: cache, recurrent state
  std::span<const LayerReads> reads;  // of whole tokens, as Session::reads() gives them
  int n_rounds = 3;
};
struct BytesProbe {
  // tok/s of each round. Dependent: a layer's reads start when its router could be known, what is in memory is read
  // meanwhile. Ahead: the reads of the next layer are under way already.
  std::vector<double> dependent, ahead;
  std::int64_t n_tokens = 0;
  double memory_bytes = 0, disk_bytes = 0;  // of one token
};
// Takes as much memory as a token reads of the trunk, and half a gigabyte. Throws as Engine::open; InvalidArgument: reads
// that do not fit the model.
BytesProbe probe_token_bytes(const BytesProbeOptions& options);

struct DiskRate {
  int depth = 0;  // reads in flight
  double bytes_per_second = 0;
};
struct DiskReport {
  std::filesystem::path path;
  std::string reader;   // "uring" or "pread": what an engine takes for files here
  bool direct = false;  // past the page cache; false: the rates are not the disk's
  std::string note;     // why not io_uring, why not direct
  std::uint64_t read_size = 0;                // of one read
  std::uint64_t n_files = 0, file_bytes = 0;  // read from
  bool temporary = false;                     // a file of our own: there was none large enough
  std::vector<DiskRate> rates;

  double best() const noexcept {
    double most = 0;
    for (const DiskRate& rate : rates) most = most > rate.bytes_per_second ? most : rate.bytes_per_second;
    return most;
  }
};
// Random reads of the large files in a folder (or of one file) at depths 1, 2 and 4, about half a second each.
// A folder without large files gets one of 256 MiB that has no name and is gone afterwards.
// InvalidArgument: there is no such folder or file. Io: it cannot be read, or not written to.
DiskReport probe_disk(const std::filesystem::path& path, const ProgressSink& progress = {});

struct GpuDevice {
  std::string name;
  int index = 0;
  std::string capability;                         // "9.0"
  std::uint64_t total_bytes = 0, free_bytes = 0;  // of its memory; 0: unknown
  // Bytes per second: reading its memory, and copies of pinned main memory, one direction at a time. 0: not measured.
  double memory_bytes_per_second = 0, to_device_bytes_per_second = 0, to_host_bytes_per_second = 0;
  std::string note;  // why an engine cannot use it, or why nothing was measured; may be empty
};
struct GpuReport {
  std::vector<GpuDevice> devices;
  std::string driver, runtime;  // versions of CUDA: what the driver offers, what this build needs; empty without a device
  std::string note;             // why there are none
};
// With rates: measures each for some tenths of a second.
GpuReport probe_gpus(bool rates = true);
// One device; all zero where it cannot be measured.
GpuDevice probe_gpu(int index, bool rates = true);

}  // namespace moeflux
