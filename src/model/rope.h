// Rotary frequencies from a config: plain and YaRN.
#pragma once

#include <cstdint>
#include <optional>

#include "format/model_config.h"
#include "model/spec.h"

namespace moeflux::model {

struct YarnParams {
  double factor = 1.0;
  double original_context = 0.0;
  double beta_fast = 32.0, beta_slow = 1.0;
  double mscale = 0.0, mscale_all_dim = 0.0;
  std::optional<double> attention_factor;
  bool truncate = true;
};

// inv_freq[i] = base^(-2i / n_rotary), computed in f64 and rounded once.
RopeSpec plain_rope(std::int64_t n_rotary, double base, backend::RopeStyle style);
RopeSpec yarn_rope(std::int64_t n_rotary, double base, const YarnParams& yarn, backend::RopeStyle style);
// m(s, x) of YaRN: 1 for s <= 1, else 0.1 x ln s + 1.
double yarn_magnitude(double scale, double x);

// What the config says: `rope_parameters` or `rope_scaling`, `rope_theta`, the type. An unknown type is Unsupported and
// named; values that make no sense are InvalidModel.
struct RopeConfig {
  double theta = 0.0;
  std::optional<double> partial_factor;
  std::optional<YarnParams> yarn;

  RopeSpec build(std::int64_t n_rotary, backend::RopeStyle style) const;
};
RopeConfig read_rope(format::ModelConfig& config, double default_theta);

}  // namespace moeflux::model
