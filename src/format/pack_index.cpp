#include "format/pack_index.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "core/json.h"
#include "format/file_name.h"
#include "format/printable.h"

namespace moeflux::format {
namespace {

using quant::Format;
using quant::FormatKind;

constexpr std::string_view kMagic = "MFLXPACK";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 32;  // magic, version, length of the text, digest
constexpr std::size_t kDigestAt = 16;
constexpr std::size_t kDigestBytes = 16;
constexpr std::uint64_t kMaxPackIndexBytes = 64u << 20;  // four million records
constexpr std::uint32_t kMaxTextBytes = 1u << 20;        // a thousand layers
constexpr std::size_t kMaxLayers = 4096;
constexpr std::int64_t kMaxExperts = 65535;
constexpr std::int64_t kMaxDim = std::numeric_limits<std::int32_t>::max();
constexpr std::size_t kMaxFiles = 256;

constexpr std::array kKinds{std::pair{FormatKind::F32, "f32"},       std::pair{FormatKind::F16, "f16"},     std::pair{FormatKind::BF16, "bf16"},
                            std::pair{FormatKind::Affine, "affine"}, std::pair{FormatKind::Mxfp4, "mxfp4"}, std::pair{FormatKind::Fp8, "fp8"}};

void put_u32(std::string& out, std::uint32_t value) {
  for (int i = 0; i < 4; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
}

std::uint32_t get_u32(std::string_view bytes) noexcept {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) value |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return value;
}

std::string_view text_of(const Digest& digest) noexcept { return {reinterpret_cast<const char*>(digest.bytes.data()), kDigestBytes}; }

// Of everything but itself.
Digest own_digest(std::string_view file) {
  DigestStream stream;
  stream.add(std::as_bytes(std::span(file.substr(0, kDigestAt))));
  stream.add(std::as_bytes(std::span(file.substr(kHeaderBytes))));
  return stream.digest();
}

Json to_json(const PackMatrix& m) {
  const auto kind = std::find_if(kKinds.begin(), kKinds.end(), [&](const auto& k) { return k.first == m.format.kind; });
  Json out = {{"format", kind->second}, {"rows", m.rows}, {"cols", m.cols}};
  if (m.format.kind == FormatKind::Affine) {
    out["bits"] = m.format.bits;
    out["group"] = m.format.group;
    out["scales"] = dtype_name(m.format.scale_dtype);
  }
  return out;
}

// Looks things up in one object of the text; `origin` says where it stands.
class Fields {
 public:
  Fields(const Json* object, std::string origin) : object_(object), origin_(std::move(origin)) {
    if (object_ == nullptr || !object_->is_object()) fail(ErrorCode::InvalidModel, "{}: missing or not an object", origin_);
  }

  std::int64_t integer(std::string_view key, std::int64_t min, std::int64_t max) const {
    const auto value = json_int(*object_, key, origin_);
    if (!value || *value < min || *value > max)
      fail(ErrorCode::InvalidModel, "{}: \"{}\" must be an integer from {} to {}{}", origin_, key, min, max, value ? fmt::format(", found {}", *value) : "");
    return *value;
  }
  std::uint64_t bytes(std::string_view key) const { return static_cast<std::uint64_t>(integer(key, 0, std::int64_t{1} << 60)); }
  std::string text(std::string_view key) const {
    const auto value = json_string(*object_, key, origin_);
    if (!value) fail(ErrorCode::InvalidModel, "{}: no \"{}\"", origin_, key);
    return *value;
  }
  Digest digest(std::string_view key) const {
    Digest out;
    if (!parse_digest(text(key), out)) fail(ErrorCode::InvalidModel, "{}: \"{}\" is no checksum of 32 hex digits", origin_, key);
    return out;
  }
  bool flag(std::string_view key) const {
    const auto value = json_bool(*object_, key, origin_);
    if (!value) fail(ErrorCode::InvalidModel, "{}: no \"{}\"", origin_, key);
    return *value;
  }
  Fields object(std::string_view key) const { return {json_find(*object_, key), fmt::format("{}: {}", origin_, key)}; }
  std::vector<Fields> list(std::string_view key) const {
    const Json* array = json_find(*object_, key);
    if (array == nullptr || !array->is_array() || array->size() > kMaxLayers)
      fail(ErrorCode::InvalidModel, "{}: \"{}\" is missing, too long or not a list", origin_, key);
    std::vector<Fields> out;
    for (const Json& item : *array) out.emplace_back(&item, fmt::format("{}: {}[{}]", origin_, key, out.size()));
    return out;
  }
  const std::string& origin() const noexcept { return origin_; }

