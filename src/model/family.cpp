#include "model/family.h"

#include "core/error.h"

namespace moeflux::model {
namespace {

std::string known_types() {
  std::string text;
  for (const Family* f : all_families())
    for (std::string_view t : f->model_types) text += fmt::format("{}{}", text.empty() ? "" : ", ", t);
  return text;
}

// What would have to be there to run it.
std::string_view missing_for(std::string_view type, format::ModelConfig& config) {
  if (const std::string_view known = missing_feature(type); !known.empty()) return known;
  for (const std::string_view key : {"num_experts", "num_local_experts", "n_routed_experts"})
    if (config.find(key) != nullptr) return "a description of this family";
  return "a mixture of experts: config.json names no experts";
}

}  // namespace

std::string TensorNames::layer(std::int64_t i, std::string_view name) const { return fmt::format("{}layers.{}.{}", prefix, i, name); }

const Family* find_family(std::string_view model_type) {
  for (const Family* f : all_families())
    for (std::string_view t : f->model_types)
      if (t == model_type) return f;
  return nullptr;
}

ParsedModel parse_model(const format::ModelFolder& folder) {
  format::ModelConfig config(folder.config(), folder.config_origin());
  const std::string type = config.model_type();
  ParsedModel out;
  out.family = find_family(type);
  if (out.family == nullptr)
    fail(ErrorCode::Unsupported, "{}: model_type \"{}\" is not supported ({} is missing); supported are: {}", config.origin(), type,
         missing_for(type, config), known_types());
  out.spec = out.family->parse(config);
  out.spec.family = out.family->name;
  out.spec.model_type = type;
  config.reject_meaningful_leftovers();
  if (const auto unknown = config.unknown_keys(); !unknown.empty())
    out.warnings.push_back(fmt::format("{}: ignoring unknown keys: {}", config.origin(), fmt::join(unknown, ", ")));
  out.names = out.family->names(folder, out.spec);
  return out;
}

}  // namespace moeflux::model
