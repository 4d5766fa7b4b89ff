#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/json.h"
#include "format/model_config.h"
#include "format/printable.h"

namespace moeflux::format {
namespace {

struct Mode {
  std::string_view name;
  std::int64_t group_size;
  std::int64_t bits;
};
constexpr std::array kModes{Mode{"affine", 64, 4}, Mode{"mxfp4", 32, 4}, Mode{"nvfp4", 16, 4},
                            Mode{"mxfp8", 32, 8}};

std::int64_t value_or(const Json& object, const char* key, std::int64_t otherwise, std::int64_t max,
                      const std::string& origin) {
  const std::int64_t value = json_int(object, key, origin).value_or(otherwise);
  if (value < 1 || value > max)
    fail(ErrorCode::InvalidModel, "{}: \"{}\" is {}, outside 1 to {}", origin, key, value, max);
  return value;
}

QuantParams read_params(const Json& object, const std::string& origin) {
  QuantParams params;
  params.mode = json_string(object, "mode", origin).value_or("affine");
  const auto mode =
      std::find_if(kModes.begin(), kModes.end(), [&](const Mode& m) { return m.name == params.mode; });
  if (mode == kModes.end())
    fail(ErrorCode::Unsupported, "{}: quantization mode {} is not supported", origin, in_quotes(params.mode));
  params.bits = value_or(object, "bits", mode->bits, 32, origin);
  params.group_size = value_or(object, "group_size", mode->group_size, 65536, origin);
  return params;
}

const Json* find_quantization(const Json& root, std::string& origin) {
  const Json* text = json_find(root, "text_config");
  for (const Json* object : {&root, text}) {
    if (object == nullptr) continue;
    for (const char* key : {"quantization", "quantization_config"}) {
      if (const Json* found = json_find(*object, key)) {
        origin += fmt::format(": {}{}", object == &root ? "" : "text_config.", key);
        return found;
      }
    }
  }
  return nullptr;
}

// Vendors' own methods: what the tensors do not show must have the one value we know.
void check_fp8(const Json& object, const std::string& place) {
  const Json* block = json_find(object, "weight_block_size");
  if (block == nullptr || *block != Json::array({128, 128}))
    fail(ErrorCode::Unsupported, "{}: \"weight_block_size\" must be [128, 128] for fp8", place);
  if (const auto kind = json_string(object, "fmt", place); kind && *kind != "e4m3" && *kind != "float8_e4m3fn")
    fail(ErrorCode::Unsupported, "{}: \"fmt\" is {}, only e4m3 is supported", place, in_quotes(*kind));
}

void check_compressed(const Json& object, const std::string& place) {
  if (const auto format = json_string(object, "format", place).value_or(""); format != "pack-quantized")
    fail(ErrorCode::Unsupported, "{}: \"format\" is {}, only pack-quantized is supported", place, in_quotes(format));
  const Json* groups = json_find(object, "config_groups");
  if (groups == nullptr || !groups->is_object()) fail(ErrorCode::InvalidModel, "{}: \"config_groups\" must be an object", place);
  for (const auto& [name, group] : groups->items()) {
    const std::string at = fmt::format("{}.config_groups.{}.weights", place, name);
    const Json* weights = group.is_object() ? json_find(group, "weights") : nullptr;
    if (weights == nullptr || !weights->is_object()) fail(ErrorCode::InvalidModel, "{}: must be an object", at);
    const bool known = json_int(*weights, "num_bits", at) == 4 && json_int(*weights, "group_size", at) == 32 &&
                       json_bool(*weights, "symmetric", at).value_or(true) && json_string(*weights, "type", at).value_or("int") == "int";
    if (!known) fail(ErrorCode::Unsupported, "{}: only symmetric \"num_bits\" 4 with \"group_size\" 32 is supported", at);
  }
}

}  // namespace

QuantConfig::QuantConfig(const Json& root, const std::string& origin) {
  std::string place = origin;
  const Json* object = find_quantization(root, place);
  if (object == nullptr) return;
  if (!object->is_object()) fail(ErrorCode::InvalidModel, "{}: must be an object", place);
  present_ = true;
  if (const auto method = json_string(*object, "quant_method", place)) {
    quant_method_ = *method;
    if (*method == "fp8") check_fp8(*object, place);
    if (*method == "compressed-tensors") check_compressed(*object, place);
    return;
  }
  defaults_ = read_params(*object, place);
  for (const auto& [key, value] : object->items()) {
    if (value.is_null() || key == "bits" || key == "group_size" || key == "mode") continue;
    if (value.is_object()) {
      overrides_.emplace_back(key, read_params(value, fmt::format("{}.{}", place, key)));
    } else if (value.is_boolean()) {
      overrides_.emplace_back(key, value.get<bool>() ? defaults_ : std::nullopt);
    } else {
      unknown_keys_.push_back(key);
    }
  }
  std::sort(overrides_.begin(), overrides_.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
}

std::optional<QuantParams> QuantConfig::lookup(std::string_view module) const {
  const auto it = std::lower_bound(overrides_.begin(), overrides_.end(), module,
                                   [](const auto& entry, std::string_view key) { return entry.first < key; });
  if (it != overrides_.end() && it->first == module) return it->second;
  return defaults_;
}

}  // namespace moeflux::format
