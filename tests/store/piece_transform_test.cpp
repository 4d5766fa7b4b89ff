#include "store/piece_transform.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/float_bits.h"
#include "support/expect_error.h"

namespace moeflux::store {
namespace {

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> out(values.size() * sizeof(T));
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

template <class T, class From>
std::vector<T> applied(const PieceTransform& t, const std::vector<From>& from) {
  std::vector<std::byte> to(t.result_bytes());
  apply(t, bytes_of(from), to);
  std::vector<T> out(to.size() / sizeof(T));
  std::memcpy(out.data(), to.data(), to.size());
  return out;
}

TEST(PieceTransform, Transposes) {
  const std::vector<std::uint16_t> from{1, 2, 3, 4, 5, 6};  // [2, 3]
  EXPECT_EQ((applied<std::uint16_t>({.rows = 3, .cols = 2, .row_stride = 1, .col_stride = 3, .unit_bytes = 2}, from)),
            (std::vector<std::uint16_t>{1, 4, 2, 5, 3, 6}));
}

TEST(PieceTransform, TransposesAcrossBlocks) {
  std::vector<std::uint16_t> from(150 * 70), want;
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint16_t>(i);
  for (std::size_t c = 0; c < 70; ++c)
    for (std::size_t r = 0; r < 150; ++r) want.push_back(from[r * 70 + c]);
  EXPECT_EQ((applied<std::uint16_t>({.rows = 70, .cols = 150, .row_stride = 1, .col_stride = 70, .unit_bytes = 2}, from)), want);
}

TEST(PieceTransform, TakesEveryOtherRow) {
  const std::vector<std::uint8_t> from{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};  // 4 rows of 3 bytes
  EXPECT_EQ((applied<std::uint8_t>({.rows = 2, .cols = 1, .first = 1, .row_stride = 2, .unit_bytes = 3}, from)),
            (std::vector<std::uint8_t>{4, 5, 6, 10, 11, 12}));
}

TEST(PieceTransform, WidensAndRepeats) {
  const std::vector<std::uint16_t> from{f32_to_bf16(1.5f), f32_to_bf16(-2.0f)};
  EXPECT_EQ((applied<float>({.rows = 5, .cols = 1, .row_stride = 1, .col_stride = 1, .row_repeat = 3, .value = PieceTransform::Value::ToF32,
                             .dtype = DType::BF16},
                            from)),
            (std::vector<float>{1.5f, 1.5f, 1.5f, -2.0f, -2.0f}));
}

TEST(PieceTransform, MultipliesExactlyOrNotAtAll) {
  const PieceTransform t{.rows = 1, .cols = 2, .col_stride = 1, .value = PieceTransform::Value::Times, .dtype = DType::BF16, .factor = -8.0f};
  EXPECT_EQ(applied<std::uint16_t>(t, std::vector<std::uint16_t>{f32_to_bf16(0.75f), f32_to_bf16(-3.0f)}),
            (std::vector<std::uint16_t>{f32_to_bf16(-6.0f), f32_to_bf16(24.0f)}));
  test::expect_error([&] { applied<std::uint16_t>(t, std::vector<std::uint16_t>{0x7f7f, 0}); }, ErrorCode::InvalidModel, {"BF16"});
}

TEST(PieceTransform, RefusesToReadOutside) {
  std::vector<std::byte> from(12), to(8);
  PieceTransform t{.rows = 2, .cols = 2, .row_stride = 4, .col_stride = 1, .unit_bytes = 2};
  apply(t, from, to);  // the last element read is number 5
  t.first = 1;
  test::expect_error([&] { apply(t, from, to); }, ErrorCode::Internal, {"12"});
  t.first = -1;
  test::expect_error([&] { apply(t, from, to); }, ErrorCode::Internal, {"12"});
  t.first = 0;
  to.resize(7);
  test::expect_error([&] { apply(t, from, to); }, ErrorCode::Internal, {"7"});
}

}  // namespace
}  // namespace moeflux::store
