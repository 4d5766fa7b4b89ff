// A typed, shaped window on memory that somebody else owns.
//
// Views are parameters: never stored past the lease or buffer they point into. The memory may be a
// device's; only the backend that allocated it may dereference `data`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "core/dtype.h"

namespace moeflux {

// Up to four dimensions, row-major with element strides; the last dimension is always contiguous.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::F32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> dims{};
  std::array<std::int64_t, kMaxRank> strides{};  // in elements

  bool empty() const noexcept { return data == nullptr; }
  std::int64_t dim(int i) const noexcept { return dims[static_cast<std::size_t>(i)]; }
  std::int64_t stride(int i) const noexcept { return strides[static_cast<std::size_t>(i)]; }
  std::int64_t count() const noexcept {
    std::int64_t n = rank == 0 ? 0 : 1;
    for (int i = 0; i < rank; ++i) n *= dim(i);
    return n;
  }
  bool contiguous() const noexcept {
    std::int64_t expect = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (dim(i) != 1 && stride(i) != expect) return false;
      expect *= dim(i);
    }
    return true;
  }

  float* f32() const noexcept { return static_cast<float*>(data); }
  std::int32_t* i32() const noexcept { return static_cast<std::int32_t*>(data); }
  std::uint16_t* u16() const noexcept { return static_cast<std::uint16_t*>(data); }

  // Pointer to row i of the first dimension (f32 views).
  float* row(std::int64_t i) const noexcept { return f32() + i * stride(0); }

  // The first n entries of the first dimension, starting at `begin`.
  TensorView slice(std::int64_t begin, std::int64_t n) const noexcept {
    TensorView v = *this;
    if (data != nullptr) v.data = static_cast<std::byte*>(data) + begin * stride(0) * (dtype_bits(dtype) / 8);
    v.dims[0] = n;
    return v;
  }
};

// A contiguous view.
inline TensorView make_view(void* data, DType dtype, std::initializer_list<std::int64_t> dims) noexcept {
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.rank = static_cast<int>(dims.size());
  std::size_t i = 0;
  for (std::int64_t d : dims) v.dims[i++] = d;
  std::int64_t stride = 1;
  for (std::size_t k = dims.size(); k-- > 0;) {
    v.strides[k] = stride;
    stride *= v.dims[k];
  }
  return v;
}

inline TensorView view_f32(float* data, std::initializer_list<std::int64_t> dims) noexcept {
  return make_view(data, DType::F32, dims);
}

// A view of constant memory for an op that only reads it.
inline TensorView view_f32(const float* data, std::initializer_list<std::int64_t> dims) noexcept {
  return make_view(const_cast<float*>(data), DType::F32, dims);
}

}  // namespace moeflux