 private:
  const Json* object_;
  std::string origin_;
};

PackMatrix read_matrix(const Fields& in) {
  PackMatrix m;
  const std::string name = in.text("format");
  const auto kind = std::find_if(kKinds.begin(), kKinds.end(), [&](const auto& k) { return name == k.second; });
  if (kind == kKinds.end()) fail(ErrorCode::Unsupported, "{}: unknown format {}", in.origin(), in_quotes(name));
  switch (kind->first) {
    case FormatKind::F32: m.format = Format::f32(); break;
    case FormatKind::F16: m.format = Format::f16(); break;
    case FormatKind::BF16: m.format = Format::bf16(); break;
    case FormatKind::Mxfp4: m.format = Format::mxfp4(); break;
    case FormatKind::Fp8: m.format = Format::fp8(); break;
    case FormatKind::Affine: {
      const auto scales = dtype_from_name(in.text("scales"));
      if (!scales) fail(ErrorCode::InvalidModel, "{}: \"scales\" names no type", in.origin());
      m.format = Format::affine(in.integer("bits", 1, 32), in.integer("group", 1, 65535), *scales);
    }
  }
  m.rows = in.integer("rows", 1, kMaxDim);
  m.cols = in.integer("cols", 1, kMaxDim);
  return m;
}

// The text and the table of digests behind it.
class IndexReader {
 public:
  IndexReader(std::string path, std::string_view text, std::string_view table) : path_(std::move(path)), text_(text), table_(table) {}

  PackIndex read() {
    const Json json = parse_json(text_, path_);
    const Fields root(&json, path_);
    PackIndex out;
    out.writer = root.text("writer");
    read_files(root, out);
    const Fields trunk = root.object("trunk");
    out.trunk_bytes = trunk.bytes("bytes");
    out.trunk_header_bytes = trunk.bytes("header_bytes");
    if (out.trunk_header_bytes < 8 || out.trunk_header_bytes > out.trunk_bytes) refuse("the header of the trunk does not fit its file");
    out.trunk_header = trunk.digest("header_xxh3_128");
    out.trunk = take_digests(trunk.integer("tensors", 0, kMaxDim));
    const Fields experts = root.object("experts");
    out.experts_bytes = experts.bytes("bytes");
    for (const Fields& layer : experts.list("layers")) read_layer(layer, out);
    const std::uint64_t end = out.layers.empty() ? 0 : out.layers.back().offset + out.layers.back().bytes();
    if (end != out.experts_bytes) refuse("the records end at byte {} of {}", end, out.experts_bytes);
    if (!table_.empty()) refuse("{} checksums belong to nothing", table_.size() / kDigestBytes);
    if (root.digest("model") != out.model_id()) refuse("the checksum of the model is not that of its configuration and trunk");
    return out;
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::InvalidModel, "{}: {}", path_, fmt::format(format, std::forward<Args>(args)...));
  }

  std::vector<Digest> take_digests(std::int64_t n) {
    const std::size_t count = static_cast<std::size_t>(n);
    if (count > table_.size() / kDigestBytes) refuse("there are fewer checksums than tensors and records");
    std::vector<Digest> out(count);
    for (Digest& d : out) {
      std::memcpy(d.bytes.data(), table_.data(), kDigestBytes);
      table_.remove_prefix(kDigestBytes);
    }
    return out;
  }

  void read_files(const Fields& root, PackIndex& out) const {
    for (const Fields& in : root.list("files")) {
      PackedFile file{in.text("name"), in.bytes("bytes"), in.digest("xxh3_128")};
      if (!plain_file_name(file.name)) refuse("{} is not a plain file name inside the folder", in_quotes(file.name));
      if (out.find_file(file.name) != nullptr || out.files.size() == kMaxFiles) refuse("file {} is named twice, or too many are", in_quotes(file.name));
      out.files.push_back(std::move(file));
    }
    if (out.find_file("config.json") == nullptr) refuse("no config.json among its files");
  }

  void read_layer(const Fields& in, PackIndex& out) {
    PackLayer layer;
    const std::int64_t least = out.layers.empty() ? 0 : std::int64_t{out.layers.back().layer} + 1;
    const std::uint64_t begin = out.layers.empty() ? 0 : out.layers.back().offset + out.layers.back().bytes();
    layer.layer = static_cast<std::int32_t>(in.integer("layer", least, kMaxDim - 1));
    layer.offset = in.bytes("offset");
    layer.record_bytes = in.bytes("record_bytes");
    const std::int64_t n_experts = in.integer("experts", 1, kMaxExperts);
    if (layer.record_bytes == 0 || layer.record_bytes % kPackAlign != 0)
      fail(ErrorCode::InvalidModel, "{}: records of {} bytes are no multiple of {}", in.origin(), layer.record_bytes, kPackAlign);
    // Both at most 2^60: neither the product nor the sum can overflow once it is checked against what there is.
    if (layer.offset != begin || layer.record_bytes > (out.experts_bytes - begin) / static_cast<std::uint64_t>(n_experts))
      fail(ErrorCode::InvalidModel, "{}: {} records of {} bytes at byte {} do not follow the layer before within the {} bytes of the file", in.origin(),
           n_experts, layer.record_bytes, layer.offset, out.experts_bytes);
    layer.gate = read_matrix(in.object("gate"));
    layer.up = read_matrix(in.object("up"));
    layer.down = read_matrix(in.object("down"));
    layer.biases = in.flag("biases");
    layer.digests = take_digests(n_experts);
    out.layers.push_back(std::move(layer));
  }

