#include "model/arena.h"

#include <algorithm>

#include "core/checked.h"
#include "core/error.h"

namespace moeflux::model {

TensorView Arena::take(DType dtype, std::initializer_list<std::int64_t> dims) {
  std::size_t bytes = dtype_bits(dtype) / 8;
  for (std::int64_t d : dims) bytes = mul_or_fail(bytes, static_cast<std::size_t>(d), "activation memory");
  const std::size_t at = used_;
  used_ = add_or_fail(used_, static_cast<std::size_t>(round_up(bytes, 64)), "activation memory");
  peak_ = std::max(peak_, used_);
  if (buffer_.empty()) return make_view(nullptr, dtype, dims);
  if (used_ > buffer_.bytes()) fail(ErrorCode::Internal, "activations need {} bytes, {} were planned", used_, buffer_.bytes());
  return make_view(buffer_.data() + at, dtype, dims);
}

}  // namespace moeflux::model
