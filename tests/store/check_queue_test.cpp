#include "store/check_queue.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace moeflux::store {
namespace {

std::vector<std::byte> random_bytes(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// Every second one is damaged.
TEST(CheckQueue, EveryItemGetsItsVerdictOnce) {
  constexpr std::size_t kItems = 64;
  CheckQueue queue(kItems);
  std::vector<std::vector<std::byte>> data;
  for (unsigned i = 0; i < kItems; ++i) data.push_back(random_bytes(4096 * (1 + i % 5), i));
  std::vector<CheckQueue::Verdict> got;
  for (int round = 0; round < 20; ++round) {
    std::set<std::uint32_t> good, bad;
    for (std::uint32_t i = 0; i < kItems; ++i) {
      CheckQueue::Item item{i, data[i], {digest_bytes(data[i], i), i}};
      if (i % 2 != 0) item.check.digest.bytes[i % 16] ^= std::byte{1};
      queue.add(item);
      if (i % 7 == 0) queue.wake(i % 3);
    }
    while (queue.pending() > 0) {
      queue.help(std::chrono::seconds(10));
      queue.take(got);
      for (const CheckQueue::Verdict& v : got) EXPECT_TRUE((v.good ? good : bad).insert(v.slot).second);
    }
    EXPECT_EQ(good.size(), kItems / 2);
    EXPECT_EQ(bad.size(), kItems / 2);
    for (std::uint32_t i : good) EXPECT_EQ(i % 2, 0u);
    for (std::uint32_t i : bad) EXPECT_EQ(i % 2, 1u);
  }
}

TEST(CheckQueue, TheThreadAloneIsEnough) {
  CheckQueue queue(1);
  const std::vector<std::byte> data = random_bytes(1 << 20, 7);
  queue.add({3, data, {digest_bytes(data, 9), 9}});
  queue.wake(0);
  std::vector<CheckQueue::Verdict> got;
  while (got.empty()) {  // nobody helps
    std::this_thread::yield();
    queue.take(got);
  }
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(got[0].slot, 3u);
  EXPECT_TRUE(got[0].good);
  EXPECT_EQ(queue.pending(), 0u);
  EXPECT_FALSE(queue.help(std::chrono::seconds(10)));
}

TEST(CheckQueue, EndsWithItemsLeft) {
  const std::vector<std::byte> data = random_bytes(1 << 20, 7);
  for (int round = 0; round < 20; ++round) {
    CheckQueue queue(8);
    for (std::uint32_t i = 0; i < 8; ++i) queue.add({i, data, {}});
    queue.wake(0);
  }
}

}  // namespace
}  // namespace moeflux::store
