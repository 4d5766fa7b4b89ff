// The published test vectors: codes, scales and values as other implementations write and read them.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "core/json.h"
#include "quant/codes.h"
#include "quant/decode.h"
#include "quant/encode.h"

namespace moeflux::quant {
namespace {

const Json& vectors() {
  static const Json all = [] {
    std::ifstream file(MOEFLUX_SOURCE_DIR "/tests/fixtures/vectors.json");
    std::stringstream text;
    text << file.rdbuf();
    return parse_json(text.str(), "vectors.json");
  }();
  return all;
}

std::vector<std::byte> from_hex(const std::string& hex) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

// Numbers in the file have seven significant digits: half a unit of the seventh.
double printed_precision(double value) { return std::fabs(value) * 0.5e-6; }

float first_float(const std::vector<std::byte>& bytes) {
  std::vector<float> out(1);
  decode_floats(bytes.data(), DType::BF16, out);
  return out[0];
}

TEST(QuantVectors, MlxAffineEncode) {
  const Json& all = vectors();
  ASSERT_EQ(all.at("mlx_affine").size(), 6u);
  for (const Json& v : all.at("mlx_affine")) {
    const int bits = v.at("bits"), group = v.at("group_size");
    SCOPED_TRACE(bits);
    auto values = v.at("w_bf16").get<std::vector<float>>();
    for (float& w : values) w = bf16_to_f32(f32_to_bf16(w));  // printed with fewer digits than bf16 has
    const EncodedMatrix m =
        encode(values, 1, static_cast<std::int64_t>(values.size()), Format::affine(bits, group, DType::BF16));
    EXPECT_EQ(m.data, from_hex(v.at("packed_hex_le")));
    EXPECT_EQ(first_float(m.scales), v.at("scale_bf16").get<float>());
    EXPECT_EQ(first_float(m.biases), v.at("bias_bf16").get<float>());
  }
}

TEST(QuantVectors, MlxAffineDecode) {
  for (const Json& v : vectors().at("mlx_affine")) {
    const int bits = v.at("bits"), group = v.at("group_size");
    SCOPED_TRACE(bits);
    const std::vector<std::byte> codes = from_hex(v.at("packed_hex_le"));
    const std::uint16_t scale = f32_to_bf16(v.at("scale_bf16").get<float>());
    const std::uint16_t bias = f32_to_bf16(v.at("bias_bf16").get<float>());
    MatrixView m;
    m.format = Format::affine(bits, group, DType::BF16);
    m.rows = 1;
    m.cols = group;
    m.data = codes.data();
    m.scales = reinterpret_cast<const std::byte*>(&scale);
    m.biases = reinterpret_cast<const std::byte*>(&bias);
    std::vector<std::int16_t> q(static_cast<std::size_t>(group));
    decode_codes(m, 0, q);
    EXPECT_EQ(q, v.at("q").get<std::vector<std::int16_t>>());
    std::vector<float> w(static_cast<std::size_t>(group));
    decode_row(m, 0, w);
    const auto want = v.at("dequant").get<std::vector<double>>();
    for (std::size_t i = 0; i < w.size(); ++i) {
      // One rounding of the result; the bias bounds what cancels.
      const double bound = printed_precision(want[i]) + std::fabs(v.at("bias_bf16").get<double>()) * 0x1p-24;
      EXPECT_NEAR(static_cast<double>(w[i]), want[i], bound) << i;
    }
  }
}

// A GGUF block holds the scale first and elements i and i + 16 in one byte; ours runs in order.
TEST(QuantVectors, Mxfp4Decode) {
  const Json& all = vectors();
  const Json& v = all.at("gguf_blocks").at("MXFP4");
  const std::vector<std::byte> block = from_hex(v.at("hex"));
  ASSERT_EQ(block.size(), 17u);
  std::vector<std::uint8_t> codes(32);
  for (std::size_t i = 0; i < 16; ++i) {
    codes[i] = static_cast<std::uint8_t>(block[1 + i] & std::byte{15});
    codes[i + 16] = static_cast<std::uint8_t>(block[1 + i] >> 4);
  }
  std::vector<std::byte> ours(16);
  for (std::size_t i = 0; i < 16; ++i) ours[i] = static_cast<std::byte>(codes[2 * i] | codes[2 * i + 1] << 4);
  MatrixView m;
  m.format = Format::mxfp4();
  m.rows = 1;
  m.cols = 32;
  m.data = ours.data();
  m.scales = block.data();
  std::vector<float> w(32);
  decode_row(m, 0, w);
  const auto want = v.at("values").get<std::vector<double>>();
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_NEAR(static_cast<double>(w[i]), want[i], printed_precision(want[i])) << i;
}

TEST(QuantVectors, Fp8E4m3) {
  for (const auto& [key, value] : vectors().at("fp8_e4m3").items()) {
    const float got = e4m3_to_f32(static_cast<std::uint8_t>(std::stoul(key, nullptr, 16)));
    if (value.is_null())
      EXPECT_TRUE(std::isnan(got)) << key;
    else
      EXPECT_EQ(got, value.get<float>()) << key;
  }
}

}  // namespace
}  // namespace moeflux::quant
