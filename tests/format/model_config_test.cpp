#include "format/model_config.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "core/json.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::format {
namespace {

using test::expect_error;

// Owns the tree that ModelConfig looks at.
struct Parsed {
  explicit Parsed(std::string_view text)
      : root(parse_json(text, "dir/config.json")), config(root, "dir/config.json") {}
  Json root;
  ModelConfig config;
};

TEST(ModelConfig, Types) {
  Parsed plain(R"({"model_type":"flat"})");
  EXPECT_EQ(plain.config.model_type(), "flat");
  EXPECT_EQ(plain.config.text_model_type(), "flat");
  Parsed nested(R"({"model_type":"outer","text_config":{"model_type":"inner"}})");
  EXPECT_EQ(nested.config.model_type(), "outer");
  EXPECT_EQ(nested.config.text_model_type(), "inner");
  Parsed half(R"({"model_type":"outer","text_config":{}})");
  EXPECT_EQ(half.config.text_model_type(), "outer");
  Parsed none("{}");
  expect_error([&] { none.config.model_type(); }, ErrorCode::InvalidModel,
               {"dir/config.json", "model_type", "missing"});
  Parsed number(R"({"model_type":3})");
  expect_error([&] { number.config.model_type(); }, ErrorCode::InvalidModel, {"model_type", "string"});
}

TEST(ModelConfig, RootAndTextConfigMustBeObjects) {
  expect_error([] { Parsed p("[]"); }, ErrorCode::InvalidModel, {"dir/config.json", "not a JSON object"});
  expect_error([] { Parsed p(R"({"text_config":[1]})"); }, ErrorCode::InvalidModel,
               {"dir/config.json", "text_config"});
  Parsed null(R"({"text_config":null,"hidden_size":3})");
  EXPECT_EQ(null.config.find_int({"hidden_size"}), 3);
}

TEST(ModelConfig, AliasesInOrderAndNulls) {
  Parsed p(
      R"({"num_experts":null,"num_local_experts":8,"n_routed_experts":9,"eps":1e-6,"flag":true,"act":"silu"})");
  EXPECT_EQ(p.config.find_int({"num_experts", "num_local_experts", "n_routed_experts"}), 8);
  EXPECT_EQ(p.config.find_int({"n_routed_experts", "num_local_experts"}), 9);
  EXPECT_EQ(p.config.find_int({"num_experts"}), std::nullopt);
  EXPECT_EQ(p.config.find_number({"epsilon", "eps"}), 1e-6);
  EXPECT_EQ(p.config.find_number({"num_local_experts"}), 8.0);
  EXPECT_EQ(p.config.find_bool({"flag"}), true);
  EXPECT_EQ(p.config.find_string({"act"}), "silu");
  EXPECT_EQ(p.config.find_string({"absent"}), std::nullopt);
  EXPECT_EQ(p.config.find("num_experts"), nullptr);
  ASSERT_NE(p.config.find("act"), nullptr);
}

TEST(ModelConfig, WrongTypesNameFileAndKey) {
  Parsed p(R"({"text_config":{"i":1.0,"n":"x","b":0,"s":[]}})");
  expect_error([&] { p.config.find_int({"i"}); }, ErrorCode::InvalidModel,
               {"dir/config.json", "text_config", "\"i\""});
  expect_error([&] { p.config.find_number({"n"}); }, ErrorCode::InvalidModel, {"\"n\"", "number"});
  expect_error([&] { p.config.find_bool({"b"}); }, ErrorCode::InvalidModel, {"\"b\"", "true or false"});
  expect_error([&] { p.config.find_string({"s"}); }, ErrorCode::InvalidModel, {"\"s\"", "string"});
  // A later alias does not hide a broken earlier one.
  expect_error([&] { p.config.find_int({"n", "absent"}); }, ErrorCode::InvalidModel, {"\"n\""});
}

TEST(ModelConfig, TextConfigComesFirstExceptForThree) {
  Parsed p(R"({"hidden_size":1,"tie_word_embeddings":true,"quantization":{"bits":8},
               "text_config":{"hidden_size":2,"tie_word_embeddings":false,"quantization":{"bits":4}}})");
  EXPECT_EQ(p.config.find_int({"hidden_size"}), 2);
  EXPECT_EQ(p.config.find_bool({"tie_word_embeddings"}), true);
  EXPECT_EQ(p.config.find("quantization")->at("bits"), 8);
  Parsed inner(R"({"only_root":5,"tie_word_embeddings":null,"text_config":{"tie_word_embeddings":true}})");
  EXPECT_EQ(inner.config.find_bool({"tie_word_embeddings"}), true);
  EXPECT_EQ(inner.config.find_int({"only_root"}), std::nullopt);
}

