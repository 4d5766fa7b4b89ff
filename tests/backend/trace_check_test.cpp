// TraceBackend, CheckBackend, and the stub for what was not built.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backend/check_backend.h"
#include "backend/cuda_backend.h"
#include "backend/op_cases.h"
#include "backend/test_backends.h"
#include "backend/trace_backend.h"
#include "core/error.h"

namespace moeflux::backend::cases {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Every op once more on the reference, then spoilt: adds `error` to element `element` of the last output of
// op `victim`.
class Spoilt final : public Backend {
 public:
  Spoilt(std::string victim, std::int64_t element, float error)
      : victim_(std::move(victim)), element_(element), error_(error) {}
  std::string name() const override { return "spoilt"; }
  std::unique_ptr<Stream> create_stream() override { return reference().create_stream(); }
  void synchronize(Stream& stream) override { reference().synchronize(stream); }
  Allocator& allocator() noexcept override { return reference().allocator(); }
  Copier& copier() noexcept override { return reference().copier(); }

 protected:
#define MOEFLUX_SPOILT_OP(Op) \
  void execute(Stream& stream, const Op& op) override { spoil(stream, op); }
  MOEFLUX_FOR_EACH_OP(MOEFLUX_SPOILT_OP)
#undef MOEFLUX_SPOILT_OP

 private:
  template <class Op>
  void spoil(Stream& stream, const Op& op) {
    forward_to(reference(), stream, op);
    if (victim_ != Op::kName) return;
    Op copy = op;
    TensorView last;
    copy.each_tensor([&](const char*, TensorView& v, Access access) {
      if (access != Access::In) last = v;
    });
    if (last.dtype == DType::F32) last.f32()[element_] += error_;
  }
  std::string victim_;
  std::int64_t element_;
  float error_;
};

TEST(CheckBackend, EveryOpAgreesWithItself) {
  for (const Generator& g : all_generators()) {
    CheckBackend check(reference(), reference());
    g.each([&](Case& c) {
      const Result want = c.run(reference());
      EXPECT_EQ(c.run(check).bytes, want.bytes) << c.label;
    });
    EXPECT_EQ(check.n_differences(), 0u) << g.op << ": " << check.first_difference()->text();
    EXPECT_GT(check.n_ops(), 0u);
  }
}

TEST(CheckBackend, CpuAgainstReference) {
  for (const Generator& g : all_generators()) {
    CheckBackend check(*cpu_variants().back().backend, reference());
    g.each([&](Case& c) { c.run(check); });
    EXPECT_EQ(check.n_differences(), 0u) << check.first_difference()->text();
  }
}

TEST(CheckBackend, FindsTheFirstOpThatDiffers) {
  Memory m(1);
  const TensorView a = m.random({3, 8}), b = m.random({3, 8}), y = m.output({3, 8}), w = m.random({8});
  Spoilt spoilt("RmsNorm", 11, 0.5f);
  std::vector<std::string> lines;
  CheckBackend check(spoilt, reference(), {}, [&](LogLevel level, std::string_view text) {
    EXPECT_EQ(level, LogLevel::Error);
    lines.emplace_back(text);
  });
  const auto stream = check.create_stream();
  check.run(*stream, Add{a, b, y});
  check.run(*stream, Add{y, b, y});  // in place: the other backend must see y as it was
  EXPECT_FALSE(check.first_difference().has_value());
  check.run(*stream, RmsNorm{y, w, y, 1e-6f});
  check.run(*stream, RmsNorm{y, w, y, 1e-6f});
  check.run(*stream, Add{y, b, a});
  const auto first = check.first_difference();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->op_index, 2u);
  EXPECT_EQ(first->op, "RmsNorm");
  EXPECT_EQ(first->tensor, "y");
  EXPECT_EQ(first->element, 11);
  EXPECT_NEAR(first->a - first->b, 0.5, 1e-6);
  EXPECT_EQ(check.n_ops(), 5u);
  EXPECT_EQ(check.n_differences(), 2u) << "the Add after it computes rightly with what it is given";
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], AllOf(HasSubstr("op 2 RmsNorm"), HasSubstr("element 11")));
}

// Each op with one output spoilt is caught, MatMul's parts and caches included.
TEST(CheckBackend, CatchesEveryOp) {
  for (const Generator& g : all_generators()) {
    const std::string op = g.op;
    Spoilt spoilt(op == "AddRmsNorm" ? "AddRmsNorm" : op, 0, 1000.0f);
    CheckBackend check(spoilt, reference(), {.tolerance = 1e-4, .throw_on_difference = false});
    int n_cases = 0;
    g.each([&](Case& c) {
      if (n_cases++ < 12) c.run(check);
    });
    ASSERT_TRUE(check.first_difference().has_value()) << op;
    EXPECT_EQ(check.first_difference()->op, op);
  }
}

TEST(CheckBackend, ThrowsWhenAsked) {
  Memory m(2);
  const TensorView a = m.random({1, 4}), y = m.output({1, 4});
  Spoilt spoilt("Add", 2, 1.0f);
  CheckBackend check(spoilt, reference(), {.tolerance = 1e-4, .throw_on_difference = true});
  const auto stream = check.create_stream();
  try {
    check.run(*stream, Add{a, a, y});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::Internal);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("spoilt"), HasSubstr("Add"), HasSubstr("element 2")));
  }
}

