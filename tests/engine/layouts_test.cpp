// The same weights in every published layout give the same bytes.
#include <gtest/gtest.h>

#include <fstream>

#include "support/evaluate.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::test {
namespace {

namespace fs = std::filesystem;

const char* const kFixture = "qwen3_5_moe-bf16";
constexpr int kLayers = 4, kExperts = 8;

TensorFile original() { return TensorFile::load(fixtures() / kFixture / "model.safetensors"); }

std::vector<TokenId> tokens() { return to_tokens(TensorFile::load(fixtures() / kFixture / "golden.safetensors").ints("tokens")); }

std::vector<float> expected() { return run(fixtures() / kFixture, tokens(), {}).logits; }

TensorFile with_prefix(const TensorFile& in, const std::string& prefix) {
  TensorFile out;
  out.metadata = in.metadata;
  for (const auto& [name, t] : in.tensors)
    out.tensors[name.starts_with("model.") ? prefix + name.substr(6) : name] = t;
  return out;
}

void append_data(Tensor& to, const Tensor& from) { to.data.insert(to.data.end(), from.data.begin(), from.data.end()); }

// experts.gate_up_proj [E, 2I, D] and experts.down_proj [E, D, I] from one tensor per expert.
TensorFile with_fused_experts(TensorFile file, const std::string& prefix) {
  for (int l = 0; l < kLayers; ++l) {
    const std::string base = prefix + "layers." + std::to_string(l) + ".mlp.experts.";
    Tensor both{DType::BF16, {}, {}}, down{DType::BF16, {}, {}};
    for (int e = 0; e < kExperts; ++e) {
      const std::string one = base + std::to_string(e) + ".";
      const Tensor& gate = file.at(one + "gate_proj.weight");
      both.shape = {kExperts, 2 * gate.shape[0], gate.shape[1]};
      append_data(both, gate);
      append_data(both, file.at(one + "up_proj.weight"));
      down.shape = {kExperts, file.at(one + "down_proj.weight").shape[0], file.at(one + "down_proj.weight").shape[1]};
      append_data(down, file.at(one + "down_proj.weight"));
      for (const char* part : {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}) file.tensors.erase(one + part);
    }
    file.tensors[base + "gate_up_proj"] = both;
    file.tensors[base + "down_proj"] = down;
  }
  return file;
}

// switch_mlp.gate_proj.weight [E, I, D]: the converted layout, unquantized.
TensorFile with_stacked_experts(TensorFile file, const std::string& prefix) {
  for (int l = 0; l < kLayers; ++l) {
    const std::string base = prefix + "layers." + std::to_string(l) + ".mlp.";
    for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
      Tensor all{DType::BF16, {}, {}};
      for (int e = 0; e < kExperts; ++e) {
        const std::string one = base + "experts." + std::to_string(e) + "." + part + ".weight";
        const Tensor& t = file.at(one);
        all.shape = {kExperts, t.shape[0], t.shape[1]};
        append_data(all, t);
        file.tensors.erase(one);
      }
      file.tensors[base + "switch_mlp." + part + ".weight"] = all;
    }
  }
  return file;
}

std::vector<float> logits_of(const TensorFile& file) {
  const TempDir dir;
  copy_configs(fixtures() / kFixture, dir.path());
  file.save(dir / "model.safetensors");
  return run(dir.path(), tokens(), {}).logits;
}

TEST(Layouts, OtherPrefix) { EXPECT_EQ(logits_of(with_prefix(original(), "model.language_model.")), expected()); }

TEST(Layouts, FusedExperts) { EXPECT_EQ(logits_of(with_fused_experts(original(), "model.")), expected()); }

TEST(Layouts, FusedExpertsUnderTheOtherPrefix) {
  EXPECT_EQ(logits_of(with_fused_experts(with_prefix(original(), "model.language_model."), "model.language_model.")), expected());
}

TEST(Layouts, StackedPlainExperts) { EXPECT_EQ(logits_of(with_stacked_experts(original(), "model.")), expected()); }

TEST(Layouts, VisionAndDraftTensorsAreLeftAlone) {
  TensorFile file = original();
  const Tensor extra{DType::BF16, {2, 3}, std::vector<std::byte>(12)};
  file.tensors["model.visual.patch_embed.weight"] = extra;
  file.tensors["mtp.fc.weight"] = extra;
  EXPECT_EQ(logits_of(file), expected());
}

TEST(Layouts, NestedTextConfig) {
  const TempDir dir;
  std::ifstream in(fixtures() / kFixture / "config.json");
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  dir.write("config.json", R"({"model_type": "qwen3_5_moe", "tie_word_embeddings": false, "text_config": )" + text + "}");
  with_prefix(original(), "model.language_model.").save(dir / "model.safetensors");
  EXPECT_EQ(run(dir.path(), tokens(), {}).logits, expected());
}

// Experts and trunk spread over shards in an order of no use.
TEST(Layouts, Sharded) {
  const TempDir dir;
  copy_configs(fixtures() / kFixture, dir.path());
  TensorFile shards[3];
  std::string map;
  std::size_t i = 0;
  for (const auto& [name, t] : original().tensors) {
    const std::size_t s = i++ * 7 % 3;
    shards[s].tensors[name] = t;
    map += (map.empty() ? "" : ", ") + ("\"" + name + "\": \"model-0000" + std::to_string(s + 1) + "-of-00003.safetensors\"");
  }
  for (std::size_t s = 0; s < 3; ++s) shards[s].save(dir / ("model-0000" + std::to_string(s + 1) + "-of-00003.safetensors"));
  dir.write("model.safetensors.index.json", "{\"metadata\": {}, \"weight_map\": {" + map + "}}");
  EXPECT_EQ(run(dir.path(), tokens(), {}).logits, expected());
}

// Stored 1 + w and [C, K, 1] as a converter writes them, everything else unchanged: the same model up to the rounding of
// 1 + w, which is exact here because the norms are written as f32.
TEST(Layouts, ConvertedNormsAndConvolution) {
  TensorFile file = original();
  file.metadata["format"] = "mlx";
  for (auto& [name, t] : file.tensors) {
    if (name.ends_with("conv1d.weight")) t.shape = {t.shape[0], t.shape[2], 1};
    if (!name.ends_with("norm.weight") || name.find("linear_attn") != std::string::npos) continue;
    const auto bits = t.as<std::uint16_t>();
    std::vector<float> values;
    for (std::uint16_t b : bits) values.push_back(1.0f + std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16));
    t = {DType::F32, t.shape, std::vector<std::byte>(values.size() * 4)};
    std::memcpy(t.data.data(), values.data(), t.data.size());
  }
  EXPECT_EQ(logits_of(file), expected());
}

TEST(Layouts, TiedHead) {
  TensorFile file = original();
  file.tensors["lm_head.weight"] = file.at("model.embed_tokens.weight");
  const auto want = logits_of(file);
  file.tensors.erase("lm_head.weight");
  const TempDir dir;
  std::ifstream in(fixtures() / kFixture / "config.json");
  std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  const std::string from = "\"tie_word_embeddings\": false";
  text.replace(text.find(from), from.size(), "\"tie_word_embeddings\": true");
  dir.write("config.json", text);
  file.save(dir / "model.safetensors");
  EXPECT_EQ(run(dir.path(), tokens(), {}).logits, want);
}

}  // namespace
}  // namespace moeflux::test
