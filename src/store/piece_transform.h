// How bytes of a file become bytes of a record where the two layouts differ: transposed, interleaved or shared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace moeflux::store {

// A matrix of rows x cols elements of the destination, row-major; element (r, c) comes from source element
// first + r / row_repeat * row_stride + c * col_stride. No rows: the bytes are taken as they are.
struct PieceTransform {
  enum class Value : std::uint8_t {
    Copy,   // elements of unit_bytes, any type
    ToF32,  // floats of `dtype` become f32
    Times,  // floats of `dtype`, times `factor`, in the same type; must be exact
  };

  std::int64_t rows = 0, cols = 0;
  std::int64_t first = 0, row_stride = 0, col_stride = 0, row_repeat = 1;
  Value value = Value::Copy;
  std::uint32_t unit_bytes = 0;  // Copy
  DType dtype = DType::F32;      // ToF32, Times
  float factor = 1.0f;           // Times

  bool active() const noexcept { return rows > 0; }
  std::uint64_t source_unit() const noexcept { return value == Value::Copy ? unit_bytes : dtype_bits(dtype) / 8; }
  std::uint64_t result_unit() const noexcept { return value == Value::ToF32 ? 4 : source_unit(); }
  std::uint64_t result_bytes() const noexcept { return static_cast<std::uint64_t>(rows * cols) * result_unit(); }
};

// `to` has result_bytes(). Internal: an element lies outside `from` (a bug of whoever planned it). InvalidModel: a product
// that its type cannot hold exactly.
void apply(const PieceTransform& transform, std::span<const std::byte> from, std::span<std::byte> to);

}  // namespace moeflux::store