// Swaps the two chosen experts.
class Swapped final : public Backend {
 public:
  std::string name() const override { return "swapped"; }
  std::unique_ptr<Stream> create_stream() override { return reference().create_stream(); }
  void synchronize(Stream&) override {}
  Allocator& allocator() noexcept override { return reference().allocator(); }
  Copier& copier() noexcept override { return reference().copier(); }

 protected:
#define MOEFLUX_SWAPPED_OP(Op) \
  void execute(Stream& stream, const Op& op) override { swap(stream, op); }
  MOEFLUX_FOR_EACH_OP(MOEFLUX_SWAPPED_OP)
#undef MOEFLUX_SWAPPED_OP

 private:
  template <class Op>
  void swap(Stream& stream, const Op& op) {
    forward_to(reference(), stream, op);
    if constexpr (std::is_same_v<Op, Route>) {
      std::swap(op.ids.i32()[0], op.ids.i32()[1]);
      std::swap(op.weights.f32()[0], op.weights.f32()[1]);
    }
  }
};

TEST(CheckBackend, NearTiesAreNoDifference) {
  const auto differences = [](float gap) {
    Memory m(3);
    const std::vector<float> logits{0.0f, 1.0f, 1.0f + gap, -1.0f};
    Route op;
    op.logits = m.values({1, 4}, logits);
    op.ids = m.ints({1, 2});
    op.weights = m.output({1, 2});
    Swapped swapped;
    CheckBackend check(swapped, reference());
    const auto stream = check.create_stream();
    check.run(*stream, op);
    return std::pair(check.n_differences(), check.n_near_ties());
  };
  EXPECT_EQ(differences(1e-6f), std::pair(std::uint64_t{0}, std::uint64_t{1}));
  EXPECT_EQ(differences(0.5f), std::pair(std::uint64_t{1}, std::uint64_t{0}));
}

TEST(TraceBackend, OneLinePerOp) {
  Memory m(4);
  std::vector<std::string> lines;
  TraceBackend trace(reference(), [&](LogLevel level, std::string_view text) {
    EXPECT_EQ(level, LogLevel::Debug);
    lines.emplace_back(text);
  });
  const auto stream = trace.create_stream();
  const TensorView x = m.random({2, 64}), y = m.output({2, 3}), y2 = m.output({2, 5});
  const std::vector<MatMulPart> parts{{m.matrix(3, 64, quant::Format::affine(4, 64, DType::BF16)), {}, y},
                                      {m.matrix(5, 64, quant::Format::bf16()), m.random({5}), y2}};
  trace.run(*stream, MatMul{x, parts, Precision::Exact});
  trace.run(*stream, Add{y, y, y});
  trace.run(*stream, Add{y.slice(0, 0), y.slice(0, 0), y.slice(0, 0)});  // nothing to do, nothing to say
  trace.synchronize(*stream);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], AllOf(HasSubstr("0 MatMul x[2, 64] y[2, 3] bias[5] y[2, 5]"),
                              HasSubstr("affine 4-bit g64 [3, 64]"), HasSubstr("bf16 [5, 64]")));
  EXPECT_EQ(lines[1], "1 Add a[2, 3] b[2, 3] y[2, 3]");
  EXPECT_THAT(trace.name(), HasSubstr("reference"));
}

TEST(TraceBackend, OutputsAreHashed) {
  Memory m(5);
  const TensorView a = m.random({2, 4}), y = m.output({2, 4}, 3);
  const auto line = [&] {
    std::string out;
    TraceBackend trace(reference(), [&](LogLevel, std::string_view text) { out = text; }, {.outputs = true});
    const auto stream = trace.create_stream();
    trace.run(*stream, Add{a, a, y});
    return out;
  };
  const std::string first = line();
  EXPECT_THAT(first, HasSubstr("y[2, 4]{|"));
  y.f32()[5] = 99.0f;  // between the rows
  EXPECT_EQ(line(), first);
  a.f32()[7] += 1e-3f;
  EXPECT_NE(line(), first);
}

// Every op passes through both wrappers with its results unchanged.
TEST(TraceBackend, WrapsEveryOp) {
  for (const Generator& g : all_generators()) {
    std::size_t n_lines = 0;
    TraceBackend trace(reference(), [&](LogLevel, std::string_view text) {
      ++n_lines;
      EXPECT_THAT(std::string(text), HasSubstr(g.op));
    });
    int n_cases = 0;
    g.each([&](Case& c) {
      if (n_cases++ >= 20) return;
      EXPECT_EQ(c.run(trace).bytes, c.run(reference()).bytes) << c.label;
    });
    EXPECT_GT(n_lines, 0u) << g.op;
  }
}

TEST(NoCuda, SaysSo) {
  if (count_cuda_devices() > 0) GTEST_SKIP() << "there is a device";
  try {
    make_cuda_backend({});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::Unsupported);
    EXPECT_THAT(e.what(), HasSubstr("no CUDA"));
  }
}

}  // namespace
}  // namespace moeflux::backend::cases
