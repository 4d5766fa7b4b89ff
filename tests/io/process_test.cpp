#include "io/machine.h"

#include <gtest/gtest.h>

#include <vector>

namespace moeflux::io {
namespace {

TEST(ProcessMemory, FollowsWhatIsTouched) {
  const ProcessMemory before = process_memory();
  if (before.peak_resident == 0) GTEST_SKIP() << "no /proc/self/status here";
  EXPECT_GT(before.resident, 0u);
  EXPECT_GE(before.peak_resident, before.resident);
  constexpr std::size_t kBytes = std::size_t{64} << 20, kSlack = std::size_t{8} << 20;
  std::uint64_t with = 0;
  {
    const std::vector<char> block(kBytes, 1);
    with = process_memory().resident;
    EXPECT_EQ(block.back(), 1);
  }
  EXPECT_GT(with + kSlack, before.resident + kBytes);
  // The peak stays when the memory is gone.
  EXPECT_GE(process_memory().peak_resident + kSlack, with);
}

}  // namespace
}  // namespace moeflux::io
