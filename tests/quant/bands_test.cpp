#include "quant/bands.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/error.h"

namespace moeflux::quant {
namespace {

// A matrix whose every byte can be told apart from its neighbours, parts `gap` bytes apart.
struct Plain {
  Plain(const Format& format, std::int64_t rows, std::int64_t cols, std::uint64_t gap) {
    view.format = format;
    view.rows = rows;
    view.cols = cols;
    const std::uint64_t n = static_cast<std::uint64_t>(rows), codes = n * view.row_bytes(), scales = n * view.scale_row_bytes();
    memory.resize(codes + 2 * scales + 2 * gap);
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>((i * 2654435761u) >> 13);
    view.data = memory.data();
    view.scales = view.data + codes + gap;
    view.biases = view.scales + scales + gap;
  }
  std::vector<std::byte> memory;
  MatrixView view;
};

std::uint16_t half_at(const std::byte* p) {
  std::uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// Every code and scale is where the definition says, for every format that has bands, with and without gaps between the parts.
TEST(Bands, EveryCodeAndScaleHasItsPlace) {
  HostAllocator scratch;
  for (const int group : {32, 64, 128})
    for (const DType dtype : {DType::BF16, DType::F16})
      for (const std::int64_t rows : {16, 48, 272})
        for (const std::int64_t groups : {1, 2, 7})
          for (const std::uint64_t gap : {0u, 24u}) {
            const Format f = Format::affine(4, group, dtype);
            const std::int64_t cols = group * groups;
            ASSERT_TRUE(has_bands(f, rows, cols));
            const Plain before(f, rows, cols, gap);
            Plain after = Plain(f, rows, cols, gap);
            const MatrixView bands = to_bands(after.view, after.memory.data(), scratch);
            EXPECT_EQ(bands.order, Order::Bands);
            EXPECT_EQ(bands.data, after.view.data);
            EXPECT_EQ(bands.scales, nullptr);
            EXPECT_EQ(bands.biases, nullptr);
            EXPECT_EQ(bands.bytes(), static_cast<std::uint64_t>(rows / kBandRows) * band_bytes(f, cols));
            const auto nibble = [](std::byte b, std::int64_t c) { return std::to_integer<int>(b) >> (c % 2 * 4) & 15; };
            for (std::int64_t r = 0; r < rows; ++r) {
              const std::byte* band = bands.data + static_cast<std::uint64_t>(r / 16) * band_bytes(f, cols);
              for (std::int64_t c = 0; c < cols; ++c) {
                const std::int64_t in_group = c % group;
                const std::byte* at = band + static_cast<std::uint64_t>(c / group) * band_group_bytes(f) + in_group / 8 * 64 + r % 16 * 4 + in_group % 8 / 2;
                const std::byte want = before.view.data[static_cast<std::uint64_t>(r) * before.view.row_bytes() + static_cast<std::uint64_t>(c / 2)];
                ASSERT_EQ(nibble(*at, c), nibble(want, c)) << r << " " << c;
              }
              for (std::int64_t g = 0; g < groups; ++g) {
                const std::byte* at = band + static_cast<std::uint64_t>(g) * band_group_bytes(f) + group * 8 + r % 16 * 4;
                const std::uint64_t from = static_cast<std::uint64_t>(r) * before.view.scale_row_bytes() + static_cast<std::uint64_t>(2 * g);
                ASSERT_EQ(half_at(at), half_at(before.view.scales + from)) << r << " " << g;
                ASSERT_EQ(half_at(at + 2), half_at(before.view.biases + from)) << r << " " << g;
              }
            }
          }
}

TEST(Bands, OnlySomeMatricesHaveThem) {
  EXPECT_FALSE(has_bands(Format::affine(4, 64, DType::F32), 16, 64));
  EXPECT_FALSE(has_bands(Format::affine(8, 64, DType::BF16), 16, 64));
  EXPECT_FALSE(has_bands(Format::mxfp4(), 16, 64));
  EXPECT_FALSE(has_bands(Format::bf16(), 16, 64));
  EXPECT_FALSE(has_bands(Format::affine(4, 64, DType::BF16), 17, 64));
  EXPECT_FALSE(has_bands(Format::affine(4, 64, DType::BF16), 0, 64));
  EXPECT_TRUE(has_bands(Format::affine(4, 64, DType::BF16), 32, 64));
}

// Memory that is not the matrix's alone would be written over.
TEST(Bands, PartsThatLieElsewhereAreRefused) {
  HostAllocator scratch;
  Plain m(Format::affine(4, 64, DType::BF16), 16, 64, 0);
  MatrixView swapped = m.view;
  std::swap(swapped.scales, swapped.biases);
  EXPECT_THROW(to_bands(swapped, m.memory.data(), scratch), Error);
  EXPECT_THROW(to_bands(m.view, m.memory.data() + 1, scratch), Error);
  const MatrixView bands = to_bands(m.view, m.memory.data(), scratch);
  EXPECT_THROW(to_bands(bands, m.memory.data(), scratch), Error);
}

}  // namespace
}  // namespace moeflux::quant
