#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/error.h"
#include "quant/codes.h"
#include "quant/decode.h"
#include "quant/encode.h"

namespace moeflux::quant {
namespace {

std::vector<Format> affine_formats() {
  std::vector<Format> formats;
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const int group : {32, 64, 128})
      for (const DType dtype : {DType::BF16, DType::F16, DType::F32})
        formats.push_back(Format::affine(bits, group, dtype));
  return formats;
}

std::vector<float> random_values(std::size_t n, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.02f, 0.05f);
  std::vector<float> values(n);
  for (float& v : values) v = normal(rng);
  return values;
}

TEST(Formats, AffineRoundTrip) {
  unsigned seed = 1;
  for (const Format& f : affine_formats()) {
    SCOPED_TRACE(f.name());
    const std::int64_t rows = 3, cols = 2 * f.group;
    const std::vector<float> values = random_values(static_cast<std::size_t>(rows * cols), seed++);
    const EncodedMatrix m = encode(values, rows, cols, f);
    EXPECT_EQ(m.view().bytes(), m.data.size() + m.scales.size() + m.biases.size());
    std::vector<float> row(static_cast<std::size_t>(cols));
    std::vector<std::int16_t> codes(row.size());
    // Scale and bias are stored with a relative error of half a unit of their type.
    const double storage = f.scale_dtype == DType::BF16  ? 0x1p-9
                           : f.scale_dtype == DType::F16 ? 0x1p-12
                                                         : 0x1p-25;
    for (std::int64_t r = 0; r < rows; ++r) {
      decode_row(m.view(), r, row);
      decode_codes(m.view(), r, codes);
      for (std::int64_t i = 0; i < cols; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const GroupParams p = group_params(m.view(), r, i / f.group);
        EXPECT_LT(codes[at], 1 << f.bits);
        EXPECT_EQ(row[at], std::fma(p.scale, static_cast<float>(codes[at]), p.bias));
        // Codes are off by at most a half, or by one at the end where rounding the edge to a code shifted the
        // grid.
        const double s = std::fabs(static_cast<double>(p.scale)), b = std::fabs(static_cast<double>(p.bias));
        const double error = std::fabs(static_cast<double>(row[at]) -
                                       static_cast<double>(values[static_cast<std::size_t>(r * cols + i)]));
        EXPECT_LE(error, s * 1.01 + storage * (s * codes[at] + b) * 1.01) << i;
      }
    }
  }
}

// Codes at every position of a row, against reading the row's bit stream bit by bit.
TEST(Formats, CodesAreOneBitStream) {
  std::mt19937 rng(7);
  for (const Format& f : affine_formats()) {
    EncodedMatrix m = encode(std::vector<float>(static_cast<std::size_t>(3 * f.group), 1.0f), 3, f.group, f);
    for (std::byte& b : m.data) b = static_cast<std::byte>(rng());
    std::vector<std::int16_t> codes(f.group);
    for (std::int64_t r = 0; r < 3; ++r) {
      decode_codes(m.view(), r, codes);
      const std::byte* row = m.data.data() + static_cast<std::uint64_t>(r) * m.view().row_bytes();
      for (std::size_t i = 0; i < codes.size(); ++i) {
        int want = 0;
        for (std::size_t b = 0; b < f.bits; ++b) {
          const std::size_t bit = i * f.bits + b;
          want |= (static_cast<int>(row[bit / 8]) >> (bit % 8) & 1) << b;
        }
        ASSERT_EQ(codes[i], want) << f.name() << " row " << r << " code " << i;
      }
    }
  }
}

TEST(Formats, ConstantGroups) {
  for (const Format& f : affine_formats())
    for (const float value : {0.0f, 1.0f, -2.5f}) {
      const EncodedMatrix m = encode(std::vector<float>(f.group, value), 1, f.group, f);
      std::vector<float> row(f.group);
      decode_row(m.view(), 0, row);
      for (const float w : row) ASSERT_EQ(w, value) << f.name();
    }
}

TEST(Formats, Mxfp4RoundTrip) {
  // Every representable value of a group comes back; the largest magnitude is 6, so the scale is the intended
  // one.
  for (const int exponent : {-20, -1, 0, 3}) {
    std::vector<float> values(64);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = std::ldexp(static_cast<float>(kE2m1Twice[i % 16]) / 2.0f, exponent);
    const EncodedMatrix m = encode(values, 1, 64, Format::mxfp4());
    EXPECT_EQ(m.scales.size(), 2u);
    EXPECT_TRUE(m.biases.empty());
    std::vector<float> row(64);
    decode_row(m.view(), 0, row);
    EXPECT_EQ(row, values);
  }
  const std::vector<float> values = random_values(320, 5);
  const EncodedMatrix m = encode(values, 2, 160, Format::mxfp4());
  std::vector<float> row(160);
  for (std::int64_t r = 0; r < 2; ++r) {
    decode_row(m.view(), r, row);
    for (std::size_t i = 0; i < row.size(); ++i) {
      // The widest gap between e2m1 values is 2 (from 4 to 6), so 1 unit of scale; beyond 6 the scale's own
      // rounding (2^0.5) leaves up to 6 * (2^0.5 - 1) < 2.5 units.
      const double scale =
          2.0 * static_cast<double>(group_params(m.view(), r, static_cast<std::int64_t>(i / 32)).scale);
      EXPECT_NEAR(static_cast<double>(row[i]),
                  static_cast<double>(values[static_cast<std::size_t>(r) * 160 + i]), 2.5 * scale);
    }
  }
}

