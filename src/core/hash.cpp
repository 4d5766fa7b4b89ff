#include "core/hash.h"

#include <xxhash.h>

namespace moeflux {

std::uint64_t hash_bytes(const void* data, std::size_t bytes) noexcept { return XXH3_64bits(data, bytes); }

}  // namespace moeflux
