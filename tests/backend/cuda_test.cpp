// Every op on the device: the CPU's bytes, whole and in chunks, twice. Skipped where there is no device.
#include <gtest/gtest.h>

#include <array>

#include "backend/cuda_backend.h"
#include "backend/hosted_backend.h"
#include "backend/op_cases.h"
#include "backend/test_backends.h"

namespace moeflux::backend::cases {
namespace {

Backend* device() {
  static const std::unique_ptr<Backend> inner = count_cuda_devices() > 0 ? make_cuda_backend({}) : nullptr;
  static const std::unique_ptr<Backend> hosted = inner ? std::make_unique<HostedBackend>(*inner) : nullptr;
  return hosted.get();
}

#define MOEFLUX_NEEDS_DEVICE() \
  if (device() == nullptr) GTEST_SKIP() << "no CUDA device here (or a build without CUDA): the device's ops were not run"

class Cuda : public testing::TestWithParam<Generator> {};

int n_failures = 0;

void expect_same_bytes(const Case& c, const std::string& who, const Result& got, const Result& want) {
  for (std::size_t o = 0; o < want.bytes.size(); ++o) {
    if (got.bytes[o] == want.bytes[o]) continue;
    std::size_t i = 0, n_bad = 0;
    for (std::size_t k = want.values[o].size(); k-- > 0;)
      if (got.values[o][k] != want.values[o][k]) i = k, ++n_bad;
    if (++n_failures > 200) return;
    ADD_FAILURE() << c.label << ", " << who << ": " << want.names[o] << "[" << i << "] is " << got.values[o][i] << ", expected "
                  << want.values[o][i] << "; " << n_bad << " of " << want.values[o].size() << " differ";
    return;
  }
}

TEST_P(Cuda, EqualsCpu) {
  MOEFLUX_NEEDS_DEVICE();
  int n_cases = 0;
  GetParam().each([&](Case& c) {
    ++n_cases;
    expect_same_bytes(c, "device", c.run(*device()), c.run(*cpu_variants().back().backend));
  });
  EXPECT_GT(n_cases, 5);
}

TEST_P(Cuda, TokensInChunks) {
  MOEFLUX_NEEDS_DEVICE();
  const std::array<std::int64_t, 3> mixed{1, 7, 64};
  GetParam().each([&](Case& c) { expect_same_bytes(c, "in chunks", c.run_in_chunks(*device(), mixed), c.run(*cpu_variants().back().backend)); });
}

TEST_P(Cuda, TwiceInARow) {
  MOEFLUX_NEEDS_DEVICE();
  GetParam().each([&](Case& c) {
    const Result first = c.run(*device());
    expect_same_bytes(c, "second run", c.run(*device()), first);
  });
}

INSTANTIATE_TEST_SUITE_P(Ops, Cuda, testing::ValuesIn(all_generators()), [](const auto& test) { return std::string(test.param.op); });

}  // namespace
}  // namespace moeflux::backend::cases
