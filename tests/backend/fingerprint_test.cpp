// The bytes of every op's results over all its cases as one number, printed: machines with other instruction sets must print the
// same (./dev arm compares).
#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>

#include "backend/op_cases.h"
#include "backend/test_backends.h"

namespace moeflux::backend::cases {
namespace {

class Fingerprint : public testing::TestWithParam<Generator> {};

TEST_P(Fingerprint, OfTheBestTable) {
  const std::unique_ptr<Backend> backend = make_cpu_backend({2, ""});
  std::uint64_t hash = 0xcbf29ce484222325u;
  GetParam().each([&](Case& c) {
    for (const auto& bytes : c.run(*backend).bytes)
      for (const std::byte b : bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3u;
  });
  std::cout << "fingerprint " << GetParam().op << " " << std::hex << hash << std::dec << "\n";
  EXPECT_NE(hash, 0xcbf29ce484222325u);
}

INSTANTIATE_TEST_SUITE_P(Ops, Fingerprint, testing::ValuesIn(all_generators()),
                         [](const auto& test) { return std::string(test.param.op); });

}  // namespace
}  // namespace moeflux::backend::cases
