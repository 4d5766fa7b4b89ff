#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "core/json.h"

namespace moeflux::model {
namespace {

double plain_frequency(std::int64_t i, std::int64_t n_rotary, double base) {
  return std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(n_rotary));
}

double number_or(const Json& object, std::string_view key, double fallback, const std::string& origin) {
  return json_number(object, key, origin).value_or(fallback);
}

YarnParams read_yarn(const Json& p, format::ModelConfig& config) {
  const std::string& origin = config.origin();
  const double max_context = static_cast<double>(config.find_int({"max_position_embeddings"}).value_or(0));
  YarnParams y;
  y.original_context = number_or(p, "original_max_position_embeddings", max_context, origin);
  if (!(y.original_context >= 1.0)) fail(ErrorCode::InvalidModel, "{}: YaRN needs \"original_max_position_embeddings\"", origin);
  y.factor = number_or(p, "factor", max_context / y.original_context, origin);
  y.beta_fast = number_or(p, "beta_fast", 32.0, origin);
  y.beta_slow = number_or(p, "beta_slow", 1.0, origin);
  y.mscale = number_or(p, "mscale", 0.0, origin);
  y.mscale_all_dim = number_or(p, "mscale_all_dim", 0.0, origin);
  y.attention_factor = json_number(p, "attention_factor", origin);
  y.truncate = json_bool(p, "truncate", origin).value_or(true);
  if (!(y.factor > 0.0) || !(y.beta_fast > 0.0) || !(y.beta_slow > 0.0))
    fail(ErrorCode::InvalidModel, "{}: YaRN \"factor\", \"beta_fast\" and \"beta_slow\" must be positive", origin);
  return y;
}

}  // namespace

RopeSpec plain_rope(std::int64_t n_rotary, double base, backend::RopeStyle style) {
  RopeSpec spec;
  spec.style = style;
  for (std::int64_t i = 0; i < n_rotary / 2; ++i) spec.inv_freq.push_back(static_cast<float>(plain_frequency(i, n_rotary, base)));
  return spec;
}

double yarn_magnitude(double scale, double x) { return scale <= 1.0 ? 1.0 : 0.1 * x * std::log(scale) + 1.0; }

RopeSpec yarn_rope(std::int64_t n_rotary, double base, const YarnParams& y, backend::RopeStyle style) {
  const auto r = static_cast<double>(n_rotary);
  const auto correction = [&](double n) {
    return r * std::log(y.original_context / (2.0 * std::numbers::pi * n)) / (2.0 * std::log(base));
  };
  double low = correction(y.beta_fast), high = correction(y.beta_slow);
  if (y.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, r - 1.0);
  if (low == high) high += 0.001;

  RopeSpec spec;
  spec.style = style;
  for (std::int64_t i = 0; i < n_rotary / 2; ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    spec.inv_freq.push_back(static_cast<float>(plain_frequency(i, n_rotary, base) * (ramp / y.factor + (1.0 - ramp))));
  }
  const bool both = y.mscale != 0.0 && y.mscale_all_dim != 0.0;
  spec.magnitude = static_cast<float>(y.attention_factor.value_or(
      both ? yarn_magnitude(y.factor, y.mscale) / yarn_magnitude(y.factor, y.mscale_all_dim) : yarn_magnitude(y.factor, 1.0)));
  return spec;
}

RopeSpec RopeConfig::build(std::int64_t n_rotary, backend::RopeStyle style) const {
  return yarn ? yarn_rope(n_rotary, theta, *yarn, style) : plain_rope(n_rotary, theta, style);
}

RopeConfig read_rope(format::ModelConfig& config, double default_theta) {
  const std::string& origin = config.origin();
  const Json* fresh = config.find("rope_parameters");
  const Json* old = config.find("rope_scaling");
  const Json* p = fresh != nullptr ? fresh : old;
  const std::string_view holder = fresh != nullptr ? "rope_parameters" : "rope_scaling";
  if (p != nullptr && !p->is_object()) fail(ErrorCode::InvalidModel, "{}: \"{}\" must be an object", origin, holder);
  RopeConfig out;
  out.theta = config.find_number({"rope_theta"}).value_or(default_theta);
  out.partial_factor = config.find_number({"partial_rotary_factor"});
  if (p != nullptr) {
    out.theta = number_or(*p, "rope_theta", out.theta, origin);
    if (const auto f = json_number(*p, "partial_rotary_factor", origin)) out.partial_factor = f;
    const std::string_view key = json_find(*p, "rope_type") != nullptr ? "rope_type" : "type";
    const std::string type = json_string(*p, key, origin).value_or("default");
    if (type == "yarn" || type.ends_with("_yarn"))  // vendors prefix their name
      out.yarn = read_yarn(*p, config);
    else if (type != "default" && type != "mrope")
      fail(ErrorCode::Unsupported, "{}: \"{}\" in \"{}\" is \"{}\"; supported are: default, mrope, yarn", origin, key, holder, type);
  }
  if (!(out.theta > 1.0) || !std::isfinite(out.theta)) fail(ErrorCode::InvalidModel, "{}: \"rope_theta\" must be over 1", origin);
  if (out.partial_factor && !(*out.partial_factor > 0.0 && *out.partial_factor <= 1.0))
    fail(ErrorCode::InvalidModel, "{}: \"partial_rotary_factor\" must be in (0, 1]", origin);
  return out;
}

}  // namespace moeflux::model
