#include "core/dtype.h"

#include <gtest/gtest.h>

#include <string>

#include "core/tensor_view.h"

namespace moeflux {
namespace {

TEST(DType, NamesAndBitsRoundTrip) {
  for (int i = 0; i <= static_cast<int>(DType::F4); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype) << i;
    EXPECT_GE(dtype_bits(dtype), 4u);
  }
  EXPECT_EQ(dtype_bits(DType::BF16), 16u);
  EXPECT_EQ(dtype_bits(DType::F4), 4u);
  EXPECT_EQ(dtype_bits(DType::F6E3M2), 6u);
  EXPECT_EQ(dtype_bits(DType::C64), 64u);
  EXPECT_EQ(dtype_from_name("F8_E4M3"), DType::F8E4M3);
}

TEST(DType, UnknownNames) {
  for (const char* name : {"", "f32", "F33", "BF16 ", "F8E4M3"})
    EXPECT_EQ(dtype_from_name(name), std::nullopt) << name;
}

TEST(TensorView, ShapeStridesSlices) {
  float data[24] = {};
  const TensorView v = view_f32(data, {2, 3, 4});
  EXPECT_EQ(v.count(), 24);
  EXPECT_EQ(v.stride(0), 12);
  EXPECT_EQ(v.stride(1), 4);
  EXPECT_TRUE(v.contiguous());
  EXPECT_EQ(v.row(1), data + 12);
  const TensorView tail = v.slice(1, 1);
  EXPECT_EQ(tail.f32(), data + 12);
  EXPECT_EQ(tail.dim(0), 1);
  TensorView gaps = view_f32(data, {2, 4});
  gaps.strides[0] = 12;
  EXPECT_FALSE(gaps.contiguous());
  EXPECT_TRUE(gaps.slice(0, 1).contiguous()) << "a single row has no gap";
  EXPECT_TRUE(TensorView{}.empty());
  EXPECT_EQ(TensorView{}.count(), 0);
  const TensorView halves = make_view(data, DType::F16, {4, 6}).slice(2, 2);
  EXPECT_EQ(halves.data, reinterpret_cast<std::byte*>(data) + 24);
}

}  // namespace
}  // namespace moeflux
