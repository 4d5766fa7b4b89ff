// A 64-bit fingerprint of bytes: to compare results, not to protect anything.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeflux {

std::uint64_t hash_bytes(const void* data, std::size_t bytes) noexcept;  // XXH3

}  // namespace moeflux
