#include <algorithm>
#include <array>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "format/large_json.h"
#include "format/printable.h"
#include "format/safetensors.h"

namespace moeflux::format {
namespace {

using simdjson::dom::element;
using simdjson::dom::object;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::size_t kMaxDepth = 8;  // an entry needs three levels

// Where the parts of the file lie.
struct Layout {
  std::uint64_t header_bytes = 0;
  std::uint64_t data_begin = 0;
  std::uint64_t data_bytes = 0;
};

Layout read_layout(const io::File& file) {
  const std::string path = file.path().string();
  if (file.size() < kLengthBytes)
    fail(ErrorCode::InvalidModel, "{}: {} bytes long: too short for the 8-byte header length", path,
         file.size());
  std::array<std::byte, kLengthBytes> raw{};
  file.read_exact(0, raw);
  std::uint64_t n = 0;
  for (std::size_t i = 0; i < raw.size(); ++i) n |= std::to_integer<std::uint64_t>(raw[i]) << (8 * i);

  if (n == 0) fail(ErrorCode::InvalidModel, "{}: header length is 0", path);
  if (n > kMaxHeaderBytes)
    fail(ErrorCode::InvalidModel, "{}: header length {} is over the limit of {} bytes", path, n,
         kMaxHeaderBytes);
  if (n > file.size() - kLengthBytes)
    fail(ErrorCode::InvalidModel, "{}: header length {} reaches beyond the end of the file ({} bytes)", path,
         n, file.size());
  return {n, kLengthBytes + n, file.size() - kLengthBytes - n};
}

void check_frame(std::string_view text, const std::string& path) {
  if (text.front() != '{')
    fail(ErrorCode::InvalidModel, "{}: header does not begin with '{{' (byte 8 is 0x{:02x})", path,
         static_cast<unsigned char>(text.front()));
  const std::size_t last = text.find_last_not_of(' ');
  if (text[last] != '}')
    fail(ErrorCode::InvalidModel, "{}: header must end in '}}' and spaces (byte {} is 0x{:02x})", path,
         kLengthBytes + last, static_cast<unsigned char>(text[last]));
}

// After parsing: signs, fractions and exponents outside strings. Entries name their tensor when they
// meet one; this finds what the parser hides (-0 reads as 0) and what stands in keys that are ignored.
void check_plain_numbers(std::string_view text, const std::string& path) {
  bool in_string = false;
  char previous = ' ';
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else {
      const bool exponent = (c == 'e' || c == 'E') && previous >= '0' && previous <= '9';
      if (c == '-' || c == '.' || exponent)
        fail(ErrorCode::InvalidModel, "{}: header: the number at byte {} is not a plain non-negative integer",
             path, kLengthBytes + i);
    }
    previous = c;
  }
}

// One entry of the header; every message names the tensor.
class EntryReader {
 public:
  EntryReader(const std::string& path, const Layout& layout, std::string_view name)
      : path_(path), layout_(layout), name_(name) {}

  TensorInfo read(const element& value) const {
    check_name();
    object entry;
    if (value.get(entry) != simdjson::SUCCESS) refuse("entry is not an object");
    const auto [dtype, shape, offsets] = find_keys(entry);
    TensorInfo info;
    info.name = name_;
    info.dtype = read_dtype(dtype);
    info.shape = read_integers(shape, "shape", kMaxTensorRank);
    read_extent(offsets, info);
    return info;
  }

 private:
  struct Keys {
    element dtype, shape, offsets;
  };

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::InvalidModel, "{}: tensor {}: {}", path_, in_quotes(name_),
         fmt::format(format, std::forward<Args>(args)...));
  }

  void check_name() const {
    if (name_.empty()) refuse("name is empty");
    if (name_.size() > kMaxNameBytes)
      refuse("name is {} bytes long, the limit is {}", name_.size(), kMaxNameBytes);
    if (name_.find('\0') != std::string_view::npos) refuse("name contains NUL");
    if (!is_utf8(name_)) refuse("name is not valid UTF-8");
  }

  Keys find_keys(const object& entry) const {
    Keys keys;
    const std::array wanted{std::pair{std::string_view("dtype"), &keys.dtype},
                            std::pair{std::string_view("shape"), &keys.shape},
                            std::pair{std::string_view("data_offsets"), &keys.offsets}};
    std::array<bool, wanted.size()> seen{};
    for (const auto field : entry) {
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        if (field.key != wanted[i].first) continue;
        if (std::exchange(seen[i], true)) refuse("key \"{}\" appears twice", wanted[i].first);
        *wanted[i].second = field.value;
      }
    }
    for (std::size_t i = 0; i < wanted.size(); ++i)
      if (!seen[i]) refuse("key \"{}\" is missing", wanted[i].first);
    return keys;
  }

  DType read_dtype(const element& value) const {
    std::string_view text;
    if (value.get(text) != simdjson::SUCCESS) refuse("dtype is not a string");
    const std::optional<DType> dtype = dtype_from_name(text);
    if (!dtype) refuse("unknown dtype {}", in_quotes(text));
    return *dtype;
  }

  std::vector<std::uint64_t> read_integers(const element& value, const char* key,
                                           std::size_t max_count) const {
    simdjson::dom::array list;
    if (value.get(list) != simdjson::SUCCESS) refuse("{} is not an array", key);
    std::vector<std::uint64_t> out;
    for (const element item : list) {
      if (out.size() == max_count) refuse("{} has more than {} numbers", key, max_count);
      std::uint64_t number = 0;
      if (item.get(number) != simdjson::SUCCESS)
        refuse("{}[{}] is not a non-negative integer that fits 64 bits", key, out.size());
      out.push_back(number);
    }
    return out;
  }

  void read_extent(const element& value, TensorInfo& info) const {
    const std::vector<std::uint64_t> offsets = read_integers(value, "data_offsets", 2);
    if (offsets.size() != 2) refuse("data_offsets has {} numbers instead of 2", offsets.size());
    const std::uint64_t begin = offsets[0], end = offsets[1];
    if (begin > end) refuse("data_offsets [{}, {}]: begins after its end", begin, end);
    if (end > layout_.data_bytes)
      refuse("data_offsets [{}, {}] reach beyond the end of the file: the data is {} bytes long from byte {}",
             begin, end, layout_.data_bytes, layout_.data_begin);
    const std::optional<std::uint64_t> bytes = tensor_bytes(info.dtype, info.shape);
    const std::string shape = fmt::format("{} [{}]", dtype_name(info.dtype), fmt::join(info.shape, ", "));
    if (!bytes) refuse("{}: the size overflows 64 bits or is no whole number of bytes", shape);
    if (*bytes != end - begin)
      refuse("data_offsets [{}, {}] span {} bytes, {} takes {}", begin, end, end - begin, shape, *bytes);
    info.offset = layout_.data_begin + begin;
    info.bytes = *bytes;
  }

  const std::string& path_;
  const Layout& layout_;
  std::string_view name_;
};

