// A large block of zero-filled memory for expert slots: page-aligned, on huge pages where the system gives
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace moeflux::io {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Move-only. Pages cost memory once they are touched (or registered with a reader).
class Region {
 public:
  // Aligned to 2 MiB. Throws OutOfMemory with the size.
  static Region allocate(std::uint64_t bytes, bool huge_pages = true);
  Region() = default;
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  std::span<std::byte> span() const noexcept { return {data_, bytes_}; }
  // The system was asked for huge pages and did not refuse; it still may have none.
  bool huge_pages() const noexcept { return huge_pages_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::byte* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  bool huge_pages_ = false;
};

}  // namespace moeflux::io
