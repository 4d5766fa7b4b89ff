// The quantization of config.json and the defaults of generation_config.json.
#include <gtest/gtest.h>

#include <filesystem>

#include "format/model_config.h"
#include "core/json.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::format {
namespace {

using test::expect_error;

QuantConfig quant(std::string_view text) {
  return QuantConfig(parse_json(text, "config.json"), "config.json");
}

void expect_params(const std::optional<QuantParams>& got, std::int64_t bits, std::int64_t group_size,
                   const std::string& mode = "affine") {
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->bits, bits);
  EXPECT_EQ(got->group_size, group_size);
  EXPECT_EQ(got->mode, mode);
}

TEST(QuantConfig, Absent) {
  EXPECT_FALSE(QuantConfig().present());
  for (const char* text :
       {"{}", R"({"quantization":null,"quantization_config":null})", R"({"text_config":{}})"}) {
    EXPECT_FALSE(quant(text).present()) << text;
    EXPECT_EQ(quant(text).lookup("x"), std::nullopt);
  }
}

TEST(QuantConfig, DefaultsAndOverrides) {
  const QuantConfig q = quant(R"({"quantization":{"group_size":32,"bits":3,"mode":"affine",
      "model.z":{"group_size":64,"bits":8},"model.a":false,"model.t":true,"model.m":{"mode":"mxfp4"},"model.e":{},
      "model.n":null}})");
  EXPECT_TRUE(q.present());
  EXPECT_EQ(q.quant_method(), "");
  expect_params(q.lookup("anything"), 3, 32);
  expect_params(q.lookup("model.z"), 8, 64);
  expect_params(q.lookup("model.zz"), 3, 32);
  expect_params(q.lookup("model"), 3, 32);
  EXPECT_EQ(q.lookup("model.a"), std::nullopt);
  expect_params(q.lookup("model.t"), 3, 32);
  expect_params(q.lookup("model.m"), 4, 32, "mxfp4");
  expect_params(q.lookup("model.e"), 4, 64);  // an override inherits nothing
  expect_params(q.lookup("model.n"), 3, 32);
}

TEST(QuantConfig, MissingValuesByMode) {
  expect_params(quant(R"({"quantization":{}})").lookup("x"), 4, 64);
  expect_params(quant(R"({"quantization":{"bits":8}})").lookup("x"), 8, 64);
  expect_params(quant(R"({"quantization":{"mode":"affine"}})").lookup("x"), 4, 64);
  expect_params(quant(R"({"quantization":{"mode":"mxfp4"}})").lookup("x"), 4, 32, "mxfp4");
  expect_params(quant(R"({"quantization":{"mode":"nvfp4"}})").lookup("x"), 4, 16, "nvfp4");
  expect_params(quant(R"({"quantization":{"mode":"mxfp8"}})").lookup("x"), 8, 32, "mxfp8");
}

TEST(QuantConfig, WhichObjectCounts) {
  expect_params(quant(R"({"quantization_config":{"bits":6}})").lookup("x"), 6, 64);
  expect_params(quant(R"({"quantization_config":{"bits":6},"quantization":{"bits":5}})").lookup("x"), 5, 64);
  expect_params(quant(R"({"quantization":{"bits":5},"text_config":{"quantization":{"bits":2}}})").lookup("x"),
                5, 64);
  expect_params(quant(R"({"text_config":{"quantization":{"bits":2}}})").lookup("x"), 2, 64);
  expect_params(
      quant(R"({"quantization":{"bits":5},"quantization_config":{"quant_method":"fp8"}})").lookup("x"), 5,
      64);
}

TEST(QuantConfig, OtherMethodsKeepTheirName) {
  for (const char* method : {"fp8", "gptq", "mxfp4"}) {
    const QuantConfig q = quant(std::string(R"({"quantization_config":{"quant_method":")") + method +
                                R"(","weight_block_size":[128,128],"bits":"whatever"}})");
    EXPECT_TRUE(q.present());
    EXPECT_EQ(q.quant_method(), method);
    EXPECT_EQ(q.lookup("x"), std::nullopt);
  }
}

TEST(QuantConfig, VendorMethodsAreCheckedWhereTensorsShowNothing) {
  const auto fp8 = [](const std::string& rest) { return quant(R"({"quantization_config":{"quant_method":"fp8")" + rest + "}}"); };
  EXPECT_EQ(fp8(R"(,"weight_block_size":[128,128],"fmt":"e4m3")").quant_method(), "fp8");
  expect_error([&] { fp8(""); }, ErrorCode::Unsupported, {"weight_block_size"});
  expect_error([&] { fp8(R"(,"weight_block_size":[128,64])"); }, ErrorCode::Unsupported, {"weight_block_size"});
  expect_error([&] { fp8(R"(,"weight_block_size":[128,128],"fmt":"e5m2")"); }, ErrorCode::Unsupported, {"fmt", "e5m2"});

  const auto packed = [](const std::string& weights, const std::string& format = "pack-quantized") {
    return quant(R"({"quantization_config":{"quant_method":"compressed-tensors","format":")" + format + R"(","config_groups":{"g":{"weights":)" +
                 weights + "}}}}");
  };
  EXPECT_EQ(packed(R"({"num_bits":4,"group_size":32,"symmetric":true,"type":"int"})").quant_method(), "compressed-tensors");
  expect_error([&] { packed(R"({"num_bits":4,"group_size":32})", "dense"); }, ErrorCode::Unsupported, {"format", "dense"});
  expect_error([&] { packed(R"({"num_bits":8,"group_size":32})"); }, ErrorCode::Unsupported, {"num_bits"});
  expect_error([&] { packed(R"({"num_bits":4,"group_size":128})"); }, ErrorCode::Unsupported, {"group_size"});
  expect_error([&] { packed(R"({"num_bits":4,"group_size":32,"symmetric":false})"); }, ErrorCode::Unsupported, {"symmetric"});
  expect_error([&] { packed("[]"); }, ErrorCode::InvalidModel, {"weights", "object"});
}

