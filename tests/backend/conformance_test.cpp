// Every op on every instruction set against the reference, within the errors that rounding explains.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "backend/op_cases.h"
#include "backend/test_backends.h"

namespace moeflux::backend::cases {
namespace {

class Conformance : public testing::TestWithParam<Generator> {};

// Returns the largest share of its bound that an error takes.
double expect_within(const Case& c, const std::string& who, const Result& got, const Result& want,
                     const Bounds& bounds) {
  double share = 0.0;
  EXPECT_EQ(got.values.size(), bounds.size()) << c.label;
  for (std::size_t o = 0; o < bounds.size(); ++o) {
    EXPECT_EQ(got.values[o].size(), bounds[o].size()) << c.label;
    for (std::size_t i = 0; i < bounds[o].size(); ++i) {
      const double a = got.values[o][i], b = want.values[o][i];
      if (a == b) continue;
      if (std::fabs(a - b) <= bounds[o][i]) {  // false for NaN
        share = std::max(share, std::fabs(a - b) / bounds[o][i]);
        continue;
      }
      ADD_FAILURE() << c.label << ", " << who << ": " << got.names[o] << "[" << i << "] is " << a
                    << ", expected " << b << " within " << bounds[o][i];
      return 1.0;
    }
  }
  return share;
}

TEST_P(Conformance, CpuAgreesWithReference) {
  int n_cases = 0;
  double share = 0.0;
  GetParam().each([&](Case& c) {
    ++n_cases;
    const Result want = c.run(reference());
    const Bounds bounds = c.bounds(reference(), want);
    std::string last_isa;
    for (const CpuVariant& v : cpu_variants()) {
      if (v.isa == last_isa) continue;  // other thread counts give the same bytes: determinism_test.cpp
      last_isa = v.isa;
      share = std::max(share, expect_within(c, v.name(), c.run(*v.backend), want, bounds));
    }
  });
  EXPECT_GT(n_cases, 5);
  RecordProperty("cases", n_cases);
  RecordProperty("largest_share_of_bound", std::to_string(share));
}

// e4m3 has two codes that are no numbers: only the row that has one gives none, wherever it stands.
TEST(MatMulFp8, ACodeThatIsNoNumber) {
  constexpr std::int64_t kCols = 203;
  constexpr std::byte kOne{0x38};
  const std::vector<float> x(3 * kCols, 1.0f), scales(4, 0.5f);
  for (const CpuVariant& v : cpu_variants()) {
    if (v.n_threads != 1) continue;
    const std::unique_ptr<Stream> stream = v.backend->create_stream();
    for (const std::int64_t t : {1, 3})
      for (const std::byte code : {std::byte{0x7f}, std::byte{0xff}})
        for (const std::size_t at : {0u, 17u, 63u, 64u, 130u, 191u, 202u}) {
          std::vector<std::byte> codes(2 * kCols, kOne);
          codes[kCols + at] = code;
          std::vector<float> y(static_cast<std::size_t>(2 * t));
          const quant::MatrixView w{quant::Format::fp8(), 2, kCols, codes.data(), reinterpret_cast<const std::byte*>(scales.data()), nullptr};
          const MatMulPart part{w, {}, view_f32(y.data(), {t, 2})};
          v.backend->run(*stream, MatMul{view_f32(const_cast<float*>(x.data()), {t, kCols}), {&part, 1}, Precision::Fast});
          for (std::size_t i = 0; i < y.size(); i += 2) {
            EXPECT_EQ(y[i], 0.5f * kCols) << v.name() << " " << t;
            EXPECT_TRUE(std::isnan(y[i + 1])) << v.name() << " " << t << " " << at;
          }
        }
  }
}

// Where a table wants bands, cases really come in them.
TEST(MatMulBands, CasesHaveThem) {
  for (const CpuVariant& v : cpu_variants()) {
    auto* bands = dynamic_cast<BandsBackend*>(v.backend.get());
    if (bands == nullptr || v.n_threads != 1) continue;
    const std::int64_t before = bands->n_banded();
    matmul_cases([&](Case& c) { c.run(*bands); });
    EXPECT_GT(bands->n_banded() - before, 100) << v.name();
  }
}

// The bounds must mean something: an error of one part in a hundred of any output is outside of them.
TEST_P(Conformance, BoundsAreTight) {
  GetParam().each([&](Case& c) {
    const Result want = c.run(reference());
    const Bounds bounds = c.bounds(reference(), want);
    for (std::size_t o = 0; o < bounds.size(); ++o) {
      double bound = 0.0, size = 0.0;
      for (std::size_t i = 0; i < bounds[o].size(); ++i) {
        bound += bounds[o][i] * bounds[o][i];
        size += want.values[o][i] * want.values[o][i];
      }
      EXPECT_LE(std::sqrt(bound), 0.01 * std::sqrt(size)) << c.label << " " << want.names[o];
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ops, Conformance, testing::ValuesIn(all_generators()),
                         [](const auto& test) { return std::string(test.param.op); });

// all_generators() forgets no op.
TEST(ConformanceTable, EveryOpHasCases) {
  std::vector<std::string> ops;
#define MOEFLUX_OP_NAME(Op) ops.push_back(Op::kName);
  MOEFLUX_FOR_EACH_OP(MOEFLUX_OP_NAME)
#undef MOEFLUX_OP_NAME
  const std::vector<Generator> generators = all_generators();
  ASSERT_EQ(generators.size(), ops.size());
  for (std::size_t i = 0; i < ops.size(); ++i) EXPECT_EQ(ops[i], generators[i].op);
}

}  // namespace
}  // namespace moeflux::backend::cases
