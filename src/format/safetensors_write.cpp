#include <algorithm>

#include "core/checked.h"
#include "core/error.h"
#include "core/json.h"
#include "format/large_json.h"
#include "format/printable.h"
#include "format/safetensors.h"

namespace moeflux::format {
namespace {

std::string json_text(std::string_view text) { return Json(text).dump(); }

std::uint64_t checked_bytes(const TensorInfo& tensor, const std::string& path) {
  const auto refuse = [&](std::string_view rule) {
    fail(ErrorCode::InvalidArgument, "{}: tensor {}: {}", path, in_quotes(tensor.name), rule);
  };
  if (tensor.name.empty() || tensor.name == "__metadata__" || tensor.name.size() > kMaxNameBytes ||
      tensor.name.find('\0') != std::string::npos || !is_utf8(tensor.name))
    refuse("not a legal name");
  if (tensor.shape.size() > kMaxTensorRank) refuse("too many dimensions");
  const std::optional<std::uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.shape);
  if (!bytes) refuse("the size overflows 64 bits or is no whole number of bytes");
  return *bytes;
}

void check_unique_names(std::span<const TensorInfo> tensors, const std::string& path) {
  std::vector<std::string_view> names;
  for (const TensorInfo& t : tensors) names.push_back(t.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end())
    fail(ErrorCode::InvalidArgument, "{}: tensor {}: name appears twice", path, in_quotes(*twice));
}

std::string metadata_entry(const std::map<std::string, std::string>& metadata, const std::string& path) {
  std::string out = "\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    if (!is_utf8(key) || !is_utf8(value))
      fail(ErrorCode::InvalidArgument, "{}: metadata {}: not valid UTF-8", path, in_quotes(key));
    if (out.back() != '{') out += ',';
    out += json_text(key) + ':' + json_text(value);
  }
  return out + '}';
}

}  // namespace

std::string safetensors_header(std::span<const TensorInfo> tensors, const std::map<std::string, std::string>& metadata, const std::string& origin) {
  std::string header = "{";
  if (!metadata.empty()) header += metadata_entry(metadata, origin);
  std::uint64_t end = 0;
  for (const TensorInfo& tensor : tensors) {
    const std::optional<std::uint64_t> next = checked_add(end, checked_bytes(tensor, origin));
    if (!next) fail(ErrorCode::InvalidArgument, "{}: the tensors together overflow 64 bits", origin);
    if (header.back() != '{') header += ',';
    header +=
        fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json_text(tensor.name),
                    dtype_name(tensor.dtype), fmt::join(tensor.shape, ","), end, *next);
    end = *next;
  }
  check_unique_names(tensors, origin);
  header += '}';
  header.resize(round_up(header.size(), 8), ' ');
  if (header.size() > kMaxHeaderBytes)
    fail(ErrorCode::InvalidArgument, "{}: a header of {} bytes is over the limit", origin, header.size());
  std::string length;
  for (std::size_t i = 0; i < 8; ++i) length += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return length + header;
}

void write_safetensors(const std::filesystem::path& path, const std::vector<TensorData>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorInfo> infos;
  for (const TensorData& t : tensors) infos.push_back({t.name, t.dtype, t.shape, 0, 0});
  const std::string header = safetensors_header(infos, metadata, path.string());
  std::vector<std::span<const std::byte>> parts{std::as_bytes(std::span(header))};
  for (const TensorData& t : tensors) {
    const std::uint64_t bytes = *tensor_bytes(t.dtype, t.shape);
    if (t.data == nullptr && bytes != 0)
      fail(ErrorCode::InvalidArgument, "{}: tensor {}: has no data", path.string(), in_quotes(t.name));
    parts.emplace_back(static_cast<const std::byte*>(t.data), static_cast<std::size_t>(bytes));
  }
  io::write_file_atomically(path, parts);
}

}  // namespace moeflux::format
