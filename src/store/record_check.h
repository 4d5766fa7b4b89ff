// What bytes of a pack must hash to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/hash.h"

namespace moeflux::store {

// The seed binds a record to its model, layer and expert; a tensor's is 0.
struct RecordCheck {
  Digest digest;
  std::uint64_t seed = 0;
  bool passes(std::span<const std::byte> bytes) const noexcept { return digest_bytes(bytes, seed) == digest; }
};

// For messages about bytes that do not pass.
inline constexpr const char* kDamaged = "does not match its checksum";

}  // namespace moeflux::store
