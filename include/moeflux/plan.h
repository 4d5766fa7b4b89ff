// What a model will take of this machine and what it will give, before anything is loaded.
#pragma once

#include <moeflux/options.h>

#include <cstdint>
#include <filesystem>
#include <string>

namespace moeflux {

// How a device's memory is divided where it does not hold all experts. Bytes.
struct DeviceSplit {
  std::uint64_t vram_bytes = 0;  // the ceiling; 0: no device, or all is in its memory
  std::uint64_t trunk_bytes = 0, session_bytes = 0;
  std::uint64_t other_bytes = 0;  // the runtime, scratch memory, a margin
  std::uint64_t slot_bytes = 0, n_slots = 0;  // for experts
  std::uint64_t n_spare = 0;      // slots that experts only pass through
  std::uint64_t least_bytes = 0;  // the lowest ceiling that works
  std::uint64_t fixed_bytes() const noexcept { return trunk_bytes + session_bytes + other_bytes; }
};

// How a memory ceiling is divided. Bytes.
struct MemorySplit {
  std::uint64_t ram_bytes = 0;    // the ceiling
  std::uint64_t trunk_bytes = 0;
  std::uint64_t kv_bytes = 0, state_bytes = 0, activation_bytes = 0;  // of one session
  std::uint64_t other_bytes = 0;  // code, tokenizer, buffers, a margin
  std::uint64_t expert_bytes = 0; // slots, or all records
  std::uint64_t slot_bytes = 0;
  std::uint64_t n_slots = 0, n_experts = 0;  // experts in memory, of all
  std::uint64_t least_bytes = 0;  // the lowest ceiling that works
  std::int64_t ctx_size = 0, chunk_size = 0;
  bool all_in_memory = false;
  DeviceSplit device;             // trunk and session are in its memory, not in this, where there is one
  std::uint64_t n_staging = 0;    // with a device: experts on their way from disk, counted in other_bytes

  std::uint64_t session_bytes() const noexcept { return kv_bytes + state_bytes + activation_bytes; }
  std::uint64_t fixed_bytes() const noexcept { return trunk_bytes + session_bytes() + other_bytes; }
  double cached_share() const noexcept {
    return n_experts == 0 ? 1.0 : static_cast<double>(n_slots) / static_cast<double>(n_experts);
  }
};

// What a quick look at the machine found.
struct MachineSpeed {
  double memory_bytes_per_second = 0;  // reading with all threads
  double disk_bytes_per_second = 0;    // direct reads of the model's own files
  bool disk_direct = true;             // false: partly from the page cache, so the disk may be slower
  double operations_per_second = 0;    // of the model's own kind of matrices, many tokens at a time
  int n_threads = 0;
};

struct PlanOptions {
  EngineOptions engine;                // model, ram_bytes, planned, threads, precision
  std::filesystem::path trace;         // recorded routing to estimate the hit rate from; may be empty
  std::int64_t n_prompt = 512;
};

struct Plan {
  MemorySplit memory;
  MachineSpeed speed;
  double hit_rate = 0;
  std::string hit_rate_source;  // where that number comes from
  // One decoded token: from memory, of that experts, and from disk.
  double token_memory_bytes = 0, token_disk_bytes = 0;
  // tok/s where every layer's reads wait for its router, and where all reads are ahead of it.
  double decode_dependent = 0, decode_ahead = 0;
  double prefill = 0;                           // tok/s of n_prompt tokens
  double prompt_disk_seconds = 0, prompt_compute_seconds = 0;
  std::string decode_limit, prefill_limit;      // "disk", "memory", "arithmetic"
};

// Reads config.json, tokenizer.json and headers, and probes disk, memory and arithmetic for about a second. A ceiling that is too low is
// no error: memory.least_bytes tells, and there are no rates then. Throws as Engine::open does for a folder that cannot be
// understood, and as simulate() for a trace.
Plan plan_model(const PlanOptions& options);

}  // namespace moeflux
