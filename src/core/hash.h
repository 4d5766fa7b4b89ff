// Fingerprints of bytes (XXH3): to compare results and to find damage, not to protect against an adversary.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct XXH3_state_s;

namespace moeflux {

std::uint64_t hash_bytes(const void* data, std::size_t bytes) noexcept;  // XXH3, 64 bits, seed 0

// XXH3 of 128 bits in its canonical form: most significant byte first.
struct Digest {
  std::array<std::byte, 16> bytes{};
  friend bool operator==(const Digest&, const Digest&) = default;
};

Digest digest_bytes(std::span<const std::byte> bytes, std::uint64_t seed = 0) noexcept;
inline Digest digest_bytes(std::string_view text) noexcept { return digest_bytes(std::as_bytes(std::span(text))); }

// The same, of bytes that come in pieces. Move-only, one thread at a time.
class DigestStream {
 public:
  explicit DigestStream(std::uint64_t seed = 0);  // throws OutOfMemory
  DigestStream& add(std::span<const std::byte> bytes) noexcept;
  DigestStream& add(const Digest& digest) noexcept { return add(std::span<const std::byte>(digest.bytes)); }
  Digest digest() const noexcept;  // of all bytes so far

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const noexcept;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

std::string digest_text(const Digest& digest);                       // 32 hex digits
bool parse_digest(std::string_view text, Digest& digest) noexcept;   // of exactly that form

}  // namespace moeflux
