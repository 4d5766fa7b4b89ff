// Owned memory, and the two interfaces by which stores use a backend's memory without knowing it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace moeflux {

class Allocator;

// Move-only owner of one allocation; gives it back to its allocator, which must outlive it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Allocator* allocator, std::byte* data, std::size_t bytes) noexcept
      : allocator_(allocator), data_(data), bytes_(bytes) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer tmp(std::move(other));
    swap(tmp);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  bool empty() const noexcept { return data_ == nullptr; }
  template <class T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Allocator* allocator_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Where memory comes from: the host, pinned host memory, a device. Thread-safe.
class Allocator {
 public:
  virtual ~Allocator() = default;
  // Zero-filled, aligned to at least `alignment` (a power of two). Throws OutOfMemory with the size.
  virtual Buffer allocate(std::size_t bytes, std::size_t alignment) = 0;

 protected:
  friend class Buffer;
  virtual void release(std::byte* data, std::size_t bytes) noexcept = 0;
};

// Moves bytes between the host and an allocator's memory. Blocking; the host side may be any memory.
class Copier {
 public:
  virtual ~Copier() = default;
  virtual void to_device(std::byte* device, const std::byte* host, std::size_t bytes) = 0;
  virtual void to_host(std::byte* host, const std::byte* device, std::size_t bytes) = 0;
  // The same bytes where the host can read them in place; nullptr: only by to_host().
  virtual const std::byte* host_view(const std::byte* /*device*/) const noexcept { return nullptr; }
};

// Plain process memory. Both are stateless: any instance may be used anywhere.
class HostAllocator final : public Allocator {
 public:
  Buffer allocate(std::size_t bytes, std::size_t alignment) override;

 protected:
  void release(std::byte* data, std::size_t bytes) noexcept override;
};

class HostCopier final : public Copier {
 public:
  void to_device(std::byte* device, const std::byte* host, std::size_t bytes) override;
  void to_host(std::byte* host, const std::byte* device, std::size_t bytes) override;
  const std::byte* host_view(const std::byte* device) const noexcept override { return device; }
};

}  // namespace moeflux
