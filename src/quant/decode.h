// Scalar decoding: what every format means, for the reference backend, embeddings and tests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/dtype.h"
#include "quant/format.h"

namespace moeflux::quant {

// One row as f32. out.size() == matrix.cols. Affine: fma(scale, code, bias), rounded once.
void decode_row(const MatrixView& matrix, std::int64_t row, std::span<float> out);

// The codes of one row of a matrix with integer codes (affine: unsigned; MXFP4: kE2m1Twice of the code).
void decode_codes(const MatrixView& matrix, std::int64_t row, std::span<std::int16_t> out);

// Scale and bias of group g of a row as they multiply decode_codes (MXFP4: half the e8m0 scale, no bias).
struct GroupParams {
  float scale;
  float bias;
};
GroupParams group_params(const MatrixView& matrix, std::int64_t row, std::int64_t group);

// Plain values of any float dtype as f32; src may be unaligned.
void decode_floats(const std::byte* src, DType dtype, std::span<float> out);

}  // namespace moeflux::quant
