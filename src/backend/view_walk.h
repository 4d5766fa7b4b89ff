// Walking over views of host memory whatever their strides: for wrappers, the reference and tests, not for
// kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include <fmt/format.h>

#include "core/float_bits.h"
#include "core/tensor_view.h"

namespace moeflux::backend {

// Elements from the first to just behind the last, gaps included; 0 for a view without elements.
inline std::int64_t view_extent(const TensorView& v) noexcept {
  if (v.count() == 0) return 0;
  std::int64_t last = 0;
  for (int i = 0; i < v.rank; ++i) last += (v.dim(i) - 1) * v.stride(i);
  return last + 1;
}

inline std::size_t view_extent_bytes(const TensorView& v) noexcept {
  return static_cast<std::size_t>(view_extent(v)) * (dtype_bits(v.dtype) / 8);
}

// f(index, offset) for every element in row-major order: its number and its distance from data, in elements.
template <class F>
void each_element(const TensorView& v, F&& f) {
  const std::int64_t n = v.count();
  for (std::int64_t index = 0; index < n; ++index) {
    std::int64_t offset = 0, rest = index;
    for (int i = v.rank - 1; i >= 0; --i) {
      offset += rest % v.dim(i) * v.stride(i);
      rest /= v.dim(i);
    }
    f(index, offset);
  }
}

// The element at an offset as a number: F32, F16, BF16 or I32 (NaN for anything else).
inline double element_value(const TensorView& v, std::int64_t offset) noexcept {
  switch (v.dtype) {
    case DType::F32:
      return static_cast<double>(v.f32()[offset]);
    case DType::F16:
      return static_cast<double>(f16_to_f32(v.u16()[offset]));
    case DType::BF16:
      return static_cast<double>(bf16_to_f32(v.u16()[offset]));
    case DType::I32:
      return static_cast<double>(v.i32()[offset]);
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

// "[7, 2, 64]".
inline std::string shape_text(const TensorView& v) {
  std::string text = "[";
  for (int i = 0; i < v.rank; ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", v.dim(i));
  return text + "]";
}

}  // namespace moeflux::backend
