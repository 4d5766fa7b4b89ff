// The index of a pack: what lies where in its files, with a checksum for every piece. docs/format.md describes the bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <moeflux/types.h>

#include "core/hash.h"
#include "io/file.h"
#include "quant/format.h"

namespace moeflux::format {

inline constexpr const char* kPackIndexName = "pack.index";  // makes a folder a pack
// The index while its pack is being written: a folder that has it is none.
inline constexpr const char* kPackUnfinishedName = "pack.unfinished";
inline constexpr const char* kPackTrunkName = "trunk.safetensors";
inline constexpr const char* kPackExpertsName = "experts.bin";
inline constexpr std::uint64_t kPackAlign = 4096;  // of every record, begin and end

// A matrix of every expert of a layer.
struct PackMatrix {
  quant::Format format;
  std::int64_t rows = 0, cols = 0;
  friend bool operator==(const PackMatrix&, const PackMatrix&) = default;
};

// The records of one layer, one after another.
struct PackLayer {
  std::int32_t layer = 0;
  std::uint64_t offset = 0;        // of the first record in experts.bin
  std::uint64_t record_bytes = 0;  // a multiple of kPackAlign
  PackMatrix gate, up, down;
  bool biases = false;          // additive biases behind the matrices
  std::vector<Digest> digests;  // one a record
  friend bool operator==(const PackLayer&, const PackLayer&) = default;

  std::uint64_t bytes() const noexcept { return record_bytes * digests.size(); }
};

// A small file that belongs to the model: configuration, tokenizer.
struct PackedFile {
  std::string name;
  std::uint64_t bytes = 0;
  Digest digest;
  friend bool operator==(const PackedFile&, const PackedFile&) = default;
};

struct PackIndex {
  std::string writer;  // "moeflux 0.1.0"; for people
  std::vector<PackedFile> files;
  std::uint64_t trunk_bytes = 0, trunk_header_bytes = 0;  // of trunk.safetensors; its header with the length in front
  Digest trunk_header;
  std::vector<Digest> trunk;  // one a tensor, in the order of their data
  std::uint64_t experts_bytes = 0;
  std::vector<PackLayer> layers;  // ascending; they tile experts.bin
  friend bool operator==(const PackIndex&, const PackIndex&) = default;

  const PackedFile* find_file(std::string_view name) const noexcept;
  // Of the model: its configuration and its trunk.
  Digest model_id() const;
  std::size_t n_records() const noexcept;
};

// What the digest of a record is seeded with, so that it holds for that model, layer and expert alone.
std::uint64_t record_seed(const Digest& model_id, std::int32_t layer, std::int32_t expert) noexcept;

// The bytes of the file.
std::string write_pack_index(const PackIndex& index);

// Reads and checks the file as hostile input. InvalidModel: not an index, damaged (its own checksum), or its parts do not fit
// each other. Unsupported: a later version. Nothing is allocated beyond a small multiple of the file's size.
PackIndex read_pack_index(const io::File& file);

}  // namespace moeflux::format
