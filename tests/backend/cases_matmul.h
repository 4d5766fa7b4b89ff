// The error bound of a matrix product, which the experts' bound builds on.
#pragma once

#include <span>
#include <vector>

#include "backend/op_cases.h"

namespace moeflux::backend::cases {

// Activations in 8 bits as the definition has them.
struct Quantized {
  std::vector<double> x8;  // integers
  std::vector<double> d;   // per group
};
Quantized quantize(std::span<const float> x, std::int64_t group);

// Allowed |error| of every output of W x (+ bias) for one token.
std::vector<double> matmul_bound(const quant::MatrixView& w, const TensorView& bias, std::span<const float> x,
                                 Precision precision);

}  // namespace moeflux::backend::cases
