// Options: plain structs with the defaults a user expects.
#pragma once

#include <moeflux/types.h>

#include <cstdint>
#include <filesystem>
#include <string>

namespace moeflux {

// One sequence.
struct SessionOptions {
  std::int64_t ctx_size = 0;      // positions; 0: the model's limit, at most 4096
  KvType kv = KvType::F32;
  std::int64_t chunk_size = 0;    // tokens of a prompt computed together; 0: the engine's choice. Never changes a result.
  std::filesystem::path trace = {};   // records which experts were chosen (docs/format.md); Session::finish_trace() ends it
  std::filesystem::path replay = {};  // takes the choice of experts from such a file: for measurements only; no prefetch
  bool record_reads = false;      // keeps what every decoded token read, see Session::reads()
};

// How experts are read from disk.
enum class IoKind : std::uint8_t { Auto, Uring, Pread };

// Whether experts are read ahead while decoding, by what the next layer's router makes of this layer's state. Auto: while
// it is measured to pay. Never changes a result.
enum class Prefetch : std::uint8_t { Auto, On, Off };

// Whether the processor computes some of a token's experts beside a device, where they lie in main memory and the device would have to read them
// over its link. Auto: as many as are measured to pay; On: all it may. Never changes a result.
enum class CpuExperts : std::uint8_t { Auto, On, Off };

// Where an engine computes. Auto: on a CUDA device where there is one that holds the trunk and some experts, else on the CPU.
enum class BackendKind : std::uint8_t { Cpu, Cuda, Auto };

// How an engine is opened.
struct EngineOptions {
  std::filesystem::path model;  // a folder with config.json and safetensors
  int n_threads = 0;            // < 1: one per usable core
  std::string isa;              // "" picks the best of this CPU; "amx", "avx512vbmi", "avx512vnni", "avx512", "avx2vnni", "avx2", "neon", "scalar" force one
  Precision precision = Precision::Fast;
  // The ceiling of the whole process: trunk, experts in memory, one session of the `planned` kind, buffers. 0: most of
  // what the machine and its control group have free (default_ram_bytes() in probe.h). With a ceiling too low for all
  // experts they are streamed from disk; one too low for that is OutOfMemory and names the least that would do.
  std::uint64_t ram_bytes = 0;
  SessionOptions planned;       // what the ceiling must leave room for
  IoKind io = IoKind::Auto;
  Prefetch prefetch = Prefetch::Auto;
  BackendKind backend = BackendKind::Cpu;
  int gpu = 0;                  // the CUDA device
  // The ceiling of device memory: trunk, experts, one `planned` session, scratch. 0: what is free. Experts that do not fit are kept
  // in main memory, under ram_bytes, and on disk; one too low for that is OutOfMemory and names the least that would do.
  std::uint64_t vram_bytes = 0;
  CpuExperts cpu_experts = CpuExperts::Auto;
  LogSink log;            // warnings and notes; may be empty
  ProgressSink progress;  // loading; may be empty
};

// How the next token is chosen. temperature 0 is greedy. Steps, in this order: repetition, frequency and presence
// penalties over the last repeat_last_n tokens, top_k, top_p, min_p, temperature, one draw.
struct SamplingParams {
  double temperature = 0.8;
  std::int64_t top_k = 40;          // <= 0: off
  double top_p = 0.95;              // >= 1: off
  double min_p = 0.0;               // <= 0: off
  double repeat_penalty = 1.0;      // > 0; 1: off
  double frequency_penalty = 0.0;
  double presence_penalty = 0.0;
  std::int64_t repeat_last_n = 64;  // 0: no penalties, -1: the whole context
  std::uint64_t seed = 0;           // a seed gives the same text on every run and machine
};

}  // namespace moeflux
