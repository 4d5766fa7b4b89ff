// Models that cannot be right: an error that names the thing, never a crash.
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "core/json.h"
#include "support/evaluate.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::test {
namespace {

namespace fs = std::filesystem;

// A copy of a fixture that a test may break.
struct Broken {
  TempDir dir;
  TensorFile file;
  Json config;

  explicit Broken(const std::string& fixture) : file(TensorFile::load(fixtures() / fixture / "model.safetensors")) {
    config = parse_json(slurp(fixtures() / fixture / "config.json"), "config.json");
  }
  Json& text() { return config.contains("text_config") ? config["text_config"] : config; }
  void write() {
    dir.write("config.json", config.dump());
    file.save(dir / "model.safetensors");
  }
  void expect(ErrorCode code, const std::vector<std::string>& fragments) {
    write();
    expect_error([&] { open_engine(dir.path(), {}); }, code, fragments);
  }
};

const char* const kPlain = "qwen3_5_moe-bf16";
const char* const kQuantized = "qwen3_5_moe-mlx4";

TEST(BadModel, MissingFolder) {
  expect_error([] { open_engine("/nowhere/at/all", {}); }, ErrorCode::InvalidArgument, {"/nowhere/at/all"});
}

TEST(BadModel, UnknownModelType) {
  Broken b(kPlain);
  b.config["model_type"] = "gpt_next_9000";
  b.expect(ErrorCode::Unsupported, {"config.json", "gpt_next_9000", "qwen3_5_moe"});
}

TEST(BadModel, KeysThatChangeTheMeaning) {
  const std::vector<std::pair<std::string, Json>> cases{
      {"attention_bias", true},          {"hidden_act", "gelu"},    {"attn_output_gate", false},        {"use_sliding_window", true},
      {"final_logit_softcapping", 30.0}, {"index_topk", 2048},      {"embedding_multiplier", 2.0},      {"mlp_only_layers", Json::array({1})},
      {"decoder_sparse_step", 2},        {"mlp_bias", true},        {"attn_logit_softcapping", 50.0},   {"logits_scaling", 8.0}};
  for (const auto& [key, value] : cases) {
    SCOPED_TRACE(key);
    Broken b(kPlain);
    b.config[key] = value;
    b.expect(ErrorCode::Unsupported, {"config.json", key});
  }
}

TEST(BadModel, ValuesThatMakeNoSense) {
  const std::vector<std::pair<std::string, Json>> cases{
      {"num_experts_per_tok", 9},      {"num_key_value_heads", 3},     {"hidden_size", 0},        {"hidden_size", "many"}, {"num_hidden_layers", -1},
      {"linear_num_value_heads", 3},   {"rms_norm_eps", "tiny"},       {"vocab_size", 1.5},       {"head_dim", 0},         {"linear_conv_kernel_dim", 1000},
      {"num_hidden_layers", 99999999}, {"partial_rotary_factor", 7.0}, {"num_experts", 1 << 30}, {"max_position_embeddings", 0}};
  for (const auto& [key, value] : cases) {
    SCOPED_TRACE(key + " = " + value.dump());
    Broken b(kPlain);
    b.config[key] = value;
    if (key == "partial_rotary_factor") b.config["rope_parameters"].erase(key);
    b.expect(ErrorCode::InvalidModel, {"config.json", key});
  }
}

TEST(BadModel, MissingConfigKeys) {
  for (const char* key : {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts", "rms_norm_eps", "vocab_size"}) {
    SCOPED_TRACE(key);
    Broken b(kPlain);
    b.config.erase(key);
    b.expect(ErrorCode::InvalidModel, {"config.json", key});
  }
}

TEST(BadModel, UnknownRopeType) {
  Broken b(kPlain);
  b.config["rope_parameters"]["rope_type"] = "spiral";
  b.expect(ErrorCode::Unsupported, {"config.json", "spiral"});
}

TEST(BadModel, LayerTypes) {
  Broken b(kPlain);
  b.config["layer_types"][2] = "sparse_attention";
  b.expect(ErrorCode::Unsupported, {"layer_types", "sparse_attention"});
  b.config["layer_types"] = Json::array({"full_attention"});
  b.expect(ErrorCode::InvalidModel, {"layer_types"});
}

TEST(BadModel, UnknownKeysAreOneWarning) {
  Broken b(kPlain);
  b.config["frobnicate"] = 7;
  b.config["zzz_new"] = "x";
  b.write();
  std::vector<std::string> warnings;
  EngineOptions o;
  o.model = b.dir.path();
  o.n_threads = 1;
  o.log = [&](LogLevel, std::string_view m) { warnings.emplace_back(m); };
  Engine::open(o);
  int found = 0;
  for (const std::string& w : warnings) found += w.find("frobnicate") != std::string::npos && w.find("zzz_new") != std::string::npos;
  EXPECT_EQ(found, 1);
}

TEST(BadModel, MissingTensorsAreListedWithTheCount) {
  Broken b(kPlain);
  for (int l = 0; l < 4; ++l) b.file.tensors.erase("model.layers." + std::to_string(l) + ".input_layernorm.weight");
  b.file.tensors.erase("model.layers.1.mlp.experts.5.up_proj.weight");
  b.file.tensors.erase("model.norm.weight");
  b.expect(ErrorCode::InvalidModel, {"6 tensors are missing", "model.norm.weight", "model.layers.0.input_layernorm.weight"});
  const ModelInfo info = inspect_model(b.dir.path());
  EXPECT_EQ(info.missing.size(), 7u);  // and tokenizer.json
}

TEST(BadModel, WrongShapes) {
  Broken b(kPlain);
  Tensor& t = b.file.tensors["model.layers.3.self_attn.q_proj.weight"];
  t.shape = {t.shape[1], t.shape[0]};
  b.expect(ErrorCode::InvalidModel, {"model.safetensors", "model.layers.3.self_attn.q_proj.weight", "[128, 512]", "[512, 128]"});
}

TEST(BadModel, WrongDtypes) {
  {
    Broken b(kPlain);
    b.file.tensors["model.layers.0.mlp.gate.weight"].dtype = DType::I16;
    b.expect(ErrorCode::Unsupported, {"model.layers.0.mlp.gate.weight", "I16"});
  }
  {
    Broken b(kPlain);
    b.file.tensors["model.norm.weight"].dtype = DType::U16;
    b.expect(ErrorCode::InvalidModel, {"model.norm.weight", "U16"});
  }
  {
    Broken b(kQuantized);
    b.file.tensors["language_model.lm_head.weight"].dtype = DType::I32;
    b.expect(ErrorCode::InvalidModel, {"language_model.lm_head.weight", "I32"});
  }
}

TEST(BadModel, QuantizationThatContradictsItself) {
  {
    Broken b(kQuantized);
    b.config["quantization"]["bits"] = 8;
    b.expect(ErrorCode::InvalidModel, {"4 bits", "8 bits"});
  }
  {
    Broken b(kQuantized);
    b.file.tensors.erase("language_model.lm_head.biases");
    b.expect(ErrorCode::InvalidModel, {"language_model.lm_head.biases"});
  }
  {
    Broken b(kQuantized);
    b.file.tensors["language_model.lm_head.scales"].shape = {128, 4};
    b.expect(ErrorCode::InvalidModel, {"language_model.lm_head"});
  }
  {
    Broken b(kQuantized);
    b.config.erase("quantization");
    b.config["quantization_config"] = {{"quant_method", "fp8"}};
    b.expect(ErrorCode::Unsupported, {"fp8"});
  }
}

TEST(BadModel, LayoutAndHeaderContradict) {
  Broken b(kPlain);
  b.file.metadata["format"] = "mlx";
  b.expect(ErrorCode::InvalidModel, {"conv1d.weight", "mlx"});
}

TEST(BadModel, TruncatedWeights) {
  Broken b(kPlain);
  b.write();
  fs::resize_file(b.dir / "model.safetensors", fs::file_size(b.dir / "model.safetensors") - 1000);
  expect_error([&] { open_engine(b.dir.path(), {}); }, ErrorCode::InvalidModel, {"model.safetensors"});
}

TEST(BadModel, BrokenTokenizer) {
  const TempDir dir;
  copy_configs(demo_model(), dir.path());
  fs::copy_file(demo_model() / "model.safetensors", dir / "model.safetensors");
  std::string text = slurp(demo_model() / "tokenizer.json");
  dir.write("tokenizer.json", text.substr(0, text.size() / 2));
  expect_error([&] { open_engine(dir.path(), {}); }, ErrorCode::InvalidModel, {"tokenizer.json"});
}

TEST(BadModel, BadGenerationConfig) {
  Broken b(kPlain);
  b.dir.write("generation_config.json", R"({"temperature": "hot"})");
  b.expect(ErrorCode::InvalidModel, {"generation_config.json", "temperature"});
}

TEST(BadModel, BadOptions) {
  expect_error([] { open_engine(fixtures() / kPlain, {.isa = "mmx"}); }, ErrorCode::InvalidArgument, {"mmx", "scalar"});
  const auto engine = open_engine(fixtures() / kPlain, {});
  expect_error([&] { engine->create_session({.ctx_size = 1 << 30}); }, ErrorCode::InvalidArgument, {"4096"});
  expect_error([&] { engine->create_session({.ctx_size = -1}); }, ErrorCode::InvalidArgument, {"-1"});
  expect_error([&] { engine->create_session({.chunk_size = -5}); }, ErrorCode::InvalidArgument, {"-5"});
}

// Any damage to a config or a header ends in success or in an Error.
TEST(BadModel, DamagedConfigs) {
  const std::string config = slurp(fixtures() / kQuantized / "config.json");
  std::mt19937 random(7);
  const TempDir dir;
  fs::copy_file(fixtures() / kQuantized / "model.safetensors", dir / "model.safetensors");
  int errors = 0;
  for (int i = 0; i < 300; ++i) {
    std::string damaged = config;
    for (int k = 0; k < 3; ++k) damaged[random() % damaged.size()] = "0123456789{}[],:\"e-.tfn x"[random() % 25];
    dir.write("config.json", damaged);
    try {
      inspect_model(dir.path());
    } catch (const Error&) {
      ++errors;
    }
  }
  EXPECT_GT(errors, 100);
}

}  // namespace
}  // namespace moeflux::test
