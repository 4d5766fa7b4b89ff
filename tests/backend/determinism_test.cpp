// One arithmetic: the same bytes for every instruction set, number of threads and cutting of the tokens.
#include <gtest/gtest.h>

#include <array>

#include "backend/op_cases.h"
#include "backend/test_backends.h"

namespace moeflux::backend::cases {
namespace {

class Determinism : public testing::TestWithParam<Generator> {};

void expect_same_bytes(const Case& c, const std::string& who, const Result& got, const Result& want) {
  for (std::size_t o = 0; o < want.bytes.size(); ++o) {
    if (got.bytes[o] == want.bytes[o]) continue;
    std::size_t i = 0;
    while (got.values[o][i] == want.values[o][i] && i + 1 < want.values[o].size()) ++i;
    ADD_FAILURE() << c.label << ", " << who << ": " << want.names[o] << "[" << i << "] is "
                  << got.values[o][i] << ", expected " << want.values[o][i];
    return;
  }
}

TEST_P(Determinism, InstructionSetsAndThreads) {
  GetParam().each([&](Case& c) {
    const Result want = c.run(*cpu_variants()[0].backend);
    for (const CpuVariant& v : cpu_variants()) expect_same_bytes(c, v.name(), c.run(*v.backend), want);
  });
}

TEST_P(Determinism, TokensInChunks) {
  const std::array<std::int64_t, 1> single{1};
  const std::array<std::int64_t, 3> mixed{1, 7, 64};
  GetParam().each([&](Case& c) {
    const Result want = c.run(*cpu_variants()[0].backend);
    for (const CpuVariant& v : cpu_variants()) {
      if (v.n_threads == 1)
        expect_same_bytes(c, v.name() + " token by token", c.run_in_chunks(*v.backend, single), want);
      if (v.n_threads == 2)
        expect_same_bytes(c, v.name() + " in chunks", c.run_in_chunks(*v.backend, mixed), want);
    }
  });
}

TEST_P(Determinism, TwiceInARow) {
  GetParam().each([&](Case& c) {
    Backend& backend = *cpu_variants().back().backend;
    const Result first = c.run(backend);
    expect_same_bytes(c, "second run", c.run(backend), first);
  });
}

INSTANTIATE_TEST_SUITE_P(Ops, Determinism, testing::ValuesIn(all_generators()),
                         [](const auto& test) { return std::string(test.param.op); });

}  // namespace
}  // namespace moeflux::backend::cases
