// Activation memory: one buffer, handed out front to back, given back by marks. Sizing and use run the same code: an arena
// without memory only counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/buffer.h"
#include "core/tensor_view.h"

namespace moeflux::model {

class Arena {
 public:
  Arena() = default;  // counts only: views have no memory
  explicit Arena(Buffer buffer) : buffer_(std::move(buffer)) {}

  // Throws Internal when the buffer is too small: the planner and the blocks disagree.
  TensorView f32(std::initializer_list<std::int64_t> dims) { return take(DType::F32, dims); }
  TensorView i32(std::initializer_list<std::int64_t> dims) { return take(DType::I32, dims); }

  std::size_t mark() const noexcept { return used_; }
  void release(std::size_t mark) noexcept { used_ = mark; }
  std::size_t peak() const noexcept { return peak_; }

 private:
  TensorView take(DType dtype, std::initializer_list<std::int64_t> dims);

  Buffer buffer_;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
};

}  // namespace moeflux::model
