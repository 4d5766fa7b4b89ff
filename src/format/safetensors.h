// safetensors headers, read as hostile input: names, dtypes, shapes and file extents, never data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "io/file.h"

namespace moeflux::format {

struct TensorInfo {
  std::string name;
  DType dtype = DType::F32;
  std::vector<std::uint64_t> shape;  // rank <= 8; the product of dims and bits is checked
  std::uint64_t offset = 0;          // absolute in the file; any byte, MLX files are not aligned
  std::uint64_t bytes = 0;
};

// Bytes of a tensor; nullopt when dims x bits overflows 64 bits or is no whole number of bytes. Zero dims
// do not hide an overflow of the others, so that products of dims are safe in any order and fit int64.
std::optional<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::uint64_t> shape) noexcept;

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr std::size_t kMaxTensorRank = 8;
inline constexpr std::size_t kMaxNameBytes = 512;

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;              // in the order of their data in the file
  std::map<std::string, std::string> metadata;  // the strings of __metadata__
};

// Reads and checks the header of an open file by the rules of spec "containers", section 1: header
// length (<= 100,000,000 and inside the file), UTF-8, nesting, duplicate names, known dtypes, shapes
// whose product does not overflow, sizes that match, tensors that tile the data without hole or
// overlap. Any violation is InvalidModel naming the file, the tensor and the rule.
SafetensorsHeader read_safetensors_header(const io::File& file);

// The start of a file with these tensors in this order: the length and the header, padded to 8 bytes. Offsets and sizes of the
// infos are not looked at. InvalidArgument for what read_safetensors_header would refuse.
std::string safetensors_header(std::span<const TensorInfo> tensors, const std::map<std::string, std::string>& metadata, const std::string& origin);

// One tensor to be written by write_safetensors.
struct TensorData {
  std::string name;
  DType dtype = DType::F32;
  std::vector<std::uint64_t> shape;
  const void* data = nullptr;  // row-major, exactly shape x dtype bytes
};

// Writes a file (header padded to 8 bytes, data in the given order): to a temporary name beside it,
// fsynced, then renamed, so a failure leaves what was there before. Throws Io; InvalidArgument for what
// read_safetensors_header would refuse.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorData>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace moeflux::format
