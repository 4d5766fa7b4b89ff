// What a synthetic model consists of: its config.json and its tensors in file order, each with the recipe of
// its bytes.
//
// Magnitudes. A matrix has entries of deviation gain / sqrt(columns), so that a normed input gives outputs of
// size `gain`; what is added to the residual stream has gain sqrt(2 / layers of the full shape), which lets
// the stream grow from 1 to about sqrt(2) over all layers. Head: gain 2.5.
//
// Popularity. Embedding rows share a component of 0.2 (of a total of 1) along the common direction of fill.h,
// so every normed hidden state has one of about 0.2 / size, where size = sqrt(1 + (layer + 1/2) / layers) is
// that of the residual stream. Router row e is a random row of gain 1 plus 1.4 * skew * size * p(e) / columns
// along that direction: its logit is N(0, 1) from the token plus about 0.28 * skew * p(e) from the popularity
// p(e), which has mean 0, variance 1 and an exponential tail. Measured overlaps are in
// docs/synthetic-models.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/synth/catalog.h"
#include "cli/synth/fill.h"

namespace moeflux::cli::synth {

struct SynthOptions {
  std::int64_t n_layers = 0;   // 0: all
  std::int64_t n_experts = 0;  // 0: all
  std::int64_t n_dense = -1;   // layers without experts at the start; -1: as the shape has it
  std::uint64_t seed = 0;
  double skew = 0;
};

struct PlannedTensor {
  std::string name;
  const char* dtype = "";
  std::vector<std::uint64_t> shape;
  std::uint64_t bytes = 0;
  Fill fill;
};

struct Plan {
  Json config;  // config.json
  std::int64_t n_layers = 0, n_experts = 0;
  std::vector<PlannedTensor> tensors;
  std::uint64_t tensor_bytes = 0;
};

// The fewest layers that hold every kind the shape has.
std::int64_t few_layers(const Shape& shape);

// InvalidArgument: more layers or experts than the shape has, or too few for its routing.
Plan make_plan(const Catalog& catalog, const Shape& shape, const SynthOptions& options);

}  // namespace moeflux::cli::synth
