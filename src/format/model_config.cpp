#include "format/model_config.h"

#include <algorithm>

#include "core/error.h"
#include "core/json.h"
#include "format/config_keys.h"
#include "format/printable.h"

namespace moeflux::format {
namespace {

bool root_comes_first(std::string_view key) {
  return key == "tie_word_embeddings" || key == "quantization" || key == "quantization_config";
}

std::string shown(const Json& value) {
  constexpr std::size_t kMaxShown = 60;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "..";
  return text;
}

std::string either(std::initializer_list<std::string_view> keys) {
  return fmt::format("\"{}\"", fmt::join(keys, "\" or \""));
}

// For messages: the objects that hold model keys.
std::string place(const std::string& origin, const Json* object, const Json* root) {
  return object == root ? origin : origin + ": text_config";
}

}  // namespace

ModelConfig::ModelConfig(const Json& root, std::string origin)
    : root_(&root), text_(&root), origin_(std::move(origin)) {
  if (!root.is_object()) fail(ErrorCode::InvalidModel, "{}: not a JSON object", origin_);
  if (const Json* text = json_find(root, "text_config")) {
    if (!text->is_object()) fail(ErrorCode::InvalidModel, "{}: \"text_config\" must be an object", origin_);
    text_ = text;
  }
}

std::string ModelConfig::model_type() const {
  const std::optional<std::string> type = json_string(*root_, "model_type", origin_);
  if (!type) fail(ErrorCode::InvalidModel, "{}: \"model_type\" is missing", origin_);
  return *type;
}

std::string ModelConfig::text_model_type() const {
  const std::optional<std::string> type = json_string(*text_, "model_type", place(origin_, text_, root_));
  return type ? *type : model_type();
}

const Json* ModelConfig::lookup(std::string_view key) const {
  if (root_comes_first(key)) {
    if (const Json* value = json_find(*root_, key)) return value;
  }
  return json_find(*text_, key);
}

const Json* ModelConfig::find(std::string_view key) {
  understood_.emplace(key);
  return lookup(key);
}

std::pair<const Json*, std::string_view> ModelConfig::holder(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) understood_.emplace(key);
  for (const std::string_view key : keys) {
    if (root_comes_first(key) && json_find(*root_, key) != nullptr) return {root_, key};
    if (json_find(*text_, key) != nullptr) return {text_, key};
  }
  return {text_, *keys.begin()};
}

std::optional<std::int64_t> ModelConfig::find_int(std::initializer_list<std::string_view> keys) {
  const auto [object, key] = holder(keys);
  return json_int(*object, key, place(origin_, object, root_));
}

std::optional<double> ModelConfig::find_number(std::initializer_list<std::string_view> keys) {
  const auto [object, key] = holder(keys);
  return json_number(*object, key, place(origin_, object, root_));
}

std::optional<bool> ModelConfig::find_bool(std::initializer_list<std::string_view> keys) {
  const auto [object, key] = holder(keys);
  return json_bool(*object, key, place(origin_, object, root_));
}

std::optional<std::string> ModelConfig::find_string(std::initializer_list<std::string_view> keys) {
  const auto [object, key] = holder(keys);
  return json_string(*object, key, place(origin_, object, root_));
}

std::int64_t ModelConfig::need_int(std::initializer_list<std::string_view> keys, std::int64_t min,
                                   std::int64_t max) {
  const std::optional<std::int64_t> value = find_int(keys);
  if (!value) fail(ErrorCode::InvalidModel, "{}: {} is missing", origin_, either(keys));
  if (*value < min || *value > max)
    fail(ErrorCode::InvalidModel, "{}: \"{}\" is {}, outside {} to {}", origin_, holder(keys).second, *value,
         min, max);
  return *value;
}

double ModelConfig::need_number(std::initializer_list<std::string_view> keys, double min, double max) {
  const std::optional<double> value = find_number(keys);
  if (!value) fail(ErrorCode::InvalidModel, "{}: {} is missing", origin_, either(keys));
  if (!(*value >= min && *value <= max))
    fail(ErrorCode::InvalidModel, "{}: \"{}\" is {}, outside {} to {}", origin_, holder(keys).second, *value,
         min, max);
  return *value;
}

void ModelConfig::require_absent_or(std::string_view key, const Json& harmless) {
  const Json* value = find(key);
  if (value == nullptr || *value == harmless) return;
  fail(ErrorCode::Unsupported, "{}: \"{}\": {} is not supported for model type {} (only {})", origin_, key,
       shown(*value), in_quotes(text_model_type()), shown(harmless));
}

void ModelConfig::accept(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) accepted_.emplace(key);
}

std::vector<ModelConfig::Leftover> ModelConfig::leftovers() const {
  std::vector<Leftover> out;
  const auto collect = [&](const Json& object, bool beside_text) {
    for (const auto& [key, value] : object.items()) {
      if (accepted_.contains(key)) continue;
      const bool readable = !beside_text || root_comes_first(key);
      if (readable && understood_.contains(key)) continue;
      if (beside_text) {
        const Json* same = json_find(*text_, key);
        if (same != nullptr && *same == value) continue;
      }
      const KeyEffect effect = key_effect(key, value);
      if (effect != KeyEffect::None) out.push_back({key, &value, beside_text, effect == KeyEffect::Changes});
    }
  };
  collect(*text_, false);
  if (text_ != root_) collect(*root_, true);
  return out;
}

std::vector<std::string> ModelConfig::unknown_keys() const {
  std::vector<std::string> keys;
  for (const Leftover& l : leftovers())
    if (!l.changes) keys.emplace_back(l.key);
  return keys;
}

void ModelConfig::reject_meaningful_leftovers() const {
  for (const Leftover& l : leftovers()) {
    if (!l.changes) continue;
    fail(ErrorCode::Unsupported, "{}: {}: {}{} changes the model in a way not supported for model type {}",
         origin_, in_quotes(l.key), shown(*l.value), l.beside_text ? " beside text_config" : "",
         in_quotes(text_model_type()));
  }
}

}  // namespace moeflux::format