  const std::string path_;
  const std::string_view text_;
  std::string_view table_;
};

}  // namespace

const PackedFile* PackIndex::find_file(std::string_view name) const noexcept {
  const auto it = std::find_if(files.begin(), files.end(), [&](const PackedFile& f) { return f.name == name; });
  return it == files.end() ? nullptr : &*it;
}

Digest PackIndex::model_id() const {
  DigestStream stream;
  if (const PackedFile* config = find_file("config.json")) stream.add(config->digest);
  stream.add(trunk_header);
  for (const Digest& d : trunk) stream.add(d);
  return stream.digest();
}

std::size_t PackIndex::n_records() const noexcept {
  std::size_t n = 0;
  for (const PackLayer& l : layers) n += l.digests.size();
  return n;
}

std::uint64_t record_seed(const Digest& model_id, std::int32_t layer, std::int32_t expert) noexcept {
  std::array<std::byte, kDigestBytes + 8> key;
  std::memcpy(key.data(), model_id.bytes.data(), kDigestBytes);
  for (std::size_t i = 0; i < 4; ++i) {
    key[kDigestBytes + i] = static_cast<std::byte>(static_cast<std::uint32_t>(layer) >> (8 * i));
    key[kDigestBytes + 4 + i] = static_cast<std::byte>(static_cast<std::uint32_t>(expert) >> (8 * i));
  }
  return hash_bytes(key.data(), key.size());
}

std::string write_pack_index(const PackIndex& index) {
  Json files = Json::array(), layers = Json::array();
  for (const PackedFile& f : index.files) files.push_back({{"name", f.name}, {"bytes", f.bytes}, {"xxh3_128", digest_text(f.digest)}});
  std::string table;
  for (const Digest& d : index.trunk) table += text_of(d);
  for (const PackLayer& l : index.layers) {
    layers.push_back({{"layer", l.layer}, {"experts", l.digests.size()}, {"offset", l.offset}, {"record_bytes", l.record_bytes},
                      {"gate", to_json(l.gate)}, {"up", to_json(l.up)}, {"down", to_json(l.down)}, {"biases", l.biases}});
    for (const Digest& d : l.digests) table += text_of(d);
  }
  const Json json = {{"writer", index.writer},
                     {"model", digest_text(index.model_id())},
                     {"files", files},
                     {"trunk",
                      {{"bytes", index.trunk_bytes},
                       {"header_bytes", index.trunk_header_bytes},
                       {"header_xxh3_128", digest_text(index.trunk_header)},
                       {"tensors", index.trunk.size()}}},
                     {"experts", {{"bytes", index.experts_bytes}, {"layers", layers}}}};
  std::string text = json.dump(1);
  text.resize(round_up(text.size(), kDigestBytes), ' ');
  if (text.size() > kMaxTextBytes) fail(ErrorCode::InvalidArgument, "an index of {} bytes is over the limit", text.size());
  std::string out(kMagic);
  put_u32(out, kVersion);
  put_u32(out, static_cast<std::uint32_t>(text.size()));
  out.resize(kHeaderBytes, '\0');
  out += text;
  out += table;
  const Digest own = own_digest(out);
  out.replace(kDigestAt, kDigestBytes, text_of(own));
  return out;
}

PackIndex read_pack_index(const io::File& file) {
  const std::string path = file.path().string();
  if (file.size() < kHeaderBytes || file.size() > kMaxPackIndexBytes)
    fail(ErrorCode::InvalidModel, "{}: {} bytes long: not the index of a pack, or cut off", path, file.size());
  std::string bytes(static_cast<std::size_t>(file.size()), '\0');
  file.read_exact(0, std::as_writable_bytes(std::span(bytes)));
  const std::string_view all(bytes);
  if (!all.starts_with(kMagic)) fail(ErrorCode::InvalidModel, "{}: not the index of a pack", path);
  const std::uint32_t version = get_u32(all.substr(8));
  if (version != kVersion) fail(ErrorCode::Unsupported, "{}: a pack of version {}; this moeflux reads version {}", path, version, kVersion);
  if (text_of(own_digest(all)) != all.substr(kDigestAt, kDigestBytes))
    fail(ErrorCode::InvalidModel, "{}: damaged: it does not match its checksum", path);
  const std::uint32_t n = get_u32(all.substr(12));
  if (n > kMaxTextBytes || n > all.size() - kHeaderBytes || (all.size() - kHeaderBytes - n) % kDigestBytes != 0)
    fail(ErrorCode::InvalidModel, "{}: a text of {} bytes does not fit a file of {}", path, n, all.size());
  return IndexReader(path, all.substr(kHeaderBytes, n), all.substr(kHeaderBytes + n)).read();
}

}  // namespace moeflux::format
