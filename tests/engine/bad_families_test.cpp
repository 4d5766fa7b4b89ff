// Configs of every family that cannot be honoured: an error that names the key.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "model/family.h"
#include "support/edit_model.h"
#include "support/expect_error.h"

namespace moeflux::test {
namespace {

struct BadKey {
  const char* fixture;
  const char* key;
  Json value;
  ErrorCode code;
};

void PrintTo(const BadKey& b, std::ostream* out) { *out << b.fixture << " " << b.key << " = " << b.value.dump(); }

class BadFamily : public testing::TestWithParam<BadKey> {};

TEST_P(BadFamily, NamesTheKey) {
  const BadKey& b = GetParam();
  EditedModel m(b.fixture);
  m.config[b.key] = b.value;
  const TempDir dir;
  m.write(dir);
  expect_error([&] { inspect_model(dir.path()); }, b.code, {"config.json", b.key});
}

constexpr ErrorCode kBad = ErrorCode::InvalidModel, kNo = ErrorCode::Unsupported;

INSTANTIATE_TEST_SUITE_P(
    Keys, BadFamily,
    testing::Values(
        BadKey{"deepseek_v3-bf16", "attention_bias", true, kNo}, BadKey{"deepseek_v3-bf16", "mlp_bias", true, kNo},
        BadKey{"deepseek_v2-bf16", "attention_bias", true, kNo}, BadKey{"deepseek_v2-bf16", "mlp_bias", true, kNo},
        BadKey{"deepseek_v3-bf16", "num_experts_per_tok", 17, kBad}, BadKey{"deepseek_v3-bf16", "n_group", 3, kBad},
        BadKey{"deepseek_v3-bf16", "topk_group", 5, kBad}, BadKey{"deepseek_v3-bf16", "topk_group", 0, kBad},
        BadKey{"deepseek_v3-bf16", "n_group", 16, kBad}, BadKey{"deepseek_v3-bf16", "scoring_func", "softmax", kNo},
        BadKey{"deepseek_v3-bf16", "scoring_func", "tanh", kNo}, BadKey{"glm4_moe-bf16", "scoring_func", "tanh", kNo},
        BadKey{"deepseek_v2-bf16", "scoring_func", "tanh", kNo}, BadKey{"minimax_m2-bf16", "scoring_func", "tanh", kNo},
        BadKey{"deepseek_v2-grouped", "n_group", 3, kBad}, BadKey{"deepseek_v3-bf16", "topk_method", "greedy", kNo},
        BadKey{"deepseek_v3-bf16", "kv_lora_rank", 0, kBad}, BadKey{"deepseek_v3-bf16", "qk_rope_head_dim", 15, kBad},
        BadKey{"deepseek_v3-bf16", "q_lora_rank", -3, kBad}, BadKey{"deepseek_v3-bf16", "moe_layer_freq", 2, kNo},
        BadKey{"deepseek_v3-bf16", "first_k_dense_replace", -1, kBad}, BadKey{"deepseek_v3-bf16", "index_topk", 64, kNo},
        BadKey{"deepseek_v3-bf16", "n_shared_experts", -1, kBad}, BadKey{"deepseek_v2-bf16", "topk_method", "noaux_tc", kNo},
        BadKey{"deepseek_v2-bf16", "scoring_func", "sigmoid", kNo}, BadKey{"glm4_moe-bf16", "num_key_value_heads", 3, kBad},
        BadKey{"glm4_moe-bf16", "n_group", 3, kBad}, BadKey{"glm4_moe-bf16", "hidden_act", "gelu", kNo},
        BadKey{"glm4_moe-bf16", "num_experts_per_tok", 9, kBad}, BadKey{"glm4_moe-bf16", "sliding_window", 64, kNo},
        BadKey{"gpt_oss-bf16", "sliding_window", 0, kBad}, BadKey{"gpt_oss-bf16", "swiglu_limit", -1.0, kBad},
        BadKey{"gpt_oss-bf16", "layer_types", Json::array({"full_attention"}), kBad},
        BadKey{"gpt_oss-bf16", "layer_types", Json::array({"full_attention", "linear_attention"}), kNo},
        BadKey{"gpt_oss-bf16", "num_key_value_heads", 3, kBad}, BadKey{"minimax_m2-bf16", "scoring_func", "softmax", kNo},
        BadKey{"minimax_m2-bf16", "rotary_dim", 33, kBad}, BadKey{"minimax_m2-bf16", "rotary_dim", 64, kBad},
        BadKey{"minimax_m2-bf16", "attn_type_list", Json::array({1, 0}), kNo}, BadKey{"minimax_m2-bf16", "use_qk_norm", false, kNo},
        BadKey{"minimax_m2-bf16", "attention_bias", true, kNo}, BadKey{"mixtral-bf16", "num_attention_heads", 3, kBad},
        BadKey{"mixtral-bf16", "attention_bias", true, kNo}, BadKey{"mixtral-bf16", "sliding_window", -4, kBad},
        BadKey{"mixtral-bf16", "num_experts_per_tok", 9, kBad}, BadKey{"olmoe-bf16", "clip_qkv", -1.0, kBad},
        BadKey{"olmoe-bf16", "attention_bias", true, kNo}, BadKey{"olmoe-bf16", "sinks", true, kNo},
        BadKey{"qwen3_moe-bf16", "use_sliding_window", true, kNo}, BadKey{"qwen3_moe-bf16", "attention_bias", true, kNo},
        BadKey{"qwen3_moe-bf16", "decoder_sparse_step", 0, kBad}, BadKey{"qwen3_moe-bf16", "mlp_only_layers", Json::array({"x"}), kBad},
        BadKey{"qwen3_next-bf16", "linear_num_value_heads", 3, kBad}, BadKey{"qwen3_next-bf16", "attn_output_gate", false, kNo},
        BadKey{"qwen3_next-bf16", "attention_bias", true, kNo}));

// Changes the config of every family's golden; returns how many had something to change.
int in_every_family(const std::function<bool(Json&)>& change, ErrorCode code, const std::vector<std::string>& expected) {
  int n = 0;
  for (const model::Family* f : model::all_families()) {
    EditedModel m(std::string(f->name) + "-bf16");
    Json& config = m.config.contains("text_config") ? m.config["text_config"] : m.config;
    if (!change(config)) continue;
    ++n;
    const TempDir dir;
    m.write(dir);
    SCOPED_TRACE(std::string(f->name));
    expect_error([&] { inspect_model(dir.path()); }, code, expected);
  }
  return n;
}

const int kFamilies = static_cast<int>(model::all_families().size());

TEST(BadFamily, UnknownRopeTypesEverywhere) {
  for (const std::string key : {"rope_type", "type"}) {
    const auto spiral = [&](Json& c) {
      c.erase("rope_scaling");
      c["rope_parameters"].erase("rope_type");
      c["rope_parameters"][key] = "spiral";
      return true;
    };
    EXPECT_EQ(in_every_family(spiral, kNo, {"config.json", "\"" + key + "\"", "rope_parameters", "spiral"}), kFamilies);
    const auto old_spelling = [&](Json& c) {
      c.erase("rope_parameters");
      c["rope_scaling"] = {{key, "spiral"}};
      return true;
    };
    EXPECT_EQ(in_every_family(old_spelling, kNo, {"config.json", "\"" + key + "\"", "rope_scaling", "spiral"}), kFamilies);
  }
}

TEST(BadFamily, MoreExpertsPerTokenThanThereAre) {
  const auto too_many = [](Json& c) {
    c["num_experts_per_tok"] = 1000;
    return true;
  };
  EXPECT_EQ(in_every_family(too_many, kBad, {"config.json", "\"num_experts_per_tok\"", "1000"}), kFamilies);
}

TEST(BadFamily, HeadCountsThatDoNotDivide) {
  const auto five_of_three = [](Json& c) {
    if (c.contains("kv_lora_rank")) return false;  // one latent for all heads: nothing to divide
    c["num_attention_heads"] = 5;
    c["num_key_value_heads"] = 3;
    return true;
  };
  EXPECT_EQ(in_every_family(five_of_three, kBad, {"config.json", "\"num_attention_heads\"", "\"num_key_value_heads\""}), kFamilies - 2);
}

TEST(BadFamily, TypesThatLackSomethingSayWhat) {
  std::vector<std::string> known;
  for (const model::Family* f : model::all_families())
    for (const std::string_view type : f->model_types) known.emplace_back(type);
  const auto check = [&](const char* type, bool dense, const char* missing) {
    EditedModel m("deepseek_v3-bf16");
    m.config["model_type"] = type;
    if (dense) m.config.erase("n_routed_experts");
    const TempDir dir;
    m.write(dir);
    std::vector<std::string> expected = known;
    expected.insert(expected.end(), {type, missing, "missing"});
    expect_error([&] { inspect_model(dir.path()); }, kNo, expected);
  };
  check("deepseek_v32", false, "indexer");
  check("llama", true, "dense");
  check("nobody_knows_it", false, "a description of this family");
  check("nobody_knows_it", true, "names no experts");
}

// The folders are named after what reads them.
TEST(Inspect, NamesTheFamilyOfEveryFixture) {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(fixtures())) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(inspect_model(entry.path()).family, name.substr(0, name.find('-')));
    ++n;
  }
  EXPECT_GE(n, 27);
}

// One tensor of every kind missing at a time, in every family.
TEST(BadFamily, EveryMissingTensorIsNamed) {
  for (const model::Family* f : model::all_families()) {
    const EditedModel whole(std::string(f->name) + "-bf16");
    std::size_t n = 0;
    for (const auto& [name, t] : whole.file.tensors) {
      if (++n % 5 != 0) continue;  // a sample: every family has all kinds more than once
      EditedModel m = whole;
      m.file.tensors.erase(name);
      const TempDir dir;
      m.write(dir);
      const std::vector<std::string> missing = inspect_model(dir.path()).missing;
      EXPECT_TRUE(std::find(missing.begin(), missing.end(), name) != missing.end()) << name;
    }
  }
}

}  // namespace
}  // namespace moeflux::test
