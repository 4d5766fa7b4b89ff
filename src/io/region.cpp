#include "io/region.h"

#include <sys/mman.h>

#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace moeflux::io {
Region Region::allocate(std::uint64_t bytes, bool huge_pages) {
  Region region;
  if (bytes == 0) return region;
  if (bytes > std::numeric_limits<std::size_t>::max() - 2 * kHugePage)
    fail(ErrorCode::OutOfMemory, "cannot map {} of memory", format_bytes(bytes));
  // Room to align; whole huge pages, so that the last one can be huge as well.
  const std::size_t room = (static_cast<std::size_t>(bytes) + kHugePage - 1) / kHugePage * kHugePage;
  region.mapped_ = room + kHugePage;
  // No swap is reserved: what is not touched costs nothing, and the planner has counted what will be.
  void* const p = ::mmap(nullptr, region.mapped_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    fail(ErrorCode::OutOfMemory, "cannot map {} of memory: {}", format_bytes(bytes),
         std::generic_category().message(errno));
  region.mapping_ = static_cast<std::byte*>(p);
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  region.data_ = region.mapping_ + (kHugePage - address % kHugePage) % kHugePage;
  region.bytes_ = static_cast<std::size_t>(bytes);
  const int advice = huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE;
  region.huge_pages_ = ::madvise(region.data_, room, advice) == 0 && huge_pages;
  return region;
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)),
      huge_pages_(std::exchange(other.huge_pages_, false)) {}

Region& Region::operator=(Region&& other) noexcept {
  Region tmp(std::move(other));
  std::swap(data_, tmp.data_);
  std::swap(bytes_, tmp.bytes_);
  std::swap(mapping_, tmp.mapping_);
  std::swap(mapped_, tmp.mapped_);
  std::swap(huge_pages_, tmp.huge_pages_);
  return *this;
}

Region::~Region() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_);
}

}  // namespace moeflux::io
