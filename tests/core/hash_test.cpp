#include "core/hash.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace moeflux {
namespace {

std::vector<std::byte> random_bytes(std::size_t n) {
  std::mt19937 random(static_cast<std::uint32_t>(n) + 1);
  std::vector<std::byte> out(n);
  for (std::byte& b : out) b = static_cast<std::byte>(random());
  return out;
}

// Published values of the algorithm: what files hold must be readable by any implementation.
TEST(Digest, KnownValues) {
  EXPECT_EQ(digest_text(digest_bytes("")), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(digest_text(digest_bytes("abc")), "06b05ab6733a618578af5f94892f3950");
}

// Every length class of the algorithm, in one go and in pieces, with and without a seed.
TEST(Digest, InPiecesAsAtOnce) {
  for (const std::size_t n : {0u, 1u, 3u, 8u, 16u, 17u, 128u, 129u, 240u, 241u, 1024u, 4096u, 4099u, 100000u, 1769472u})
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{0x9E3779B97F4A7C15}}) {
      const auto bytes = random_bytes(n);
      DigestStream whole(seed), parts(seed);
      whole.add(bytes);
      std::mt19937 random(7);
      for (std::size_t at = 0; at < n;) {
        const std::size_t step = std::min<std::size_t>(n - at, 1 + random() % 5000);
        parts.add(std::span(bytes).subspan(at, step));
        at += step;
      }
      EXPECT_EQ(digest_text(whole.digest()), digest_text(digest_bytes(bytes, seed))) << n;
      EXPECT_EQ(whole.digest(), parts.digest()) << n;
    }
}

TEST(Digest, SeedAndEveryBitCount) {
  auto bytes = random_bytes(700);
  const Digest good = digest_bytes(bytes, 5);
  EXPECT_NE(digest_bytes(bytes, 6), good);
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_NE(digest_bytes(bytes, 5), good) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
  }
  EXPECT_EQ(digest_bytes(bytes, 5), good);
}

TEST(Digest, Text) {
  const Digest d = digest_bytes("abc");
  Digest back;
  EXPECT_TRUE(parse_digest(digest_text(d), back));
  EXPECT_EQ(back, d);
  for (const char* bad : {"", "06b05ab6733a618578af5f94892f395", "06b05ab6733a618578af5f94892f39500", "06B05ab6733a618578af5f94892f3950",
                          "g6b05ab6733a618578af5f94892f3950"})
    EXPECT_FALSE(parse_digest(bad, back)) << bad;
}

}  // namespace
}  // namespace moeflux