std::map<std::string, std::string> read_metadata(const element& value, const std::string& path) {
  object entries;
  if (value.get(entries) != simdjson::SUCCESS)
    fail(ErrorCode::InvalidModel, "{}: __metadata__ is not an object", path);
  std::map<std::string, std::string> metadata;
  for (const auto field : entries) {
    std::string_view text;
    if (field.value.get(text) != simdjson::SUCCESS)
      fail(ErrorCode::InvalidModel, "{}: __metadata__ {} is not a string", path, in_quotes(field.key));
    if (!is_utf8(field.key) || !is_utf8(text))
      fail(ErrorCode::InvalidModel, "{}: __metadata__ {} is not valid UTF-8", path, in_quotes(field.key));
    if (!metadata.emplace(field.key, text).second)
      fail(ErrorCode::InvalidModel, "{}: __metadata__ {} appears twice", path, in_quotes(field.key));
  }
  return metadata;
}

// Sorting, not hashing: names are chosen by whoever wrote the file.
void check_unique_names(const std::vector<TensorInfo>& tensors, const std::string& path) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorInfo& t : tensors) names.push_back(t.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end())
    fail(ErrorCode::InvalidModel, "{}: tensor {}: name appears twice", path, in_quotes(*twice));
}

// Expects the tensors sorted by offset.
void check_tiling(const std::vector<TensorInfo>& tensors, const Layout& layout, const std::string& path) {
  std::uint64_t expected = layout.data_begin;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& t : tensors) {
    if (t.offset != expected) {
      const std::string after =
          previous == nullptr ? std::string("the header") : "tensor " + in_quotes(previous->name);
      fail(ErrorCode::InvalidModel, "{}: tensor {}: data begins at byte {}, {} {} which ends at byte {}",
           path, in_quotes(t.name), t.offset, t.offset < expected ? "overlapping" : "leaving a hole after",
           after, expected);
    }
    expected = t.offset + t.bytes;
    previous = &t;
  }
  const std::uint64_t end = layout.data_begin + layout.data_bytes;
  if (expected != end)
    fail(ErrorCode::InvalidModel, "{}: {} bytes at byte {} belong to no tensor", path, end - expected,
         expected);
}

}  // namespace

std::optional<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::uint64_t> shape) noexcept {
  std::optional<std::uint64_t> bits = dtype_bits(dtype);
  bool empty = false;
  for (const std::uint64_t dim : shape) {
    if (dim == 0) {
      empty = true;
    } else if (bits) {
      bits = checked_mul(*bits, dim);
    }
  }
  if (!bits) return std::nullopt;
  if (empty) return 0;
  if (*bits % 8 != 0) return std::nullopt;
  return *bits / 8;
}

SafetensorsHeader read_safetensors_header(const io::File& file) {
  const std::string path = file.path().string();
  const Layout layout = read_layout(file);
  LargeJson json(file, kLengthBytes, layout.header_bytes, "header");
  check_frame(json.text(), path);

  SafetensorsHeader header;
  bool metadata_seen = false;
  for (const auto field : json.parse_object(kMaxDepth)) {
    if (field.key == "__metadata__") {
      if (std::exchange(metadata_seen, true))
        fail(ErrorCode::InvalidModel, "{}: __metadata__ appears twice", path);
      header.metadata = read_metadata(field.value, path);
    } else {
      header.tensors.push_back(EntryReader(path, layout, field.key).read(field.value));
    }
  }
  check_plain_numbers(json.text(), path);
  check_unique_names(header.tensors, path);
  // Empty tensors come before the one that begins at the same byte.
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) {
                     return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
                   });
  check_tiling(header.tensors, layout, path);
  return header;
}

}  // namespace moeflux::format
