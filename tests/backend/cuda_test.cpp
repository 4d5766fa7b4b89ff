// Every op on the device: the CPU's bytes, whole and in chunks, twice. Skipped where there is no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>

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

// Memory of the host's allocator, or the driver's own: zeros, the same bytes there and back, given back in any order.
TEST(CudaMemory, PinsWhatTheHostAllocates) {
  MOEFLUX_NEEDS_DEVICE();
  HostAllocator host;
  for (Allocator* const of : {static_cast<Allocator*>(nullptr), static_cast<Allocator*>(&host)}) {
    const auto backend = make_cuda_backend({0, of});
    Buffer small = backend->pinned_allocator().allocate(1000, 64);
    for (const std::size_t bytes : {std::size_t{8} << 20, (std::size_t{5} << 20) + 12345}) {
      Buffer there = backend->pinned_allocator().allocate(bytes, 4096), back = backend->pinned_allocator().allocate(bytes, 4096);
      EXPECT_EQ(std::count(there.data(), there.data() + bytes, std::byte{0}), static_cast<std::ptrdiff_t>(bytes));
      for (std::size_t i = 0; i < bytes; ++i) there.data()[i] = static_cast<std::byte>(i * 7 + i / 251);
      const Buffer device = backend->allocator().allocate(bytes, 256);
      const auto copier = backend->make_async_copier();
      CopyCompletion done;
      const CopyPart out{device.data(), there.data(), bytes}, in{back.data(), device.data(), bytes};
      ASSERT_TRUE(copier->start(CopyDirection::ToDevice, 0, {&out, 1}));
      ASSERT_EQ(copier->wait({&done, 1}, std::chrono::seconds(10)), 1u);
      EXPECT_TRUE(done.ok);
      ASSERT_TRUE(copier->start(CopyDirection::ToHost, 0, {&in, 1}));
      ASSERT_EQ(copier->wait({&done, 1}, std::chrono::seconds(10)), 1u);
      EXPECT_TRUE(done.ok);
      EXPECT_TRUE(std::equal(there.data(), there.data() + bytes, back.data()));
      there = {};
      EXPECT_NE(back.data()[1], std::byte{0});
    }
    EXPECT_EQ(small.data()[999], std::byte{0});
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, Cuda, testing::ValuesIn(all_generators()), [](const auto& test) { return std::string(test.param.op); });

}  // namespace
}  // namespace moeflux::backend::cases
