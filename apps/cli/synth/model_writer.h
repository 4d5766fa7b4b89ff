// Writes a planned model into a folder: shards, index, configuration, tokenizer.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cli/synth/plan.h"
#include "io/new_folder.h"

namespace moeflux::cli::synth {

// One safetensors file: tensors [first, last) of the plan.
struct Shard {
  std::string file;
  std::string header;  // with its length in front
  std::size_t first = 0, last = 0;
  std::uint64_t bytes = 0;  // of the file
};

// Tensors in order, a new file before one would grow beyond shard_bytes; a tensor is never cut.
std::vector<Shard> cut_shards(const Plan& plan, std::uint64_t shard_bytes);
// Of all files: weights and the small ones (their size within some kB).
std::uint64_t total_bytes(const std::vector<Shard>& shards);

// Called after each block with the bytes written so far; may throw to stop.
using WriteProgress = std::function<void(std::uint64_t done)>;
// config.json comes last: without it nothing takes the folder for a model.
void write_model(io::NewFolder& folder, const Plan& plan, const std::vector<Shard>& shards,
                 const WriteProgress& progress);
// The same files with headers and sizes but without data: what is not written are holes that take no room.
void write_headers(io::NewFolder& folder, const Plan& plan, const std::vector<Shard>& shards);

}  // namespace moeflux::cli::synth
