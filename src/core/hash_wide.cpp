// Compiled with AVX2 as a whole (CMakeLists.txt): xxhash.h asks the compiler's macros. So it includes nothing whose inline
// functions another file could end up with.
#include "core/hash_wide.h"

#if defined(__AVX2__)

#define XXH_INLINE_ALL  // static functions: they stay here
#include <xxhash.h>

namespace moeflux {

bool has_wide_hash() noexcept { return __builtin_cpu_supports("avx2") != 0; }

WideHash wide_hash(const void* data, std::size_t bytes, std::uint64_t seed) noexcept {
  const XXH128_hash_t h = XXH3_128bits_withSeed(data, bytes, seed);
  return {h.low64, h.high64};
}

}  // namespace moeflux

#else

namespace moeflux {
bool has_wide_hash() noexcept { return false; }
WideHash wide_hash(const void*, std::size_t, std::uint64_t) noexcept { return {}; }
}  // namespace moeflux

#endif
