// Vendors' layouts and formats of several families: the same numbers as in a plain file give the same bytes of logits.
#include <gtest/gtest.h>

#include <cmath>

#include "support/edit_model.h"
#include "support/expect_error.h"

namespace moeflux::test {
namespace {

std::string layer(int i) { return "model.layers." + std::to_string(i) + "."; }

// kv_b [H (dn + dv), r] as embed_q [H, r, dn] and unembed_out [H, dv, r].
void split_kv_b(EditedModel& m) {
  const auto dim = [&](const char* key) { return m.config[key].get<std::uint64_t>(); };
  const std::uint64_t heads = dim("num_attention_heads"), dn = dim("qk_nope_head_dim"), dv = dim("v_head_dim"), r = dim("kv_lora_rank");
  for (const std::string& name : m.names("kv_b_proj.weight")) {
    const Tensor both = m.take(name);
    Tensor keys{both.dtype, {heads, r, dn}, {}}, values{both.dtype, {heads, dv, r}, {}};
    for (std::uint64_t h = 0; h < heads; ++h) {
      append(keys, transposed(every(both, heads * (dn + dv), h * (dn + dv), 1, dn), dn, r));
      append(values, every(both, heads * (dn + dv), h * (dn + dv) + dn, 1, dv));
    }
    const std::string base = name.substr(0, name.size() - std::string("kv_b_proj.weight").size());
    m.file.tensors[base + "embed_q.weight"] = keys;
    m.file.tensors[base + "unembed_out.weight"] = values;
  }
}

TEST(Formats, LatentAttentionInTwoTensors) {
  for (const char* fixture : {"deepseek_v3-bf16", "deepseek_v2-bf16"}) {
    EditedModel m(fixture);
    const auto want = m.logits();
    split_kv_b(m);
    EXPECT_EQ(m.logits(), want) << fixture;
    EXPECT_EQ(m.logits({.decode = true}), want) << fixture;
  }
}

TEST(Formats, TextModelInsideAWrapper) {
  EditedModel m("deepseek_v3-bf16");
  const auto want = m.logits();
  for (const char* type : {"kimi_k2", "kimi_k25"}) {
    EditedModel wrapped = m;
    wrapped.config["model_type"] = type;
    if (std::string(type) == "kimi_k25") {
      TensorFile renamed;
      for (const auto& [name, t] : m.file.tensors) renamed.tensors["language_model." + name] = t;
      renamed.tensors["vision_tower.patch_embed.weight"] = renamed.tensors["mm_projector.weight"] = {DType::BF16, {2}, std::vector<std::byte>(4)};
      wrapped.file = renamed;
      wrapped.config = {{"model_type", type}, {"text_config", m.config}, {"vision_config", Json::object()}, {"tie_word_embeddings", false}};
    }
    EXPECT_EQ(wrapped.logits(), want) << type;
  }
}

TEST(Formats, DraftLayerIsLeftAlone) {
  EditedModel m("deepseek_v3-bf16");
  const auto want = m.logits();
  m.file.tensors["model.layers.3.eh_proj.weight"] = {DType::BF16, {2}, std::vector<std::byte>(4)};
  EXPECT_EQ(m.logits(), want);
}

// ---- experts with gate and up in turn

struct Experts {
  std::uint64_t n, inner, hidden;
  explicit Experts(const EditedModel& m)
      : n(m.config["num_local_experts"].get<std::uint64_t>()),
        inner(m.config["intermediate_size"].get<std::uint64_t>()),
        hidden(m.config["hidden_size"].get<std::uint64_t>()) {}
};

// Both matrices of every expert as rows of outputs: [E, 2I, D] and [E, D, I].
std::pair<Tensor, Tensor> outputs_first(EditedModel& m, const std::string& base) {
  const Experts e(m);
  const Tensor both = m.take(base + "gate_up_proj"), down = m.take(base + "down_proj");
  std::pair<Tensor, Tensor> out{{both.dtype, {e.n, 2 * e.inner, e.hidden}, {}}, {down.dtype, {e.n, e.hidden, e.inner}, {}}};
  for (std::uint64_t i = 0; i < e.n; ++i) {
    append(out.first, transposed(every(both, e.n, i, 1, 1), e.hidden, 2 * e.inner));
    append(out.second, transposed(every(down, e.n, i, 1, 1), e.inner, e.hidden));
  }
  return out;
}

TEST(Formats, InterleavedExpertsTakenApart) {
  EditedModel m("gpt_oss-bf16");
  const auto want = m.logits();
  const Experts e(m);
  for (int l = 0; l < 2; ++l) {
    const std::string base = layer(l) + "mlp.experts.";
    const auto [both, down] = outputs_first(m, base);
    const Tensor bias = m.take(base + "gate_up_proj_bias"), down_bias = m.take(base + "down_proj_bias");
    Tensor parts[2], biases[2];
    for (std::uint64_t k = 0; k < 2; ++k) {
      parts[k] = every(both, e.n * 2 * e.inner, k, 2, e.n * e.inner);
      parts[k].shape = {e.n, e.inner, e.hidden};
      biases[k] = every(bias, e.n * 2 * e.inner, k, 2, e.n * e.inner);
      biases[k].shape = {e.n, e.inner};
      const std::string name = base + (k == 0 ? "gate_proj" : "up_proj");
      m.file.tensors[name + ".weight"] = parts[k];
      m.file.tensors[name + ".bias"] = biases[k];
    }
    m.file.tensors[base + "down_proj.weight"] = down;
    m.file.tensors[base + "down_proj.bias"] = down_bias;
  }
  EXPECT_EQ(m.logits(), want);
}

// Blocks as published; beside it a plain model of the numbers they stand for, which bf16 holds exactly.
TEST(Formats, Mxfp4Blocks) {
  EditedModel blocks("gpt_oss-bf16");
  EditedModel plain = blocks;
  const Experts e(blocks);
  for (int l = 0; l < 2; ++l) {
    const std::string base = layer(l) + "mlp.experts.";
    const auto [both, down] = outputs_first(blocks, base);
    for (const auto& [name, t] : {std::pair{"gate_up_proj", &both}, std::pair{"down_proj", &down}}) {
      const std::uint64_t rows = t->shape[1], cols = t->shape[2];
      const auto encoded = quant::encode(values_of(*t), static_cast<std::int64_t>(e.n * rows), static_cast<std::int64_t>(cols), quant::Format::mxfp4());
      blocks.file.tensors[base + name + "_blocks"] = raw_tensor(DType::U8, {e.n, rows, cols / 32, 16}, encoded.data);
      blocks.file.tensors[base + name + "_scales"] = raw_tensor(DType::U8, {e.n, rows, cols / 32}, encoded.scales);
      std::vector<float> values(e.n * rows * cols);
      for (std::uint64_t r = 0; r < e.n * rows; ++r)
        quant::decode_row(encoded.view(), static_cast<std::int64_t>(r), std::span(values).subspan(r * cols, cols));
      Tensor stored{DType::F32, {e.n, cols, rows}, {}};
      const Tensor all = f32_tensor({e.n, rows, cols}, values);
      for (std::uint64_t i = 0; i < e.n; ++i) append(stored, transposed(every(all, e.n, i, 1, 1), rows, cols));
      plain.file.tensors[base + name] = stored;
    }
  }
  blocks.config["quantization_config"] = {{"quant_method", "mxfp4"}, {"modules_to_not_convert", Json::array({"model.layers.*.self_attn"})}};
  const auto want = plain.logits();
  EXPECT_EQ(blocks.logits(), want);
  EXPECT_EQ(blocks.logits({.decode = true}), want);
  // Fast precision sees 8-bit activations in the experts: near, not the same.
  const auto fast = blocks.logits({.precision = Precision::Fast});
  EXPECT_NE(fast, want);
  EXPECT_GT(cosine(fast, want), 0.98);

  blocks.file.tensors[layer(1) + "mlp.experts.down_proj_scales"].data[7] = std::byte{255};
  expect_error([&] { blocks.logits(); }, ErrorCode::InvalidModel, {"layer 1", "expert 0", "255"});
}

// ---- FP8 in blocks of 128 x 128

// Replaces "<module>.weight" by codes and scales, and in `plain` by the f32 numbers they stand for.
void to_fp8(EditedModel& m, EditedModel& plain, const std::string& name) {
  const Tensor t = m.file.at(name);
  const std::uint64_t rows = t.shape[0], cols = t.shape[1], scale_cols = (cols + 127) / 128, scale_rows = (rows + 127) / 128;
  const std::vector<float> values = values_of(t);
  std::vector<float> scales(scale_rows * scale_cols, 0.0f), decoded(values.size());
  for (std::uint64_t i = 0; i < values.size(); ++i) {
    float& s = scales[i / cols / 128 * scale_cols + i % cols / 128];
    s = std::max(s, std::fabs(values[i]) / 448.0f);
  }
  Tensor codes{DType::F8E4M3, {rows, cols}, std::vector<std::byte>(values.size())};
  for (std::uint64_t i = 0; i < values.size(); ++i) {
    const float s = scales[i / cols / 128 * scale_cols + i % cols / 128];
    // The encoder picks a scale per row; a row of one value and 448 scales pins it to this one.
    const float pinned[2] = {values[i], 448.0f * s};
    codes.data[i] = quant::encode(pinned, 1, 2, quant::Format::fp8()).data[0];
    const quant::MatrixView one{quant::Format::fp8(), 1, 1, &codes.data[i], reinterpret_cast<const std::byte*>(&s), nullptr};
    quant::decode_row(one, 0, {&decoded[i], 1});
  }
  m.file.tensors[name] = codes;
  m.file.tensors[name + "_scale_inv"] = f32_tensor({scale_rows, scale_cols}, scales);
  plain.file.tensors[name] = f32_tensor({rows, cols}, decoded);
}

Json fp8_config() { return {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"weight_block_size", {128, 128}}}; }

TEST(Formats, Fp8Blocks) {
  for (const char* fixture : {"deepseek_v3-bf16", "minimax_m2-bf16"}) {
    EditedModel m(fixture);
    EditedModel plain = m;
    std::size_t n = 0;
    for (const auto& [name, t] : plain.file.tensors) {
      const bool plain_matrix = name.find("embed_tokens") != std::string::npos || name.find("lm_head") != std::string::npos || name.ends_with("gate.weight");
      if (t.shape.size() == 2 && name.ends_with(".weight") && !plain_matrix && ++n > 0) to_fp8(m, plain, name);
    }
    EXPECT_GT(n, 20u);
    m.config["quantization_config"] = fp8_config();
    const auto want = plain.logits();
    EXPECT_EQ(m.logits(), want) << fixture;
    EXPECT_EQ(m.logits({.precision = Precision::Fast}), want) << fixture;

    m.config["quantization_config"]["weight_block_size"] = {64, 64};
    expect_error([&] { m.logits(); }, ErrorCode::Unsupported, {"weight_block_size"});
    m.config.erase("quantization_config");
    expect_error([&] { m.logits(); }, ErrorCode::Unsupported, {"F8_E4M3", "config.json"});
  }
}

TEST(Formats, Fp8WithoutScales) {
  EditedModel m("deepseek_v3-bf16");
  EditedModel plain = m;
  to_fp8(m, plain, layer(1) + "self_attn.o_proj.weight");
  m.file.tensors.erase(layer(1) + "self_attn.o_proj.weight_scale_inv");
  m.config["quantization_config"] = fp8_config();
  expect_error([&] { m.logits(); }, ErrorCode::InvalidModel, {"o_proj.weight_scale_inv"});
}

// ---- packed symmetric int4

void to_packed(EditedModel& m, EditedModel& plain, const std::string& module) {
  const Tensor t = m.take(module + ".weight");
  const std::uint64_t rows = t.shape[0], cols = t.shape[1];
  const std::vector<float> values = values_of(t);
  std::vector<std::uint16_t> scales;
  std::vector<float> decoded(values.size());
  Tensor packed{DType::I32, {rows, cols / 8}, std::vector<std::byte>(rows * cols / 2)};
  for (std::uint64_t g = 0; g < values.size() / 32; ++g) {
    float top = 0.0f;
    for (std::uint64_t i = 0; i < 32; ++i) top = std::max(top, std::fabs(values[g * 32 + i]));
    scales.push_back(f32_to_bf16(top / 7.0f));
    const float s = bf16_to_f32(scales.back());
    for (std::uint64_t i = g * 32; i < (g + 1) * 32; ++i) {
      const int code = static_cast<int>(std::min(15.0f, std::max(0.0f, std::rint(values[i] / s) + 8.0f)));
      packed.data[i / 2] |= static_cast<std::byte>(i % 2 == 0 ? code : code << 4);
      decoded[i] = static_cast<float>(code - 8) * s;
    }
  }
  m.file.tensors[module + ".weight_packed"] = packed;
  m.file.tensors[module + ".weight_scale"] = raw_tensor(DType::BF16, {rows, cols / 32}, std::as_bytes(std::span(scales)));
  m.file.tensors[module + ".weight_shape"] = {DType::I64, {2}, std::vector<std::byte>(16)};
  plain.file.tensors[module + ".weight"] = f32_tensor({rows, cols}, decoded);
}

Json packed_config() {
  const Json weights = {{"num_bits", 4}, {"group_size", 32}, {"symmetric", true}, {"type", "int"}, {"strategy", "group"}};
  return {{"quant_method", "compressed-tensors"}, {"format", "pack-quantized"}, {"config_groups", {{"group_0", {{"weights", weights}}}}}};
}

TEST(Formats, PackedInt4) {
  EditedModel m("deepseek_v3-bf16");
  m.config["model_type"] = "kimi_k2";
  EditedModel plain = m;
  for (const auto& [name, t] : EditedModel(m).file.tensors)
    if (name.find("mlp.experts.") != std::string::npos || name.find("self_attn.o_proj.weight") != std::string::npos)
      to_packed(m, plain, name.substr(0, name.size() - 7));
  m.config["quantization_config"] = packed_config();
  const auto want = plain.logits();
  EXPECT_EQ(m.logits(), want);
  EXPECT_EQ(m.logits({.decode = true}), want);

  m.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8;
  expect_error([&] { m.logits(); }, ErrorCode::Unsupported, {"num_bits"});
}

// ---- other names

TEST(Formats, ConvertedNamesOfShortlyNamedExperts) {
  for (const char* fixture : {"mixtral-bf16", "minimax_m2-bf16"}) {
    EditedModel m(fixture);
    const auto want = m.logits();
    for (int l = 0; l < 2; ++l)
      for (const auto& [from, to] : {std::pair{"w1", "gate_proj"}, std::pair{"w2", "down_proj"}, std::pair{"w3", "up_proj"}}) {
        Tensor all{DType::BF16, {}, {}};
        for (int e = 0; e < 8; ++e) {
          const Tensor t = m.take(layer(l) + "block_sparse_moe.experts." + std::to_string(e) + "." + from + ".weight");
          all.shape = {8, t.shape[0], t.shape[1]};
          append(all, t);
        }
        m.file.tensors[layer(l) + "block_sparse_moe.switch_mlp." + to + ".weight"] = all;
      }
    EXPECT_EQ(m.logits(), want) << fixture;
  }
}

// Clipping changes the model, and a limit nobody meets does not.
TEST(Formats, ClippedProjections) {
  EditedModel m("olmoe-bf16");
  const auto plain = m.logits();
  m.config["clip_qkv"] = 1000.0;
  EXPECT_EQ(m.logits(), plain);
  m.config["clip_qkv"] = 0.5;
  EXPECT_NE(m.logits(), plain);
}

// A window over everything is no window; a shorter one is.
TEST(Formats, WindowedAttention) {
  EditedModel m("mixtral-bf16");
  const auto plain = m.logits();
  m.config["sliding_window"] = 48;
  EXPECT_EQ(m.logits(), plain);
  m.config["sliding_window"] = 16;
  const auto windowed = m.logits();
  EXPECT_EQ(m.logits({.decode = true}), windowed);
  const auto vocab = plain.size() / 48;
  EXPECT_TRUE(std::equal(windowed.begin(), windowed.begin() + static_cast<std::ptrdiff_t>(16 * vocab), plain.begin()));
  EXPECT_NE(windowed, plain);
}

TEST(Formats, DenseLayersOfAMixture) {
  EditedModel m("qwen3_moe-bf16");
  m.config["mlp_only_layers"] = {1};
  expect_error([&] { m.logits(); }, ErrorCode::InvalidModel, {"model.layers.1.mlp.gate_proj.weight"});
  m.config["mlp_only_layers"] = {2};
  expect_error([&] { m.logits(); }, ErrorCode::InvalidModel, {"mlp_only_layers", "2"});
}

// ---- memory

TEST(Formats, LatentCacheIsWhatTheFormulaSays) {
  const ModelInfo info = inspect_model(fixtures() / "deepseek_v3-bf16");
  EXPECT_EQ(info.kv_bytes_per_token_f16, 3u * (64 + 16) * 2);
  EXPECT_EQ(info.mixers, std::vector<std::string>(3, "latent attention"));
  const auto engine = open_engine(fixtures() / "deepseek_v3-bf16", {});
  EXPECT_EQ(engine->info().kv_bytes_per_token_f16, info.kv_bytes_per_token_f16);
}

// The expected values are those of the plain form.
TEST(Formats, AbsorbedEqualsPlainForm) {
  for (const char* fixture : {"deepseek_v2-bf16", "deepseek_v3-bf16", "deepseek_v3-mlx4"}) {
    const TensorFile g = TensorFile::load(fixtures() / fixture / "golden.safetensors");
    const RunResult r = run(fixtures() / fixture, to_tokens(g.ints("tokens")), {.hidden = true});
    for (const auto& [l, h] : r.hidden) EXPECT_LE(relative_difference(h, g.floats("hidden." + std::to_string(l))), 1e-4) << fixture << " " << l;
  }
}

}  // namespace
}  // namespace moeflux::test
