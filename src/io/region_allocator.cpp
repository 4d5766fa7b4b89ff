#include "io/region_allocator.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "core/checked.h"
#include "core/error.h"
#include "io/region.h"

namespace moeflux::io {
namespace {

constexpr std::size_t kPage = 4096;

// `room` bytes of zeros at a multiple of a huge page, or null.
std::byte* map_aligned(std::size_t room) noexcept {
  void* const p = ::mmap(nullptr, room + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  auto* const mapping = static_cast<std::byte*>(p);
  const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(p) % kHugePage) % kHugePage;
  if (before > 0) ::munmap(mapping, before);
  if (before < kHugePage) ::munmap(mapping + before + room, kHugePage - before);
  return mapping + before;
}

}  // namespace

Buffer RegionAllocator::allocate(std::size_t bytes, std::size_t alignment) {
  if (bytes == 0) return {};
  if (bytes < kHugePage) {
    const std::size_t size = round_up(bytes, alignment);
    void* const p = size < bytes ? nullptr : std::aligned_alloc(alignment, size);
    if (p == nullptr) fail(ErrorCode::OutOfMemory, "cannot allocate {} bytes of memory", bytes);
    std::memset(p, 0, size);
    return Buffer(this, static_cast<std::byte*>(p), bytes);
  }
  std::byte* data = nullptr;
  if (alignment <= kHugePage && bytes <= std::numeric_limits<std::size_t>::max() - 2 * kHugePage) data = map_aligned(round_up(bytes, kPage));
  if (data == nullptr) fail(ErrorCode::OutOfMemory, "cannot allocate {} bytes of memory", bytes);
  ::madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // a refusal costs speed alone
  return Buffer(this, data, bytes);
}

void RegionAllocator::release(std::byte* data, std::size_t bytes) noexcept {
  if (bytes < kHugePage)
    std::free(data);
  else
    ::munmap(data, round_up(bytes, kPage));
}

}  // namespace moeflux::io
