// Packs: a model rewritten once so that every expert is one aligned, checksummed read. A pack is a folder and is opened as
// any model is; nothing is requantized, and results are the same bytes.
#pragma once

#include <moeflux/options.h>
#include <moeflux/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace moeflux {

// What a pack will take.
struct PackPlan {
  std::uint64_t trunk_bytes = 0;   // file of the dense part
  std::uint64_t expert_bytes = 0;  // file of the records
  std::uint64_t other_bytes = 0;   // configuration, tokenizer, index
  std::uint64_t free_bytes = 0;    // where it is to go, for this user
  std::int64_t n_records = 0;
  std::int64_t n_tensors = 0;    // of the trunk
  std::int64_t n_left_out = 0;   // tensors that the model does not read

  std::uint64_t total_bytes() const noexcept { return trunk_bytes + expert_bytes + other_bytes; }
};

struct PackOptions {
  std::filesystem::path model;  // a folder with config.json and safetensors
  std::filesystem::path out;    // the folder to make; must not exist
  IoKind io = IoKind::Auto;
  // Once, before anything large is written. All three may throw to stop; what has been written is removed then.
  std::function<void(const PackPlan&)> on_plan;
  ProgressSink progress;  // bytes
  LogSink log;            // warnings about the model; leftovers of an earlier attempt that were removed
};

struct PackResult {
  PackPlan plan;
  std::string model_id;  // 32 hex digits: what every record is bound to
};

// Writes beside `out` under a temporary name, syncs and renames: `out` is whole or not there. Takes about 100 MB of memory (more
// for experts beyond 30 MB). InvalidArgument: `out` exists or is being written by another process, `model` is a pack already. Io: no
// room, or the system refused. InvalidModel, Unsupported, as Engine::open.
PackResult pack_model(const PackOptions& options);

struct VerifyOptions {
  std::filesystem::path pack;
  IoKind io = IoKind::Auto;
  std::function<void(std::string_view)> on_fault;  // each, as it is found
  ProgressSink progress;  // bytes; may throw to stop
};

struct VerifyResult {
  std::uint64_t bytes = 0;     // read
  std::int64_t n_records = 0;  // checked, damaged ones included
  std::int64_t n_faults = 0;
};

// Reads every byte of a pack and compares it with its checksum. Goes on after a fault, so that all are named; a damaged index is
// one fault and ends it. InvalidArgument: not a pack. Unsupported: a later version.
VerifyResult verify_pack(const VerifyOptions& options);

}  // namespace moeflux
