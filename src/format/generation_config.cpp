#include "core/error.h"
#include "core/json.h"
#include "format/model_config.h"

namespace moeflux::format {
namespace {

constexpr std::size_t kMaxEosIds = 1024;

std::vector<std::int64_t> read_ids(const Json& object, const std::string& origin) {
  const Json* value = json_find(object, "eos_token_id");
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  if (list.size() > kMaxEosIds)
    fail(ErrorCode::InvalidModel, "{}: \"eos_token_id\" has {} ids, at most {} are accepted", origin,
         list.size(), kMaxEosIds);
  std::vector<std::int64_t> ids;
  for (const Json& id : list) {
    const Json named{{"eos_token_id", id}};
    const std::optional<std::int64_t> number = json_int(named, "eos_token_id", origin);
    if (!number || *number < 0)
      fail(ErrorCode::InvalidModel, "{}: \"eos_token_id\" must hold non-negative integers", origin);
    ids.push_back(*number);
  }
  return ids;
}

}  // namespace

GenerationDefaults parse_generation_config(const Json& object, const std::string& origin) {
  if (!object.is_object()) fail(ErrorCode::InvalidModel, "{}: not a JSON object", origin);
  GenerationDefaults out;
  out.eos_token_ids = read_ids(object, origin);
  out.temperature = json_number(object, "temperature", origin);
  out.top_p = json_number(object, "top_p", origin);
  out.min_p = json_number(object, "min_p", origin);
  out.repetition_penalty = json_number(object, "repetition_penalty", origin);
  out.top_k = json_int(object, "top_k", origin);
  out.do_sample = json_bool(object, "do_sample", origin);
  return out;
}

}  // namespace moeflux::format
