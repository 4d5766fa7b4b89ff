#include "format/model_folder.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "format/printable.h"
#include "format/shard_index.h"
#include "io/path.h"

namespace moeflux::format {
namespace {

constexpr std::uint64_t kMaxConfigBytes = 16ull << 20;
constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::size_t kMaxListed = 5;  // names in one message

// "a, b, c and 7 more"
std::string list_names(const std::vector<std::string>& names) {
  const std::size_t shown = std::min(names.size(), kMaxListed);
  std::string out = fmt::format("{}", fmt::join(std::span(names).first(shown), ", "));
  if (shown < names.size()) out += fmt::format(" and {} more", names.size() - shown);
  return out;
}

void check_folder(const std::filesystem::path& path) {
  switch (io::path_kind(path)) {
    case io::PathKind::Folder:
      return;
    case io::PathKind::Missing:
      fail(ErrorCode::InvalidArgument, "{}: no such folder", path.string());
    default:
      fail(ErrorCode::InvalidArgument,
           "{}: not a folder; a model is a folder with config.json and safetensors", path.string());
  }
}

Json load_object(const std::filesystem::path& path) {
  Json json = parse_json(io::read_text_file(path, kMaxConfigBytes), path.string());
  if (!json.is_object()) fail(ErrorCode::InvalidModel, "{}: not a JSON object", path.string());
  return json;
}

// Files of the folder that look like weights.
std::vector<std::string> weight_files(const std::filesystem::path& path, std::string_view prefix) {
  std::vector<std::string> out;
  for (std::string& name : io::list_folder(path))
    if (name.starts_with(prefix) && name.ends_with(".safetensors")) out.push_back(in_quotes(name));
  return out;
}

[[noreturn]] void no_weights(const std::filesystem::path& path) {
  const std::vector<std::string> others = weight_files(path, "");
  fail(ErrorCode::InvalidModel, "{}: no weights: looked for {} and {}{}", path.string(), kIndexName,
       kSingleName, others.empty() ? std::string() : "; found only " + list_names(others));
}

}  // namespace

ModelFolder ModelFolder::open(const std::filesystem::path& path) {
  check_folder(path);
  ModelFolder folder;
  folder.path_ = path;
  if (io::path_kind(path / kPackUnfinishedName) != io::PathKind::Missing)
    fail(ErrorCode::InvalidModel, "{}: an unfinished pack: whoever wrote it was stopped; remove it and pack again", path.string());
  folder.load_configs();
  if (io::path_kind(path / kPackIndexName) != io::PathKind::Missing) {
    folder.load_pack();
  } else {
    folder.load_weights();
  }
  return folder;
}

void ModelFolder::load_configs() {
  const std::filesystem::path config = path_ / "config.json";
  if (io::path_kind(config) == io::PathKind::Missing)
    fail(ErrorCode::InvalidModel, "{}: no config.json: not a Hugging Face or MLX model folder",
         path_.string());
  config_ = std::make_shared<const Json>(load_object(config));
  config_origin_ = config.string();
  const std::filesystem::path generation = path_ / "generation_config.json";
  generation_config_ = std::make_shared<const Json>(io::path_kind(generation) == io::PathKind::Missing ? Json::object() : load_object(generation));
}

void ModelFolder::load_weights() {
  const std::filesystem::path index_path = path_ / kIndexName;
  std::vector<std::string> used;
  if (io::path_kind(index_path) != io::PathKind::Missing) {
    const ShardIndex index = read_shard_index(io::File::open(index_path));
    open_files(index.shards);
    check_against(index, index_path.string());
    used = index.shards;
  } else {
    if (io::path_kind(path_ / kSingleName) == io::PathKind::Missing) no_weights(path_);
    used.emplace_back(kSingleName);
    open_files(used);
  }
  for (std::string& name : used) name = in_quotes(name);
  std::vector<std::string> unused;
  for (const std::string& name : weight_files(path_, "model"))
    if (std::find(used.begin(), used.end(), name) == used.end()) unused.push_back(name);
  if (!unused.empty())
    warnings_.push_back(fmt::format("{}: not used: {}", path_.string(), list_names(unused)));
}

void ModelFolder::open_files(const std::vector<std::string>& names) {
  std::vector<std::string> missing;
  for (const std::string& name : names)
    if (io::path_kind(path_ / name) == io::PathKind::Missing) missing.push_back(in_quotes(name));
  if (!missing.empty())
    fail(ErrorCode::InvalidModel, "{}: {} of {} shards missing: {}", path_.string(), missing.size(),
         names.size(), list_names(missing));

  std::string format_from;
  for (const std::string& name : names) {
    io::File file = io::File::open(path_ / name);
    SafetensorsHeader header = read_safetensors_header(file);
    const auto number = static_cast<std::uint32_t>(files_.size());
    for (TensorInfo& info : header.tensors) tensors_.push_back({std::move(info), number});
    if (const auto it = header.metadata.find("format"); it != header.metadata.end() && !it->second.empty()) {
      if (!writer_format_.empty() && writer_format_ != it->second)
        fail(ErrorCode::InvalidModel, "{}: __metadata__ format is {}, but {} in {}", file.path().string(),
             in_quotes(it->second), in_quotes(writer_format_), format_from);
      writer_format_ = it->second;
      format_from = name;
    }
    files_.push_back(std::move(file));
  }
  sort_names();
}

// A sorted list, not a hash table: the names are chosen by whoever wrote the files.
void ModelFolder::sort_names() {
  by_name_.resize(tensors_.size());
  std::iota(by_name_.begin(), by_name_.end(), std::size_t{0});
  std::sort(by_name_.begin(), by_name_.end(),
            [&](std::size_t a, std::size_t b) { return tensors_[a].info.name < tensors_[b].info.name; });
  for (std::size_t i = 1; i < by_name_.size(); ++i) {
    const FolderTensor& a = tensors_[by_name_[i - 1]];
    const FolderTensor& b = tensors_[by_name_[i]];
    if (a.info.name == b.info.name)
      fail(ErrorCode::InvalidModel, "{}: tensor {} is also in {}",
           files_[std::max(a.file, b.file)].path().string(), in_quotes(a.info.name),
           files_[std::min(a.file, b.file)].path().filename().string());
  }
}

void ModelFolder::check_against(const ShardIndex& index, const std::string& origin) {
  for (const ShardIndex::Entry& entry : index.entries) {
    const FolderTensor* tensor = find(entry.tensor);
    if (tensor != nullptr && tensor->file == entry.shard) continue;
    const std::string elsewhere = tensor == nullptr
                                      ? std::string()
                                      : fmt::format(" (it is in {})", in_quotes(index.shards[tensor->file]));
    fail(ErrorCode::InvalidModel, "{}: tensor {} is not in its shard {}{}", origin, in_quotes(entry.tensor),
         in_quotes(index.shards[entry.shard]), elsewhere);
  }
  std::vector<std::string> extra;
  std::uint64_t total = 0;  // cannot overflow: extents of files that exist
  auto entry = index.entries.begin();
  for (const std::size_t at : by_name_) {
    const TensorInfo& info = tensors_[at].info;
    total += info.bytes;
    if (entry != index.entries.end() && entry->tensor == info.name) {
      ++entry;
    } else {
      extra.push_back(in_quotes(info.name));
    }
  }
  if (!extra.empty())
    warnings_.push_back(fmt::format("{}: {} tensors of the shards are not in the index: {}", origin,
                                    extra.size(), list_names(extra)));
  if (index.total_size && *index.total_size != static_cast<double>(total))
    warnings_.push_back(
        fmt::format("{}: total_size is {:.0f}, the tensors take {} bytes", origin, *index.total_size, total));
}

const FolderTensor* ModelFolder::find(std::string_view name) const {
  const auto it = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [&](std::size_t at, std::string_view wanted) { return tensors_[at].info.name < wanted; });
  if (it == by_name_.end() || tensors_[*it].info.name != name) return nullptr;
  return &tensors_[*it];
}

}  // namespace moeflux::format
