// What `bench` measured, as a table and as JSON.
#pragma once

#include <moeflux/engine.h>
#include <moeflux/probe.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/common.h"

namespace moeflux::cli {

struct BenchOptions {
  ModelOptions model;
  std::int64_t n_prompt = 512, n_decode = 64, n_repeat = 5;
  std::uint64_t seed = 0;
  bool warm = false;      // leave the page cache alone
  bool no_probe = false;  // leave out what the machine could do
  bool json = false;
};

// Every repetition's number; the middle one and the ends are what is reported.
struct Series {
  std::vector<double> values;
  double low() const;
  double high() const;
  double median() const;
  nlohmann::ordered_json json() const;
};

// The bytes that decoding one token moves through memory at least.
struct TokenBytes {
  double trunk = 0, experts = 0, kv = 0, state = 0;
  double total() const { return trunk + experts + kv + state; }
};

// What prefill or decode did with experts, all repetitions together.
struct PhaseTotals {
  std::int64_t tokens = 0;
  std::uint64_t ns = 0, stall_ns = 0, requests = 0, hits = 0, bytes_read = 0;
  std::uint64_t device_hits = 0, host_hits = 0, disk_misses = 0, bytes_to_device = 0, bytes_to_host = 0, cpu_experts = 0;  // of tiers

  void add(const SessionStats& from, const SessionStats& to, bool decode);
  double seconds() const { return static_cast<double>(ns) / 1e9; }
  double stall_seconds() const { return static_cast<double>(stall_ns) / 1e9; }
  double hit_rate() const { return requests == 0 ? 1 : static_cast<double>(hits) / static_cast<double>(requests); }
  double bytes_per_token() const { return tokens == 0 ? 0 : static_cast<double>(bytes_read) / static_cast<double>(tokens); }
  double per_token(std::uint64_t bytes) const { return tokens == 0 ? 0 : static_cast<double>(bytes) / static_cast<double>(tokens); }
  double rate(std::uint64_t bytes) const { return ns == 0 ? 0 : static_cast<double>(bytes) / seconds(); }
  double disk_rate() const { return ns == 0 ? 0 : static_cast<double>(bytes_read) / seconds(); }
};

struct BenchResult {
  double load_seconds = 0;
  Series prefill, decode;  // tok/s
  PhaseTotals prefill_totals, decode_totals;
  SessionStats stats;  // at the end
  std::uint64_t logits_hash = 0;
  TokenBytes token;
  ProcessMemory memory;
  MemorySplit split;
  std::string engine_line, backend;
  std::int64_t ctx_size = 0;
  std::vector<LayerReads> reads;  // of the last repetition
  MemoryBandwidth bandwidth;
  Series weights_rate;  // bytes per second of threads that only read the weights, just before and after each decode: their mean
  DiskSpeed disk;
  BytesProbe bound;
  GpuDevice gpu;  // where experts are in tiers

  bool tiered() const { return split.device.vram_bytes > 0; }
  // tok/s that link, disk and device memory allow a phase with the bytes it moved, or would have if the processor had computed nothing: the
  // slowest of them; 0: not measured.
  double tier_bound(const PhaseTotals& totals, double memory_bytes) const;
  // The same where no copy starts before its layer's router has spoken and none is hidden: copies and memory one after the other.
  double tier_bound_dependent(const PhaseTotals& totals, double memory_bytes) const;
  double memory_rate() const;  // bytes per second in decode
  double memory_share() const;
  double weights_share() const;  // of weights_rate, repetition by repetition: the median; 0 without it
};

std::string bench_table(const BenchOptions& options, const BenchResult& result);
nlohmann::ordered_json bench_json(const BenchOptions& options, const BenchResult& result);

}  // namespace moeflux::cli
