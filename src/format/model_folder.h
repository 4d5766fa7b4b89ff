// A model as users have it: a Hugging Face or MLX folder with config.json and safetensors, or a pack of one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json_fwd.h"
#include "core/tensor_view.h"
#include "format/pack_index.h"
#include "format/safetensors.h"
#include "io/file.h"

namespace moeflux::format {

struct ShardIndex;

// A run of bytes in one of a folder's files.
struct Extent {
  std::uint32_t file = 0;  // index for ModelFolder::file()
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

// A tensor and where it lies.
struct FolderTensor {
  TensorInfo info;
  std::uint32_t file = 0;
  Extent extent() const { return {file, info.offset, info.bytes}; }
};

// Opens the folder, reads config.json and every safetensors header; tensor data is not read. Weights are
// the shards of model.safetensors.index.json where there is one, else model.safetensors.
// Immutable afterwards; shared by all who read from it. Every shard stays open.
//
// A pack has the trunk's tensors in its first file and the experts' records, which are no tensors, in its second; the index
// says where they are and has a checksum for each piece. Index, config.json and the trunk's header are checked here, the data
// by whoever reads it.
class ModelFolder {
 public:
  // InvalidArgument: the path does not exist or is not a folder. InvalidModel: no config.json, no
  // weights, a missing shard, an index that names a path outside the folder, a tensor missing from
  // its shard or present in two, and every rule of read_safetensors_header; a pack that is unfinished or whose files do not
  // match its index. Io: the system refused.
  static ModelFolder open(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept { return path_; }
  // The parsed config.json (root object).
  const Json& config() const noexcept { return *config_; }
  // ".../config.json", to start messages about it.
  const std::string& config_origin() const noexcept { return config_origin_; }
  // generation_config.json, or an empty object.
  const Json& generation_config() const noexcept { return *generation_config_; }

  // nullptr when absent.
  const FolderTensor* find(std::string_view name) const;
  // By file, and in a file in the order of the data.
  const std::vector<FolderTensor>& tensors() const noexcept { return tensors_; }
  // __metadata__.format of the shards ("mlx", "pt"), or empty; shards that disagree are InvalidModel.
  const std::string& writer_format() const noexcept { return writer_format_; }

  // nullptr: not a pack.
  const PackIndex* pack() const noexcept { return pack_ ? &*pack_ : nullptr; }
  static constexpr std::uint32_t kPackTrunkFile = 0, kPackExpertsFile = 1;
  // The checksum of a tensor that lies there; nullptr when there is none: not a pack.
  const Digest* digest(const Extent& tensor) const noexcept;

  const io::File& file(std::uint32_t index) const { return files_[index]; }
  std::size_t n_files() const noexcept { return files_.size(); }

  // Things worth telling once: tensors the index does not name (they are kept), an index total_size that
  // differs, model*.safetensors files that are not used. For the log.
  const std::vector<std::string>& warnings() const noexcept { return warnings_; }

 private:
  void load_configs();
  void load_weights();
  void load_pack();
  void check_packed_configs();
  void open_pack_trunk();
  void open_files(const std::vector<std::string>& names);
  void sort_names();
  void check_against(const ShardIndex& index, const std::string& origin);

  std::filesystem::path path_;
  std::shared_ptr<const Json> config_;  // never null once open
  std::string config_origin_;
  std::shared_ptr<const Json> generation_config_;
  std::vector<io::File> files_;
  std::vector<FolderTensor> tensors_;
  std::vector<std::size_t> by_name_;  // into tensors_, sorted by name
  std::string writer_format_;
  std::optional<PackIndex> pack_;
  std::vector<std::string> warnings_;
};

}  // namespace moeflux::format