TEST(ModelConfig, NeedChecksPresenceAndRange) {
  Parsed p(R"({"a":5,"x":0.5})");
  EXPECT_EQ(p.config.need_int({"z", "a"}, 1, 5), 5);
  EXPECT_EQ(p.config.need_number({"x"}, 0, 1), 0.5);
  expect_error(
      [&] {
        p.config.need_int({"z", "a"}, 1, 4);
      },
      ErrorCode::InvalidModel, {"dir/config.json", "\"a\" is 5", "1 to 4"});
  expect_error([&] { p.config.need_int({"a"}, 6, 9); }, ErrorCode::InvalidModel, {"\"a\" is 5"});
  expect_error(
      [&] {
        p.config.need_int({"y", "z"}, 1, 4);
      },
      ErrorCode::InvalidModel, {"\"y\" or \"z\"", "missing"});
  expect_error([&] { p.config.need_number({"x"}, 0.6, 1); }, ErrorCode::InvalidModel, {"\"x\" is 0.5"});
  expect_error([&] { p.config.need_number({"w"}, 0, 1); }, ErrorCode::InvalidModel, {"\"w\"", "missing"});
}

TEST(ModelConfig, RequireAbsentOr) {
  Parsed p(R"({"model_type":"m","a":false,"b":true,"n":1,"z":null})");
  p.config.require_absent_or("a", false);
  p.config.require_absent_or("absent", false);
  p.config.require_absent_or("z", 3);
  p.config.require_absent_or("n", 1.0);
  expect_error([&] { p.config.require_absent_or("b", false); }, ErrorCode::Unsupported,
               {"dir/config.json", "\"b\"", "true", "\"m\""});
  expect_error([&] { p.config.require_absent_or("n", "x"); }, ErrorCode::Unsupported, {"\"n\""});
  EXPECT_TRUE(p.config.unknown_keys().empty()) << "looking is understanding";
}

TEST(ModelConfig, UnknownKeysInFileOrder) {
  Parsed p(
      R"({"zeta":1,"model_type":"m","hidden_size":4,"alpha":{"deep":1},"nothing":null,"architectures":["A"],
               "output_hidden_states":true,"mtp_layers":1,"vision_start_token_id":9,"vision_other":1,"unsloth_fixed":true,
               "attention_bias":false,"taken":2})");
  p.config.find_int({"hidden_size"});
  p.config.accept({"taken"});
  EXPECT_EQ(p.config.unknown_keys(), (std::vector<std::string>{"zeta", "alpha", "vision_other"}));
  p.config.reject_meaningful_leftovers();
}

TEST(ModelConfig, KeysWithoutEffectAreSilent) {
  for (const char* key : {"_name_or_path",
                          "architectures",
                          "auto_map",
                          "attention_dropout",
                          "aux_loss_alpha",
                          "bos_token_id",
                          "chunk_size_feed_forward",
                          "dtype",
                          "torch_dtype",
                          "ep_size",
                          "eos_token_id",
                          "pad_token_id",
                          "id2label",
                          "label2id",
                          "initializer_range",
                          "initial_context_length",
                          "is_encoder_decoder",
                          "max_position_embeddings",
                          "max_window_layers",
                          "mlp_dropout",
                          "output_x",
                          "pretraining_tp",
                          "problem_type",
                          "qk_head_dim",
                          "return_dict",
                          "router_aux_loss_coef",
                          "router_jitter_noise",
                          "seq_aux",
                          "transformers_version",
                          "use_cache",
                          "num_nextn_predict_layers",
                          "mtp_x",
                          "vision_config",
                          "image_token_id",
                          "video_token_id",
                          "vision_end_token_id",
                          "unsloth_version"}) {
    SCOPED_TRACE(key);
    Parsed p(std::string("{\"model_type\":\"m\",\"") + key + "\":12345}");
    EXPECT_TRUE(p.config.unknown_keys().empty());
    EXPECT_NO_THROW(p.config.reject_meaningful_leftovers());
  }
}