TEST(QuantConfig, BadValuesNameTheirPlace) {
  const auto refused = [](const char* text, ErrorCode code, const std::vector<std::string>& fragments) {
    SCOPED_TRACE(text);
    expect_error([&] { quant(text); }, code, fragments);
  };
  refused(R"({"quantization":4})", ErrorCode::InvalidModel, {"config.json: quantization", "object"});
  refused(R"({"quantization":{"bits":"4"}})", ErrorCode::InvalidModel,
          {"config.json: quantization", "\"bits\""});
  refused(R"({"quantization":{"bits":0}})", ErrorCode::InvalidModel, {"\"bits\" is 0"});
  refused(R"({"quantization":{"bits":33}})", ErrorCode::InvalidModel, {"\"bits\" is 33"});
  refused(R"({"quantization":{"group_size":-64}})", ErrorCode::InvalidModel, {"\"group_size\" is -64"});
  refused(R"({"quantization":{"mode":4}})", ErrorCode::InvalidModel, {"\"mode\""});
  refused(R"({"quantization":{"mode":"q9"}})", ErrorCode::Unsupported, {"mode \"q9\""});
  refused(R"({"quantization":{"m.x":{"bits":true}}})", ErrorCode::InvalidModel,
          {"quantization.m.x", "\"bits\""});
  refused(R"({"text_config":{"quantization_config":{"bits":0}}})", ErrorCode::InvalidModel,
          {"text_config.quantization_config"});
  refused(R"({"quantization_config":{"quant_method":1}})", ErrorCode::InvalidModel, {"quant_method"});
}

TEST(QuantConfig, UnknownKeysAreListed) {
  const QuantConfig q = quant(R"({"quantization":{"bits":4,"skip":["a"],"note":"x","m":false}})");
  EXPECT_EQ(q.unknown_keys(), (std::vector<std::string>{"skip", "note"}));
}

TEST(QuantConfig, Fixture) {
  const std::filesystem::path path =
      std::filesystem::path(MOEFLUX_SOURCE_DIR) / "tests/fixtures/qwen3_5_moe-mlx4/config.json";
  const QuantConfig q = quant(test::slurp(path));
  expect_params(q.lookup("language_model.model.layers.3.mlp.gate"), 8, 64);
  expect_params(q.lookup("language_model.model.layers.3.mlp.switch_mlp.up_proj"), 4, 64);
  EXPECT_TRUE(q.unknown_keys().empty());
}

GenerationDefaults generation(std::string_view text) {
  return parse_generation_config(parse_json(text, "generation_config.json"), "generation_config.json");
}

TEST(GenerationConfig, EosIsAnIdOrAList) {
  EXPECT_TRUE(generation("{}").eos_token_ids.empty());
  EXPECT_TRUE(generation(R"({"eos_token_id":null})").eos_token_ids.empty());
  EXPECT_TRUE(generation(R"({"eos_token_id":[]})").eos_token_ids.empty());
  EXPECT_EQ(generation(R"({"eos_token_id":7})").eos_token_ids, std::vector<std::int64_t>{7});
  EXPECT_EQ(generation(R"({"eos_token_id":[3056,0]})").eos_token_ids, (std::vector<std::int64_t>{3056, 0}));
}

TEST(GenerationConfig, SamplingDefaults) {
  const GenerationDefaults g = generation(
      R"({"temperature":0.8,"top_p":1,"min_p":0.05,"repetition_penalty":1.1,"top_k":40,"do_sample":true,"other":{}})");
  EXPECT_EQ(g.temperature, 0.8);
  EXPECT_EQ(g.top_p, 1.0);
  EXPECT_EQ(g.min_p, 0.05);
  EXPECT_EQ(g.repetition_penalty, 1.1);
  EXPECT_EQ(g.top_k, 40);
  EXPECT_EQ(g.do_sample, true);
  EXPECT_EQ(generation("{}").temperature, std::nullopt);
  EXPECT_EQ(generation(R"({"top_k":null})").top_k, std::nullopt);
}

TEST(GenerationConfig, WrongTypes) {
  for (const char* text :
       {R"({"eos_token_id":"x"})", R"({"eos_token_id":[1,"x"]})", R"({"eos_token_id":[1,null]})",
        R"({"eos_token_id":-1})", R"({"eos_token_id":1.5})", R"({"eos_token_id":[[1]]})",
        R"({"eos_token_id":{"a":1}})", R"({"eos_token_id":18446744073709551615})"}) {
    SCOPED_TRACE(text);
    expect_error([&] { generation(text); }, ErrorCode::InvalidModel,
                 {"generation_config.json", "eos_token_id"});
  }
  expect_error([] { generation(R"({"temperature":"hot"})"); }, ErrorCode::InvalidModel,
               {"generation_config.json", "temperature"});
  expect_error([] { generation(R"({"top_k":1.5})"); }, ErrorCode::InvalidModel, {"top_k"});
  expect_error([] { generation(R"({"do_sample":1})"); }, ErrorCode::InvalidModel, {"do_sample"});
  expect_error([] { generation("[]"); }, ErrorCode::InvalidModel, {"generation_config.json", "object"});
}

}  // namespace
}  // namespace moeflux::format
