#include "io/region_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/error.h"

namespace moeflux::io {
namespace {

TEST(RegionAllocator, ZeroedAlignedAndWritableToTheEnd) {
  RegionAllocator allocator;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, (std::size_t{2} << 20) - 1, std::size_t{2} << 20,
                                  (std::size_t{2} << 20) + 1, (std::size_t{5} << 20) + 12345})
    for (const std::size_t alignment : {std::size_t{64}, std::size_t{4096}}) {
      Buffer buffer = allocator.allocate(bytes, alignment);
      ASSERT_EQ(buffer.bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % alignment, 0u);
      EXPECT_TRUE(std::all_of(buffer.data(), buffer.data() + bytes, [](std::byte b) { return b == std::byte{0}; }));
      std::fill_n(buffer.data(), bytes, std::byte{7});
      EXPECT_EQ(buffer.data()[bytes - 1], std::byte{7});
    }
}

TEST(RegionAllocator, NothingIsNothing) {
  RegionAllocator allocator;
  EXPECT_TRUE(allocator.allocate(0, 64).empty());
}

TEST(RegionAllocator, WhatCannotBeIsAnError) {
  RegionAllocator allocator;
  for (const std::size_t bytes : {std::numeric_limits<std::size_t>::max(), std::size_t{1} << 60})
    try {
      allocator.allocate(bytes, 64);
      FAIL() << bytes;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::OutOfMemory);
    }
}

}  // namespace
}  // namespace moeflux::io
