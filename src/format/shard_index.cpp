#include "format/shard_index.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "format/file_name.h"
#include "format/large_json.h"
#include "format/printable.h"

namespace moeflux::format {
namespace {

using simdjson::dom::element;
using simdjson::dom::object;

constexpr std::uint64_t kMaxIndexBytes = 256ull << 20;  // a million tensors take about 100 MiB
constexpr std::size_t kMaxIndexDepth = 64;              // metadata is free-form

// A member of the root; a key that stands there twice is refused.
std::optional<element> find_once(const object& root, std::string_view key, const std::string& path) {
  std::optional<element> found;
  for (const auto field : root) {
    if (field.key != key) continue;
    if (found) fail(ErrorCode::InvalidModel, "{}: key \"{}\" appears twice", path, key);
    found = field.value;
  }
  return found;
}

using NamedShard = std::pair<std::string_view, std::string_view>;  // tensor, shard

std::vector<NamedShard> read_weight_map(const object& root, const std::string& path) {
  const std::optional<element> value = find_once(root, "weight_map", path);
  object map;
  if (!value || value->get(map) != simdjson::SUCCESS)
    fail(ErrorCode::InvalidModel, "{}: \"weight_map\" is missing or not an object", path);
  std::vector<NamedShard> named;
  for (const auto field : map) {
    std::string_view shard;
    if (field.value.get(shard) != simdjson::SUCCESS)
      fail(ErrorCode::InvalidModel, "{}: tensor {}: the shard is not a string", path, in_quotes(field.key));
    if (!plain_file_name(shard))
      fail(ErrorCode::InvalidModel, "{}: tensor {}: shard {} is not a plain file name inside the folder",
           path, in_quotes(field.key), in_quotes(shard));
    named.emplace_back(field.key, shard);
  }
  if (named.empty()) fail(ErrorCode::InvalidModel, "{}: \"weight_map\" names no tensor", path);
  std::sort(named.begin(), named.end());
  const auto same_tensor = [](const NamedShard& a, const NamedShard& b) { return a.first == b.first; };
  const auto twice = std::adjacent_find(named.begin(), named.end(), same_tensor);
  if (twice != named.end())
    fail(ErrorCode::InvalidModel, "{}: tensor {} appears twice in \"weight_map\"", path,
         in_quotes(twice->first));
  return named;
}

std::optional<double> read_total_size(const object& root, const std::string& path) {
  const std::optional<element> value = find_once(root, "metadata", path);
  object metadata;
  if (!value || value->get(metadata) != simdjson::SUCCESS) return std::nullopt;
  const std::optional<element> total = find_once(metadata, "total_size", path);
  double number = 0;
  if (!total || total->get(number) != simdjson::SUCCESS) return std::nullopt;
  return number;
}

}  // namespace

ShardIndex read_shard_index(const io::File& file) {
  const std::string path = file.path().string();
  if (file.size() > kMaxIndexBytes)
    fail(ErrorCode::InvalidModel, "{}: too large: {} bytes, at most {} are accepted", path, file.size(),
         kMaxIndexBytes);
  LargeJson json(file, 0, file.size(), "index");
  const object root = json.parse_object(kMaxIndexDepth);
  const std::vector<NamedShard> named = read_weight_map(root, path);

  std::vector<std::string_view> shards;
  for (const NamedShard& n : named) shards.push_back(n.second);
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());

  ShardIndex index;
  index.shards.assign(shards.begin(), shards.end());
  index.total_size = read_total_size(root, path);
  index.entries.reserve(named.size());
  for (const auto& [tensor, shard] : named) {
    const auto at = std::lower_bound(shards.begin(), shards.end(), shard) - shards.begin();
    index.entries.push_back({std::string(tensor), static_cast<std::uint32_t>(at)});
  }
  return index;
}

}  // namespace moeflux::format
