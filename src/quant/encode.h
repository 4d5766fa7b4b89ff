// Scalar encoding, matching the published converters bit for bit where they agree with each other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "quant/format.h"

namespace moeflux::quant {

// An owned quantized matrix, for tests and for making models.
struct EncodedMatrix {
  Format format;
  std::int64_t rows = 0, cols = 0;
  std::vector<std::byte> data, scales, biases;
  MatrixView view() const noexcept;
};

// Values [rows, cols] row-major. Affine: per group one extreme of the range is reproduced exactly and codes
// are rounded half to even with the unrounded scale; then scale and bias are rounded to the scale dtype.
// MXFP4: scale 2^rint(log2(max / 6)). FP8: scale max / 448. Plain formats: rounded to nearest even.
EncodedMatrix encode(std::span<const float> values, std::int64_t rows, std::int64_t cols, const Format& format);

}  // namespace moeflux::quant