TEST(Formats, E8m0Scales) {
  for (int u = 0; u < 255; ++u) {
    EXPECT_EQ(static_cast<double>(e8m0_to_f32(static_cast<std::uint8_t>(u))), std::ldexp(1.0, u - 127));
    EXPECT_EQ(static_cast<double>(e8m0_half_to_f32(static_cast<std::uint8_t>(u))), std::ldexp(1.0, u - 128));
  }
}

TEST(Formats, E4m3ByFields) {
  for (int u = 0; u < 256; ++u) {
    const int exponent = u >> 3 & 15, mantissa = u & 7;
    const float got = e4m3_to_f32(static_cast<std::uint8_t>(u));
    if ((u & 127) == 127) {
      EXPECT_TRUE(std::isnan(got));
      continue;
    }
    const double want = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    EXPECT_EQ(static_cast<double>(got), u >= 128 ? -want : want) << u;
  }
}

TEST(Formats, PlainFormats) {
  const std::vector<float> values = random_values(21, 9);
  for (const Format& f : {Format::f32(), Format::f16(), Format::bf16()}) {
    const EncodedMatrix m = encode(values, 3, 7, f);
    std::vector<float> row(7);
    for (std::int64_t r = 0; r < 3; ++r) {
      decode_row(m.view(), r, row);
      for (std::size_t i = 0; i < 7; ++i) {
        const float v = values[static_cast<std::size_t>(r) * 7 + i];
        const float want = f.kind == FormatKind::F32   ? v
                           : f.kind == FormatKind::F16 ? f16_to_f32(f32_to_f16(v))
                                                       : bf16_to_f32(f32_to_bf16(v));
        EXPECT_EQ(row[i], want);
      }
    }
  }
}

TEST(Formats, SliceRows) {
  std::vector<Format> formats = affine_formats();
  formats.insert(formats.end(), {Format::f32(), Format::f16(), Format::bf16(), Format::mxfp4()});
  for (const Format& f : formats) {
    const std::int64_t cols = f.quantized() ? 2 * f.group : 11;
    const EncodedMatrix m = encode(random_values(static_cast<std::size_t>(6 * cols), 3), 6, cols, f);
    const MatrixView part = m.view().slice_rows(2, 3);
    EXPECT_EQ(part.rows, 3);
    EXPECT_EQ(part.bytes() * 2, m.view().bytes());
    std::vector<float> a(static_cast<std::size_t>(cols)), b(a.size());
    for (std::int64_t r = 0; r < 3; ++r) {
      decode_row(part, r, a);
      decode_row(m.view(), r + 2, b);
      EXPECT_EQ(a, b) << f.name();
    }
  }
}

TEST(Formats, SizesAndNames) {
  EXPECT_EQ(Format::affine(4, 64, DType::BF16).matrix_bytes(10, 128), 10u * (64 + 2 * 4));
  EXPECT_EQ(Format::affine(3, 32, DType::F32).matrix_bytes(2, 32), 2u * (12 + 8));
  EXPECT_EQ(Format::mxfp4().matrix_bytes(4, 64), 4u * (32 + 2));
  EXPECT_EQ(Format::bf16().matrix_bytes(4, 3), 24u);
  EXPECT_EQ(Format::affine(4, 64, DType::BF16).name(), "affine 4-bit g64");
  EXPECT_EQ(Format::affine(6, 128, DType::F16).name(), "affine 6-bit g128 f16");
  EXPECT_EQ(Format::mxfp4().name(), "mxfp4");
}

TEST(Formats, WhatDoesNotExist) {
  EXPECT_THROW(Format::affine(7, 64, DType::BF16), Error);
  EXPECT_THROW(Format::affine(1, 64, DType::BF16), Error);
  EXPECT_THROW(Format::affine(4, 16, DType::BF16), Error);
  EXPECT_THROW(Format::affine(4, 64, DType::F64), Error);
  EXPECT_THROW(Format::affine(260, 64, DType::BF16), Error);
  EXPECT_THROW(encode(std::vector<float>(30), 1, 30, Format::mxfp4()), Error);
  EXPECT_THROW(encode(std::vector<float>(31), 1, 32, Format::mxfp4()), Error);
}

}  // namespace
}  // namespace moeflux::quant