TEST(ModelConfig, MeaningfulLeftoversAreRejectedByName) {
  const std::vector<std::pair<std::string, std::string>> cases{{"attention_bias", "true"},
                                                               {"mlp_bias", "true"},
                                                               {"hidden_act", "\"gelu\""},
                                                               {"clip_qkv", "8.0"},
                                                               {"use_sliding_window", "true"},
                                                               {"scoring_func", "\"sigmoid\""},
                                                               {"topk_method", "\"noaux_tc\""},
                                                               {"rope_type", "\"longrope\""},
                                                               {"type", "\"linear\""},
                                                               {"moe_layer_freq", "2"},
                                                               {"attn_output_gate", "false"},
                                                               {"index_topk", "2048"},
                                                               {"index_n_heads", "64"},
                                                               {"sinks", "true"},
                                                               {"attention_sink_bias", "true"},
                                                               {"attention_sinks", "true"},
                                                               {"final_logit_softcapping", "30.0"},
                                                               {"attn_logit_softcapping", "50.0"},
                                                               {"embedding_multiplier", "12"},
                                                               {"logits_scaling", "8"},
                                                               {"rope_scaling", R"({"type":"yarn"})"},
                                                               {"routed_scaling_factor", "2.5"},
                                                               {"norm_topk_prob", "true"},
                                                               {"sliding_window", "128"},
                                                               {"swiglu_limit", "7.0"},
                                                               {"linear_num_key_heads", "2"},
                                                               {"mlp_only_layers", "[0]"},
                                                               {"num_experts_per_tok", "4"}};
  for (const auto& [key, value] : cases) {
    SCOPED_TRACE(key);
    Parsed p(R"({"model_type":"m",")" + key + "\":" + value + "}");
    EXPECT_TRUE(p.config.unknown_keys().empty()) << "known, not unknown";
    expect_error([&] { p.config.reject_meaningful_leftovers(); }, ErrorCode::Unsupported,
                 {"dir/config.json", "\"" + key + "\"", value.substr(0, 6), "\"m\""});
    p.config.find(key);
    EXPECT_NO_THROW(p.config.reject_meaningful_leftovers()) << "asked for";
    Parsed null(R"({"model_type":"m",")" + key + "\":null}");
    EXPECT_NO_THROW(null.config.reject_meaningful_leftovers());
  }
}

TEST(ModelConfig, NeutralValuesAreNotRejected) {
  Parsed p(
      R"({"model_type":"m","attention_bias":false,"hidden_act":"silu","use_sliding_window":false,"moe_layer_freq":1,
               "attn_output_gate":true,"embedding_multiplier":1.0,"mlp_only_layers":[],"n_group":1})");
  EXPECT_NO_THROW(p.config.reject_meaningful_leftovers());
  EXPECT_TRUE(p.config.unknown_keys().empty());
}

// What stands beside text_config is not read, so it may not say anything either.
TEST(ModelConfig, KeysBesideTextConfig) {
  Parsed p(R"({"model_type":"outer","hidden_size":9,"rope_theta":5.0,"head_dim":4,"note":1,"image_token_id":3,
               "tie_word_embeddings":false,
               "text_config":{"model_type":"inner","hidden_size":8,"head_dim":4,"rope_theta":5.0,"extra":1}})");
  p.config.find_int({"hidden_size"});
  p.config.find_int({"head_dim"});
  p.config.find_number({"rope_theta"});
  p.config.find_bool({"tie_word_embeddings"});
  EXPECT_EQ(p.config.unknown_keys(), (std::vector<std::string>{"extra", "hidden_size", "note"}));
  EXPECT_NO_THROW(p.config.reject_meaningful_leftovers());

  Parsed differs(
      R"({"model_type":"outer","rope_theta":6.0,"text_config":{"model_type":"inner","rope_theta":5.0}})");
  differs.config.find_number({"rope_theta"});
  expect_error([&] { differs.config.reject_meaningful_leftovers(); }, ErrorCode::Unsupported,
               {"\"rope_theta\"", "6.0", "beside text_config"});
  differs.config.accept({"rope_theta"});
  EXPECT_NO_THROW(differs.config.reject_meaningful_leftovers());
}

TEST(ModelConfig, HostileKeysInMessages) {
  Parsed p("{\"model_type\":\"m\\u001b[31m\",\"index_\\u001b\":1}");
  try {
    p.config.reject_meaningful_leftovers();
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find('\x1b'), std::string::npos)
        << "no control characters reach a terminal";
  }
}

TEST(ModelConfig, DemoModel) {
  const std::filesystem::path path = std::filesystem::path(MOEFLUX_SOURCE_DIR) / "models/demo/config.json";
  Parsed p(test::slurp(path));
  EXPECT_EQ(p.config.need_int({"num_experts", "num_local_experts", "n_routed_experts"}, 1, 1024), 32);
  EXPECT_EQ(p.config.need_int({"num_experts_per_tok"}, 1, 32), 4);
  EXPECT_EQ(p.config.find_bool({"tie_word_embeddings"}), false);
  expect_error([&] { p.config.reject_meaningful_leftovers(); }, ErrorCode::Unsupported, {"not supported"});
}

}  // namespace
}  // namespace moeflux::format
