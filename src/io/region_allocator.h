// Host memory for weights, caches and activations: large blocks lie on huge pages where the system gives them, because reading
// gigabytes for every token through 4 KiB pages costs a third of the memory's speed.
#pragma once

#include "core/buffer.h"

namespace moeflux::io {

// Stateless: any instance may be used anywhere, one must live as long as its buffers. Blocks of 2 MiB and more are mappings of
// their own whose whole huge pages are huge, so a block takes no more memory than its size rounded up to pages, and what is not
// touched takes none; alignments over 2 MiB are refused (OutOfMemory). Smaller ones come from the C library.
class RegionAllocator final : public Allocator {
 public:
  Buffer allocate(std::size_t bytes, std::size_t alignment) override;

 protected:
  void release(std::byte* data, std::size_t bytes) noexcept override;
};

}  // namespace moeflux::io
