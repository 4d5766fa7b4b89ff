// ModelFolder: a folder that is a pack.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "format/model_folder.h"
#include "io/path.h"

namespace moeflux::format {
namespace {

io::File open_part(const std::filesystem::path& path, std::uint64_t bytes) {
  if (io::path_kind(path) == io::PathKind::Missing) fail(ErrorCode::InvalidModel, "{}: missing from the pack", path.string());
  io::File file = io::File::open(path);
  if (file.size() != bytes)
    fail(ErrorCode::InvalidModel, "{}: {} bytes long, the index of the pack says {}", path.string(), file.size(), bytes);
  return file;
}

bool matches(const std::filesystem::path& path, const PackedFile& want) {
  const io::File file = io::File::open(path);
  if (file.size() != want.bytes) return false;
  std::vector<std::byte> bytes(static_cast<std::size_t>(want.bytes));
  file.read_exact(0, bytes);
  return digest_bytes(bytes) == want.digest;
}

}  // namespace

void ModelFolder::load_pack() {
  pack_ = read_pack_index(io::File::open(path_ / kPackIndexName));
  check_packed_configs();
  open_pack_trunk();
  files_.push_back(open_part(path_ / kPackExpertsName, pack_->experts_bytes));
}

// Every record is bound to config.json, so another one means another model. generation_config.json is a matter of taste.
void ModelFolder::check_packed_configs() {
  if (!matches(path_ / "config.json", *pack_->find_file("config.json")))
    fail(ErrorCode::InvalidModel, "{}: not the one that was packed: it does not match its checksum", config_origin_);
  const PackedFile* generation = pack_->find_file("generation_config.json");
  if (generation == nullptr || io::path_kind(path_ / generation->name) == io::PathKind::Missing) return;
  if (!matches(path_ / generation->name, *generation))
    warnings_.push_back(fmt::format("{}: changed since it was packed", (path_ / generation->name).string()));
}

void ModelFolder::open_pack_trunk() {
  io::File file = open_part(path_ / kPackTrunkName, pack_->trunk_bytes);
  const std::string name = file.path().string();
  if (pack_->trunk_header_bytes > kMaxHeaderBytes + 8)
    fail(ErrorCode::InvalidModel, "{}: a header of {} bytes is over the limit", name, pack_->trunk_header_bytes);
  std::vector<std::byte> start(static_cast<std::size_t>(pack_->trunk_header_bytes));
  file.read_exact(0, start);
  if (digest_bytes(start) != pack_->trunk_header) fail(ErrorCode::InvalidModel, "{}: its header does not match its checksum", name);
  SafetensorsHeader header = read_safetensors_header(file);
  if (header.tensors.size() != pack_->trunk.size())
    fail(ErrorCode::InvalidModel, "{}: {} tensors, the index of the pack has checksums of {}", name, header.tensors.size(), pack_->trunk.size());
  if (const auto it = header.metadata.find("format"); it != header.metadata.end()) writer_format_ = it->second;
  for (TensorInfo& info : header.tensors) tensors_.push_back({std::move(info), kPackTrunkFile});
  files_.push_back(std::move(file));
  sort_names();
}

const Digest* ModelFolder::digest(const Extent& tensor) const noexcept {
  if (!pack_ || tensor.file != kPackTrunkFile) return nullptr;
  const auto key = std::pair(tensor.offset, tensor.bytes);
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), key, [](const FolderTensor& t, const auto& wanted) {
    return std::pair(t.info.offset, t.info.bytes) < wanted;
  });
  if (at == tensors_.end() || std::pair(at->info.offset, at->info.bytes) != key) return nullptr;
  return &pack_->trunk[static_cast<std::size_t>(at - tensors_.begin())];
}

}  // namespace moeflux::format
