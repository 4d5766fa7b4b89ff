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
  // Of the device, where the plan is for one that is here: reading its memory, and copies of pinned main memory to it.
  double device_bytes_per_second = 0, link_bytes_per_second = 0;
};

struct PlanOptions {
  EngineOptions engine;                // model, ram_bytes, planned, threads, precision, backend, gpu, vram_bytes
  std::filesystem::path trace;         // recorded routing to estimate the hit rate from; may be empty
  std::int64_t n_prompt = 512;
};

struct Plan {
  MemorySplit memory;
  MachineSpeed speed;
  // The plan is for a device: trunk and session are in its memory, experts there, in main memory and on disk. all_in_memory: everything is
  // in its memory.
  bool on_device = false;
  std::string device;           // its name; empty: it is not here, and there are no rates
  std::string note;             // why Auto would take the CPU though there is a device; may be empty
  double hit_rate = 0;          // of experts in memory, the device's or main memory
  double device_hit_rate = 0;   // of those on the device
  std::string hit_rate_source;  // where these numbers come from
  // One decoded token: from memory (the device's where there is one), over the link to the device, and from disk.
  double token_memory_bytes = 0, token_link_bytes = 0, token_disk_bytes = 0;
  // tok/s where every layer's reads wait for its router, and where all reads are ahead of it.
  double decode_dependent = 0, decode_ahead = 0;
  double prefill = 0;                           // tok/s of n_prompt tokens
  double prompt_disk_seconds = 0, prompt_compute_seconds = 0;
  std::string decode_limit, prefill_limit;      // "disk", "memory", "link", "arithmetic"

  bool fits() const noexcept { return memory.ram_bytes >= memory.least_bytes && memory.device.vram_bytes >= memory.device.least_bytes; }
};

// Reads config.json, tokenizer.json and headers, and probes disk, memory and arithmetic for about a second. A ceiling that is too low is
// no error: memory.least_bytes tells, and there are no rates then. The plan is for a device where the engine would take one, and where
// vram_bytes are given and there is none: for one with so much memory. Prefill is not estimated for a device. Throws as Engine::open does
// for a folder that cannot be understood or a device that is asked for and cannot be used, and as simulate() for a trace.
Plan plan_model(const PlanOptions& options);

}  // namespace moeflux
