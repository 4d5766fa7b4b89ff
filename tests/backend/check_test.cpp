// Bad shapes, types and indices are errors of kind Internal that name op and tensor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "backend/op_cases.h"
#include "core/error.h"

namespace moeflux::backend::cases {
namespace {

using testing::HasSubstr;

template <class Op>
std::string failure(const Op& op) {
  try {
    check(op);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::Internal);
    EXPECT_THAT(e.what(), HasSubstr(Op::kName));
    return e.what();
  }
  return "";
}

// The op as it is passes; after the change it fails with a message that has `text`.
template <class Op>
void expect_failure(const Op& good, const std::function<void(Op&)>& change, const std::string& text) {
  ASSERT_EQ(failure(good), "");
  Op bad = good;
  change(bad);
  const std::string message = failure(bad);
  EXPECT_THAT(message, HasSubstr(text));
  EXPECT_NE(message, "") << text;
}

class Check : public testing::Test {
 protected:
  Memory m{1};
};

TEST_F(Check, Embed) {
  Embed good;
  good.tokens = m.indices({0, 4});
  good.table = m.matrix(5, 64, quant::Format::affine(4, 64, DType::BF16));
  good.y = m.output({2, 64});
  expect_failure<Embed>(
      good,
      [&](Embed& op) {
        op.tokens = m.indices({0, 5});
      },
      "tokens: entry 1 is 5");
  expect_failure<Embed>(
      good,
      [&](Embed& op) {
        op.tokens = m.indices({-1, 0});
      },
      "tokens: entry 0 is -1");
  expect_failure<Embed>(
      good, [&](Embed& op) { op.tokens = m.indices({1}); }, "y: expected [1, 64], found [2, 64]");
  expect_failure<Embed>(
      good, [](Embed& op) { op.table.scales = nullptr; }, "without scales");
  expect_failure<Embed>(
      good, [](Embed& op) { op.table.biases = nullptr; }, "without biases");
  expect_failure<Embed>(
      good, [](Embed& op) { op.table.data = nullptr; }, "table: no data");
  expect_failure<Embed>(
      good, [](Embed& op) { op.table.format.bits = 7; }, "no such format");
  expect_failure<Embed>(
      good, [](Embed& op) { op.y.data = nullptr; }, "without memory");
}

TEST_F(Check, ViewsInGeneral) {
  const Add good{m.random({3, 8}), m.random({3, 8}), m.output({3, 8})};
  expect_failure<Add>(
      good, [](Add& op) { op.b.dtype = DType::F16; }, "b: expected F32, found F16");
  expect_failure<Add>(
      good, [](Add& op) { op.b.dims[1] = 7; }, "b: expected [3, 8], found [3, 7]");
  expect_failure<Add>(
      good, [](Add& op) { op.b.rank = 1; }, "b: expected [3, 8], found [3]");
  expect_failure<Add>(
      good, [](Add& op) { op.a.rank = 3; }, "a: expected 2 dimensions");
  expect_failure<Add>(
      good, [](Add& op) { op.a.rank = 99; }, "a: expected 2 dimensions, found rank 99");
  expect_failure<Add>(
      good, [](Add& op) { op.y.strides[1] = 2; }, "y: last dimension has stride 2");
  expect_failure<Add>(
      good, [](Add& op) { op.y.strides[0] = 7; }, "stride 7");
  expect_failure<Add>(
      good, [](Add& op) { op.y.strides[0] = -8; }, "stride -8");
  expect_failure<Add>(
      good, [](Add& op) { op.y.data = nullptr; }, "y: [3, 8] without memory");
  expect_failure<Add>(
      good, [](Add& op) { op.y.data = static_cast<std::byte*>(op.y.data) + 2; }, "not aligned");
  expect_failure<Add>(
      good, [](Add& op) { op.a.dims[0] = op.b.dims[0] = op.y.dims[0] = -1; }, "negative");
  EXPECT_EQ(failure(Add{good.a, good.b, good.a}), "") << "in place";
  const TensorView none = view_f32(static_cast<float*>(nullptr), {0, 8});
  EXPECT_EQ(failure(Add{none, none, none}), "") << "no tokens need no memory";
}

TEST_F(Check, Norms) {
  const TensorView x = m.random({2, 3, 8}), w = m.random({8}), y = m.output({2, 3, 8});
  const RmsNorm norm{x, w, y, 1e-6f};
  expect_failure<RmsNorm>(
      norm, [&](RmsNorm& op) { op.weight = m.random({7}); }, "weight: expected [8], found [7]");
  expect_failure<RmsNorm>(
      norm, [](RmsNorm& op) { op.x.rank = 1; }, "x: expected 2 or 3 dimensions");
  expect_failure<RmsNorm>(
      norm, [](RmsNorm& op) { op.y.dims[1] = 2; }, "y:");
  expect_failure<RmsNorm>(
      norm, [](RmsNorm& op) { op.x.strides[0] = 20; }, "overlap");
  EXPECT_EQ(failure(RmsNorm{m.random_head_major(2, 3, 8), w, m.random_interleaved(2, 3, 8), 1e-6f}), "");
  const L2Norm l2{x, y, 1e-6f, 1.0f};
  expect_failure<L2Norm>(
      l2, [](L2Norm& op) { op.y.dims[2] = 4; }, "y:");
  const GatedRmsNorm gated{x, m.random({2, 3, 8}), w, y, 1e-6f};
  expect_failure<GatedRmsNorm>(
      gated, [](GatedRmsNorm& op) { op.gate.dims[0] = 1; }, "gate:");
  expect_failure<GatedRmsNorm>(
      gated, [](GatedRmsNorm& op) { op.weight = {}; }, "weight:");
  const AddRmsNorm add{m.random({2, 8}), m.random({2, 8}), w, m.output({2, 8}), 1e-6f};
  expect_failure<AddRmsNorm>(
      add, [](AddRmsNorm& op) { op.y = op.h; }, "y: must not be the memory of h");
  expect_failure<AddRmsNorm>(
      add, [](AddRmsNorm& op) { op.delta.dims[0] = 1; }, "delta:");
  const SigmoidGate gate{x, m.random({2, 3, 8}), y};
  expect_failure<SigmoidGate>(
      gate, [](SigmoidGate& op) { op.gate.dims[1] = 1; }, "gate:");
}

TEST_F(Check, MatMul) {
  const TensorView x = m.random({2, 64});
  const MatMulPart part{m.matrix(5, 64, quant::Format::mxfp4()), m.random({5}), m.output({2, 5})};
  const auto with = [&](const std::function<void(MatMulPart&)>& change) {
    std::vector<MatMulPart> parts{part, part};
    change(parts[1]);
    return failure(MatMul{x, parts, Precision::Fast});
  };
  EXPECT_EQ(with([](MatMulPart&) {}), "");
  EXPECT_THAT(with([](MatMulPart& p) { p.w.cols = 32; }), HasSubstr("w: expected [5, 64], found [5, 32]"));
  EXPECT_THAT(with([](MatMulPart& p) { p.w.scales = nullptr; }), HasSubstr("w: mxfp4 without scales"));
  EXPECT_THAT(with([](MatMulPart& p) { p.w.rows = 4; }), HasSubstr("bias: expected [4], found [5]"));
  EXPECT_THAT(with([](MatMulPart& p) { p.y.dims[0] = 1; }), HasSubstr("y: expected [2, 5]"));
  EXPECT_THAT(with([&](MatMulPart& p) { p.y.data = x.data; }), HasSubstr("memory of x"));
  EXPECT_EQ(with([](MatMulPart& p) { p.bias = {}; }), "");
  EXPECT_THAT(with([](MatMulPart& p) { p.w.order = quant::Order::Bands; }), HasSubstr("w: mxfp4 [5, 64] in bands"));
  {
    const quant::MatrixView w = m.matrix(16, 64, quant::Format::affine(4, 64, DType::BF16));
    quant::MatrixView bands = w;
    bands.scales = bands.biases = nullptr;
    bands.order = quant::Order::Bands;
    const MatMulPart whole{bands, {}, m.output({2, 16})};
    EXPECT_EQ(failure(MatMul{x, {&whole, 1}, Precision::Fast}), "");
    EXPECT_THAT(failure(MatMul{x, {&whole, 1}, Precision::Exact}), HasSubstr("in bands"));
  }
  const TensorView narrow = m.random({2, 48});
  const std::vector<MatMulPart> odd{
      {{quant::Format::affine(4, 32, DType::BF16), 5, 48, part.w.data, part.w.data, part.w.data},
       {},
       part.y}};
  EXPECT_THAT(failure(MatMul{narrow, odd, Precision::Exact}),
              HasSubstr("48 columns are no multiple of the group"));
}

TEST_F(Check, RopeAndCache) {
  Rope rope;
  rope.x = m.random({2, 3, 8});
  rope.inv_freq = m.random({4});
  rope.pos0 = 5;
  expect_failure<Rope>(
      rope, [&](Rope& op) { op.inv_freq = m.random({5}); }, "5 frequencies for heads of 8");
  expect_failure<Rope>(
      rope, [](Rope& op) { op.pos0 = -1; }, "pos0");
  expect_failure<Rope>(
      rope, [](Rope& op) { op.x.rank = 2; }, "x:");
  const CacheWrite write{m.random({2, 8}), m.random({10, 8}), 8};
  expect_failure<CacheWrite>(
      write, [](CacheWrite& op) { op.pos0 = 9; }, "do not fit a cache of 10 rows");
  expect_failure<CacheWrite>(
      write, [](CacheWrite& op) { op.pos0 = INT64_MAX; }, "do not fit");
  expect_failure<CacheWrite>(
      write, [](CacheWrite& op) { op.cache.dtype = DType::BF16; }, "expected F32 or F16");
  expect_failure<CacheWrite>(
      write,
      [&](CacheWrite& op) {
        op.cache = m.random({10, 9});
      },
      "cache:");
}

TEST_F(Check, Attention) {
  Attention good;
  good.q = m.random({2, 4, 8});
  good.k = m.random_f16({10, 2, 8});
  good.v = m.random_f16({10, 2, 8});
  good.sinks = m.random({4});
  good.y = m.output({2, 4, 8});
  good.pos0 = 8;
  expect_failure<Attention>(
      good, [](Attention& op) { op.pos0 = 9; }, "do not fit");
  expect_failure<Attention>(
      good, [](Attention& op) { op.window = -1; }, "window");
  expect_failure<Attention>(
      good,
      [&](Attention& op) {
        op.k = op.v = m.random_f16({10, 3, 8});
      },
      "no multiple");
  expect_failure<Attention>(
      good, [](Attention& op) { op.k.dims[1] = 0; }, "heads of k");
  expect_failure<Attention>(
      good,
      [&](Attention& op) {
        op.v = m.random({10, 2, 8});
      },
      "v: expected F16, found F32");
  expect_failure<Attention>(
      good, [&](Attention& op) { op.sinks = m.random({3}); }, "sinks:");
  expect_failure<Attention>(
      good,
      [&](Attention& op) {
        op.k = m.random_f16({10, 2, 4});
      },
      "k:");
  expect_failure<Attention>(
      good, [](Attention& op) { op.y = op.q; }, "memory of q");
}

TEST_F(Check, RouteAndGlu) {
  Route good;
  good.logits = m.random({2, 12});
  good.select_bias = m.random({12});
  good.ids = m.ints({2, 4});
  good.weights = m.output({2, 4});
  good.score = RouterScore::Sigmoid;
  good.n_groups = 4;
  good.topk_groups = 2;
  expect_failure<Route>(
      good, [](Route& op) { op.n_groups = 5; }, "5 groups do not divide 12");
  expect_failure<Route>(
      good, [](Route& op) { op.n_groups = 0; }, "n_groups");
  expect_failure<Route>(
      good, [](Route& op) { op.topk_groups = 5; }, "topk_groups");
  expect_failure<Route>(
      good, [](Route& op) { op.topk_groups = 1; }, "cannot choose 4 of 3");
  expect_failure<Route>(
      good, [](Route& op) { op.n_groups = 12; }, "expected 2");
  expect_failure<Route>(
      good, [](Route& op) { op.score = RouterScore::SoftmaxOfChosen; }, "not defined");
  expect_failure<Route>(
      good,
      [&](Route& op) {
        op.ids = m.output({2, 4});
      },
      "ids: expected I32");
  expect_failure<Route>(
      good,
      [&](Route& op) {
        op.weights = m.output({2, 3});
      },
      "weights:");
  expect_failure<Route>(
      good, [&](Route& op) { op.select_bias = m.random({11}); }, "select_bias:");
  const Glu glu{m.random({2, 3}), m.random({2, 3}), m.output({2, 3}), GluKind::Clamped, 7.0f, 1.7f};
  expect_failure<Glu>(
      glu, [](Glu& op) { op.limit = -1.0f; }, "limit");
  expect_failure<Glu>(
      glu, [](Glu& op) { op.up.dims[1] = 2; }, "up:");
}

TEST_F(Check, ExpertFfn) {
  const quant::Format f = quant::Format::bf16();
  ExpertWork work;
  work.m = {m.matrix(6, 8, f), m.matrix(6, 8, f), m.matrix(8, 6, f),
            m.random({6}),     m.random({6}),     m.random({8})};
  work.rows = m.indices({0, 2});
  work.slots = m.indices({1, 3});
  ExpertFfn good;
  good.x = m.random({3, 8});
  good.y = m.output({4, 8});
  const auto with = [&](const std::function<void(ExpertWork&)>& change) {
    std::vector<ExpertWork> works{work, work};
    change(works[1]);
    ExpertFfn op = good;
    op.works = works;
    return failure(op);
  };
  EXPECT_EQ(with([](ExpertWork&) {}), "");
  EXPECT_THAT(with([&](ExpertWork& w) { w.rows = m.indices({0, 3}); }), HasSubstr("rows: entry 1 is 3"));
  EXPECT_THAT(with([&](ExpertWork& w) { w.slots = m.indices({4, 0}); }), HasSubstr("slots: entry 0 is 4"));
  EXPECT_THAT(with([&](ExpertWork& w) { w.slots = m.indices({1}); }), HasSubstr("1 slots for 2 rows"));
  EXPECT_THAT(with([](ExpertWork& w) { std::swap(w.m.up, w.m.down); }),
              HasSubstr("up: expected [6, 8], found [8, 6]"));
  EXPECT_THAT(with([](ExpertWork& w) { w.m.down_bias.dims[0] = 6; }), HasSubstr("down_bias"));
  expect_failure<ExpertFfn>(
      good, [](ExpertFfn& op) { op.y.dims[1] = 7; }, "y:");
}

TEST_F(Check, Combine) {
  Combine good;
  good.rows = m.random({2, 3, 8});
  good.weights = m.random({2, 3});
  good.shared = m.random({2, 8});
  good.shared_gate = m.random({2, 1});
  good.h = m.random({2, 8});
  expect_failure<Combine>(
      good, [](Combine& op) { op.shared = {}; }, "without a shared expert");
  expect_failure<Combine>(
      good,
      [&](Combine& op) {
        op.shared_gate = m.random({2, 2});
      },
      "shared_gate:");
  expect_failure<Combine>(
      good,
      [&](Combine& op) {
        op.weights = m.random({2, 2});
      },
      "weights:");
  expect_failure<Combine>(
      good,
      [&](Combine& op) {
        op.h = m.random({3, 8});
      },
      "h:");
}

TEST_F(Check, DeltaNet) {
  const CausalConv conv{m.random({2, 6}), m.random({6, 4}), m.random({3, 6}), m.output({2, 6})};
  expect_failure<CausalConv>(
      conv,
      [&](CausalConv& op) {
        op.state = m.random({4, 6});
      },
      "state: expected [3, 6]");
  expect_failure<CausalConv>(
      conv,
      [&](CausalConv& op) {
        op.state = m.random_gaps({3, 6}, 1);
      },
      "not contiguous");
  expect_failure<CausalConv>(
      conv,
      [&](CausalConv& op) {
        op.w = m.random({5, 4});
      },
      "w:");
  expect_failure<CausalConv>(
      conv,
      [&](CausalConv& op) {
        op.w = m.random({6, 0});
      },
      "taps of w");
  expect_failure<CausalConv>(
      conv, [](CausalConv& op) { op.y = op.u; }, "memory of u");
  const DeltaGates gates{m.random({2, 4}), m.random({2, 4}), m.random({4}),
                         m.random({4}),    m.output({2, 4}), m.output({2, 4})};
  expect_failure<DeltaGates>(
      gates, [&](DeltaGates& op) { op.dt_bias = m.random({2}); }, "dt_bias:");
  expect_failure<DeltaGates>(
      gates, [](DeltaGates& op) { op.beta.dims[0] = 1; }, "beta:");
  GatedDelta delta;
  delta.q = m.random({2, 2, 8});
  delta.k = m.random({2, 2, 8});
  delta.v = m.random({2, 4, 5});
  delta.decay = m.random({2, 4});
  delta.beta = m.random({2, 4});
  delta.state = m.random({4, 5, 8});
  delta.y = m.output({2, 4, 5});
  expect_failure<GatedDelta>(
      delta,
      [&](GatedDelta& op) {
        op.state = m.random({4, 8, 5});
      },
      "state:");
  expect_failure<GatedDelta>(
      delta,
      [&](GatedDelta& op) {
        op.q = op.k = m.random({2, 3, 8});
      },
      "no multiple");
  expect_failure<GatedDelta>(
      delta,
      [&](GatedDelta& op) {
        op.decay = m.random({2, 2});
      },
      "decay:");
  expect_failure<GatedDelta>(
      delta, [](GatedDelta& op) { op.k.dims[2] = 4; }, "k:");
}

}  // namespace
}  // namespace moeflux::backend::cases
