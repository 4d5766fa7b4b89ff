#include "core/buffer.h"

#include <cstdlib>
#include <cstring>

#include "core/checked.h"
#include "core/error.h"

namespace moeflux {

Buffer::~Buffer() {
  if (data_ != nullptr) allocator_->release(data_, bytes_);
}

Buffer HostAllocator::allocate(std::size_t bytes, std::size_t alignment) {
  if (bytes == 0) return {};
  const std::size_t size = round_up(bytes, alignment);
  void* p = size < bytes ? nullptr : std::aligned_alloc(alignment, size);
  if (p == nullptr) fail(ErrorCode::OutOfMemory, "cannot allocate {} bytes of memory", bytes);
  std::memset(p, 0, size);
  return Buffer(this, static_cast<std::byte*>(p), bytes);
}

void HostAllocator::release(std::byte* data, std::size_t) noexcept { std::free(data); }

void HostCopier::to_device(std::byte* device, const std::byte* host, std::size_t bytes) {
  if (bytes != 0) std::memcpy(device, host, bytes);
}

void HostCopier::to_host(std::byte* host, const std::byte* device, std::size_t bytes) {
  if (bytes != 0) std::memcpy(host, device, bytes);
}

}  // namespace moeflux
