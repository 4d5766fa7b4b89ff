// The reference, and every other backend, against the published vectors of the formulas.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "backend/test_backends.h"
#include "core/float_bits.h"
#include "core/json.h"

namespace moeflux::backend::cases {
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

using Floats = std::vector<float>;

Floats floats(const Json& j) { return j.get<Floats>(); }

// Inputs and results are printed with 7 digits, a relative error of 0.5e-6 each; the formulas here have
// conditions of a few tens (sums of up to 8 products, exponentials of arguments below 10), computed in f32 by
// some of the backends.
constexpr double kPrinted = 0.5e-6;
void expect_near(const Floats& got, const Json& want, double condition = 16.0) {
  ASSERT_EQ(got.size(), want.size());
  double top = 0.0;
  for (const Json& w : want) top = std::max(top, std::fabs(w.get<double>()));
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(static_cast<double>(got[i]), want[i].get<double>(), condition * kPrinted * top) << i;
}

class Vectors : public testing::TestWithParam<int> {
 protected:
  Vectors()
      : backend_(GetParam() < 0 ? reference()
                                : *cpu_variants()[static_cast<std::size_t>(GetParam())].backend) {
    stream_ = backend_.create_stream();
  }
  template <class Op>
  void run(const Op& op) {
    backend_.run(*stream_, op);
    backend_.synchronize(*stream_);
  }
  Backend& backend_;
  std::unique_ptr<Stream> stream_;
};

TEST_P(Vectors, Rope) {
  const Json& v = vectors().at("rope");
  const auto theta = v.at("theta").get<double>();
  for (const bool half_split : {true, false}) {
    const std::int64_t n = half_split ? 2 : 4;
    Floats x = floats(v.at("x")), inv_freq;
    for (std::int64_t i = 0; i < n; ++i)
      inv_freq.push_back(
          static_cast<float>(std::pow(theta, -static_cast<double>(i) / static_cast<double>(n))));
    Rope op;
    op.x = view_f32(x.data(), {1, 1, 8});
    op.inv_freq = view_f32(inv_freq.data(), {n});
    op.pos0 = v.at("pos");
    op.style = half_split ? RopeStyle::HalfSplit : RopeStyle::Interleaved;
    run(op);
    expect_near(x, v.at(half_split ? "neox_partial_rot_dim4_of_8" : "interleaved_full8"));
  }
}

TEST_P(Vectors, GatedDeltaLayer) {
  const Json& v = vectors().at("gated_delta");
  const std::int64_t hk = v.at("Hk"), hv = v.at("Hv"), dk = v.at("dk"), dv = v.at("dv"), n = v.at("T");
  Floats q = floats(v.at("q")), k = floats(v.at("k")), value = floats(v.at("v")), a = floats(v.at("a"));
  Floats b = floats(v.at("b")), neg_exp_a = floats(v.at("A_log")), dt_bias = floats(v.at("dt_bias"));
  for (float& x : neg_exp_a) x = -std::exp(x);
  const float eps = 1e-6f, scale = 1.0f / std::sqrt(static_cast<float>(dk));
  const TensorView vq = view_f32(q.data(), {n, hk, dk}), vk = view_f32(k.data(), {n, hk, dk});
  run(L2Norm{vq, vq, eps, scale});
  run(L2Norm{vk, vk, eps, 1.0f});
  Floats decay(a.size()), beta(a.size()), state(static_cast<std::size_t>(hv * dv * dk)), y(value.size());
  const TensorView vdecay = view_f32(decay.data(), {n, hv}), vbeta = view_f32(beta.data(), {n, hv});
  run(DeltaGates{view_f32(a.data(), {n, hv}), view_f32(b.data(), {n, hv}), view_f32(neg_exp_a.data(), {hv}),
                 view_f32(dt_bias.data(), {hv}), vdecay, vbeta});
  const TensorView vy = view_f32(y.data(), {n, hv, dv});
  run(GatedDelta{vq, vk, view_f32(value.data(), {n, hv, dv}), vdecay, vbeta,
                 view_f32(state.data(), {hv, dv, dk}), vy});
  expect_near(y, v.at("out"));
  Floats transposed(state.size());
  for (std::int64_t h = 0; h < hv; ++h)
    for (std::int64_t c = 0; c < dv; ++c)
      for (std::int64_t i = 0; i < dk; ++i)
        transposed[static_cast<std::size_t>((h * dk + i) * dv + c)] =
            state[static_cast<std::size_t>((h * dv + c) * dk + i)];
  expect_near(transposed, v.at("final_state_Hv_dk_dv"));
  Floats z = floats(v.at("z")), w = floats(v.at("norm_w"));
  run(GatedRmsNorm{vy, view_f32(z.data(), {n, hv, dv}), view_f32(w.data(), {dv}), vy, eps});
  expect_near(y, v.at("gated_norm_out"), 32.0);
}

TEST_P(Vectors, CausalConv) {
  const Json& v = vectors().at("conv1d");
  const std::int64_t channels = v.at("C"), taps = v.at("K"), n = v.at("T");
  Floats u = floats(v.at("x_T_C")), w = floats(v.at("w_C_K")),
         state = floats(v.at("state_in_K-1_C_oldest_first"));
  Floats y(u.size());
  run(CausalConv{view_f32(u.data(), {n, channels}), view_f32(w.data(), {channels, taps}),
                 view_f32(state.data(), {taps - 1, channels}), view_f32(y.data(), {n, channels})});
  expect_near(y, v.at("silu_out_T_C"));
  EXPECT_EQ(state, floats(v.at("state_out")));
}

struct Routed {
  std::vector<std::int32_t> ids;
  Floats weights;
};

TEST_P(Vectors, RouterSoftmax) {
  const Json& v = vectors().at("router_softmax");
  Floats logits = floats(v.at("logits"));
  const std::int64_t k = v.at("k"), n = static_cast<std::int64_t>(logits.size());
  for (const bool normalize : {false, true}) {
    Routed r{std::vector<std::int32_t>(static_cast<std::size_t>(k)), Floats(static_cast<std::size_t>(k))};
    Route op;
    op.logits = view_f32(logits.data(), {1, n});
    op.ids = make_view(r.ids.data(), DType::I32, {1, k});
    op.weights = view_f32(r.weights.data(), {1, k});
    op.normalize = normalize;
    run(op);
    EXPECT_EQ(r.ids, v.at("idx").get<std::vector<std::int32_t>>());
    expect_near(r.weights, v.at(normalize ? "w_norm" : "w_raw"));
    // Softmax over the chosen alone is the normalized softmax.
    if (!normalize) continue;
    op.normalize = false;
    op.score = RouterScore::SoftmaxOfChosen;
    run(op);
    EXPECT_EQ(r.ids, v.at("idx").get<std::vector<std::int32_t>>());
    expect_near(r.weights, v.at("w_norm"));
  }
}

TEST_P(Vectors, RouterNoauxTc) {
  const Json& v = vectors().at("router_noaux_tc");
  Floats logits = floats(v.at("logits")), bias = floats(v.at("bias"));
  const std::int64_t k = v.at("k"), n = static_cast<std::int64_t>(logits.size());
  Routed r{std::vector<std::int32_t>(static_cast<std::size_t>(k)), Floats(static_cast<std::size_t>(k))};
  Route op;
  op.logits = view_f32(logits.data(), {1, n});
  op.select_bias = view_f32(bias.data(), {n});
  op.ids = make_view(r.ids.data(), DType::I32, {1, k});
  op.weights = view_f32(r.weights.data(), {1, k});
  op.score = RouterScore::Sigmoid;
  op.n_groups = v.at("n_group");
  op.topk_groups = v.at("topk_group");
  op.normalize = true;
  op.norm_eps = 1e-20f;
  op.scaling = v.at("scale");
  run(op);
  EXPECT_EQ(r.ids, v.at("idx").get<std::vector<std::int32_t>>());
  expect_near(r.weights, v.at("w"));
}

TEST_P(Vectors, ClampedGlu) {
  const Json& v = vectors().at("swiglu_oai");
  Floats gate = floats(v.at("gate")), up = floats(v.at("up")), y(gate.size());
  const auto n = static_cast<std::int64_t>(gate.size());
  run(Glu{view_f32(gate.data(), {1, n}), view_f32(up.data(), {1, n}), view_f32(y.data(), {1, n}),
          GluKind::Clamped, 7.0f, 1.702f});
  expect_near(y, v.at("out"));
}

// Heads as wide as there are keys, values the unit vectors: the output is the row of probabilities.
TEST_P(Vectors, SinkSoftmax) {
  const Json& v = vectors().at("sink_softmax");
  Floats scores = floats(v.at("scores"));
  const auto n = static_cast<std::int64_t>(scores.size());
  Floats keys(static_cast<std::size_t>(n * n)), sink{v.at("sink").get<float>()}, y(scores.size());
  for (std::int64_t i = 0; i < n; ++i) keys[static_cast<std::size_t>(i * n + i)] = 1.0f;
  Attention op;
  op.q = view_f32(scores.data(), {1, 1, n});
  op.k = op.v = view_f32(keys.data(), {n, 1, n});
  op.sinks = view_f32(sink.data(), {1});
  op.y = view_f32(y.data(), {1, 1, n});
  op.pos0 = n - 1;
  run(op);
  expect_near(y, v.at("probs"));
}

// A unit vector picks a column of the matrix; Embed gives its row.
TEST_P(Vectors, MlxAffine) {
  for (const Json& v : vectors().at("mlx_affine")) {
    const std::int64_t bits = v.at("bits"), group = v.at("group_size");
    std::vector<std::byte> codes;
    const std::string hex = v.at("packed_hex_le");
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
      codes.push_back(static_cast<std::byte>(std::stoul(hex.substr(i, 2), nullptr, 16)));
    const std::uint16_t scale = f32_to_bf16(v.at("scale_bf16").get<float>()),
                        bias = f32_to_bf16(v.at("bias_bf16").get<float>());
    quant::MatrixView w;
    w.format = quant::Format::affine(bits, group, DType::BF16);
    w.rows = 1;
    w.cols = group;
    w.data = codes.data();
    w.scales = reinterpret_cast<const std::byte*>(&scale);
    w.biases = reinterpret_cast<const std::byte*>(&bias);
    const std::vector<std::int32_t> tokens{0};
    Floats row(static_cast<std::size_t>(group));
    run(Embed{tokens, w, view_f32(row.data(), {1, group})});
    expect_near(row, v.at("dequant"));
    for (const Precision precision : {Precision::Exact, Precision::Fast}) {
      Floats x(static_cast<std::size_t>(group * group)), y(static_cast<std::size_t>(group));
      for (std::int64_t i = 0; i < group; ++i) x[static_cast<std::size_t>(i * group + i)] = 1.0f;
      const std::vector<MatMulPart> parts{{w, {}, view_f32(y.data(), {group, 1})}};
      run(MatMul{view_f32(x.data(), {group, group}), parts, precision});
      expect_near(y, v.at("dequant"));
    }
  }
}

std::vector<int> backends() {
  std::vector<int> out{-1};
  for (std::size_t i = 0; i < cpu_variants().size(); ++i) out.push_back(static_cast<int>(i));
  return out;
}

INSTANTIATE_TEST_SUITE_P(Backends, Vectors, testing::ValuesIn(backends()), [](const auto& test) {
  if (test.param < 0) return std::string("reference");
  const CpuVariant& v = cpu_variants()[static_cast<std::size_t>(test.param)];
  return v.isa + "_" + std::to_string(v.n_threads);
});

}  // namespace
}  // namespace moeflux::backend::cases
