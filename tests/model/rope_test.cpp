#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/json.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::model {
namespace {

const Json& vectors() {
  static const Json kVectors = parse_json(test::slurp(std::string(MOEFLUX_SOURCE_DIR) + "/tests/fixtures/vectors.json"), "vectors.json");
  return kVectors;
}

TEST(Rope, PlainFrequencies) {
  const RopeSpec r = plain_rope(8, 10000.0, backend::RopeStyle::HalfSplit);
  ASSERT_EQ(r.inv_freq.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_FLOAT_EQ(r.inv_freq[static_cast<std::size_t>(i)], std::pow(10000.0f, -0.25f * static_cast<float>(i)));
  EXPECT_EQ(r.magnitude, 1.0f);
}

// The published YaRN settings, against tables made from the formula in f64.
TEST(Rope, YarnTables) {
  struct Setting {
    const char* name;
    std::int64_t n_rotary;
    double base;
    YarnParams yarn;
  };
  const Setting settings[] = {
      {"deepseek_v3", 64, 1e4, {.factor = 40, .original_context = 4096, .mscale = 1, .mscale_all_dim = 1, .attention_factor = {}}},
      {"kimi_k2", 64, 5e4, {.factor = 32, .original_context = 4096, .beta_fast = 1, .mscale = 1, .mscale_all_dim = 1, .attention_factor = {}}},
      {"gpt_oss", 64, 1.5e5, {.factor = 32, .original_context = 4096, .attention_factor = {}, .truncate = false}},
  };
  int found = 0;
  for (const Setting& s : settings) {
    if (!vectors()["yarn"].contains(s.name)) continue;
    ++found;
    const Json& want = vectors()["yarn"][s.name]["inv_freq"];
    const RopeSpec got = yarn_rope(s.n_rotary, s.base, s.yarn, backend::RopeStyle::HalfSplit);
    ASSERT_EQ(got.inv_freq.size(), want.size()) << s.name;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double w = want[i].get<double>();
      EXPECT_NEAR(static_cast<double>(got.inv_freq[i]), w, std::fabs(w) * 1e-6) << s.name << " " << i;
    }
  }
  EXPECT_GE(found, 2);
}

TEST(Rope, YarnMagnitudes) {
  const YarnParams deepseek{.factor = 40, .original_context = 4096, .mscale = 1, .mscale_all_dim = 1, .attention_factor = {}};
  EXPECT_EQ(yarn_rope(64, 1e4, deepseek, backend::RopeStyle::Interleaved).magnitude, 1.0f);
  const YarnParams oss{.factor = 32, .original_context = 4096, .attention_factor = {}, .truncate = false};
  EXPECT_FLOAT_EQ(yarn_rope(64, 1.5e5, oss, backend::RopeStyle::HalfSplit).magnitude, 1.3465736f);
  EXPECT_EQ(yarn_magnitude(0.5, 1.0), 1.0);
}

RopeConfig read(const std::string& text) {
  const Json json = parse_json(text, "config.json");
  format::ModelConfig config(json, "config.json");
  return read_rope(config, 10000.0);
}

TEST(Rope, ReadsOldAndNewKeys) {
  EXPECT_EQ(read("{}").theta, 10000.0);
  EXPECT_EQ(read(R"({"rope_theta": 5e6})").theta, 5e6);
  EXPECT_EQ(read(R"({"rope_theta": 5e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})").theta, 1e6);
  EXPECT_FALSE(read(R"({"rope_scaling": null})").yarn.has_value());
  EXPECT_EQ(read(R"({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}})").yarn->factor, 4.0);
  EXPECT_EQ(read(R"({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024}})").yarn->factor, 4.0);
  EXPECT_EQ(*read(R"({"rope_parameters": {"partial_rotary_factor": 0.5}})").partial_factor, 0.5);
}

TEST(Rope, RefusesWhatItDoesNotKnow) {
  using test::expect_error;
  expect_error([] { read(R"({"rope_scaling": {"rope_type": "longrope"}})"); }, ErrorCode::Unsupported, {"config.json", "longrope"});
  expect_error([] { read(R"({"rope_theta": 0})"); }, ErrorCode::InvalidModel, {"rope_theta"});
  expect_error([] { read(R"({"rope_scaling": {"type": "yarn", "factor": -1, "original_max_position_embeddings": 9}})"); }, ErrorCode::InvalidModel, {"factor"});
  expect_error([] { read(R"({"rope_parameters": 5})"); }, ErrorCode::InvalidModel, {"rope_parameters"});
}

}  // namespace
}  // namespace moeflux::model
