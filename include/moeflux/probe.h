// What this machine gives and what this process takes, for benchmarks and planning.
#pragma once

#include <moeflux/options.h>
#include <moeflux/session.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace moeflux {

struct ProcessMemory {
  std::uint64_t resident_bytes = 0;
  std::uint64_t peak_bytes = 0;  // the most that was ever resident
};
// Zeros where the system does not say.
ProcessMemory process_memory();

// The ceiling an engine keeps to where its options name none: nine tenths of what the machine and the control group of
// this process have free, less a quarter of a gigabyte for everybody else.
std::uint64_t default_ram_bytes();

// Asks the system to forget what it keeps of the folder's weight files, so that the next reads are cold. Throws Io, and
// as Engine::open for a folder without weights.
void drop_model_from_page_cache(const std::filesystem::path& model);

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

}  // namespace moeflux
