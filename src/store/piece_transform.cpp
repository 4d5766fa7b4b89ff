#include "store/piece_transform.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/float_bits.h"
#include "quant/decode.h"

namespace moeflux::store {
namespace {

void store_times(std::byte* to, float value, DType dtype) {
  const std::uint16_t bits = dtype == DType::F32 ? std::uint16_t{0} : dtype == DType::BF16 ? f32_to_bf16(value) : f32_to_f16(value);
  const float kept = dtype == DType::F32 ? value : dtype == DType::BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  if (!std::isfinite(kept) || kept != value) fail(ErrorCode::InvalidModel, "{} cannot be held as {}", value, dtype_name(dtype));
  if (dtype == DType::F32)
    std::memcpy(to, &value, 4);
  else
    std::memcpy(to, &bits, 2);
}

void put(const PieceTransform& t, const std::byte* from, std::byte* to) {
  float value = 0.0f;
  quant::decode_floats(from, t.dtype, {&value, 1});
  if (t.value == PieceTransform::Value::ToF32)
    std::memcpy(to, &value, 4);
  else
    store_times(to, value * t.factor, t.dtype);
}

// Square blocks keep both sides of a transposition in the cache.
constexpr std::int64_t kBlock = 64;

// move(source, destination) for every element.
template <class F>
void each_element(const PieceTransform& t, std::span<const std::byte> from, std::span<std::byte> to, const F& move) {
  const std::uint64_t unit = t.source_unit(), out_unit = t.result_unit();
  for (std::int64_t r0 = 0; r0 < t.rows; r0 += kBlock)
    for (std::int64_t c0 = 0; c0 < t.cols; c0 += kBlock)
      for (std::int64_t r = r0; r < std::min(t.rows, r0 + kBlock); ++r) {
        const std::byte* source = from.data() + static_cast<std::uint64_t>(t.first + r / t.row_repeat * t.row_stride) * unit;
        std::byte* row = to.data() + static_cast<std::uint64_t>(r * t.cols) * out_unit;
        for (std::int64_t c = c0; c < std::min(t.cols, c0 + kBlock); ++c)
          move(source + static_cast<std::uint64_t>(c * t.col_stride) * unit, row + static_cast<std::uint64_t>(c) * out_unit);
      }
}

}  // namespace

void apply(const PieceTransform& t, std::span<const std::byte> from, std::span<std::byte> to) {
  if (!t.active() || t.row_repeat < 1) fail(ErrorCode::Internal, "no transform");
  const std::uint64_t unit = t.source_unit();
  const std::int64_t last = t.first + (t.rows - 1) / t.row_repeat * t.row_stride + (t.cols - 1) * t.col_stride;
  if (t.cols < 1 || t.first < 0 || t.row_stride < 0 || t.col_stride < 0 ||
      (static_cast<std::uint64_t>(last) + 1) * unit > from.size() || to.size() != t.result_bytes())
    fail(ErrorCode::Internal, "a transform of [{}, {}] does not fit {} and {} bytes", t.rows, t.cols, from.size(), to.size());
  // Sizes known to the compiler where it counts: transposed 16-bit weights are most of what passes here.
  if (t.value != PieceTransform::Value::Copy)
    each_element(t, from, to, [&](const std::byte* a, std::byte* b) { put(t, a, b); });
  else if (unit == 2)
    each_element(t, from, to, [](const std::byte* a, std::byte* b) { std::memcpy(b, a, 2); });
  else
    each_element(t, from, to, [unit](const std::byte* a, std::byte* b) { std::memcpy(b, a, unit); });
}

}  // namespace moeflux::store
