#include "core/hash.h"

#include <xxhash.h>

#include "core/error.h"
#include "core/hash_wide.h"

namespace moeflux {
namespace {

Digest canonical(const XXH128_hash_t& hash) noexcept {
  XXH128_canonical_t form;
  XXH128_canonicalFromHash(&form, hash);
  Digest out;
  static_assert(sizeof(form.digest) == 16);
  for (std::size_t i = 0; i < out.bytes.size(); ++i) out.bytes[i] = static_cast<std::byte>(form.digest[i]);
  return out;
}

int nibble(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

std::uint64_t hash_bytes(const void* data, std::size_t bytes) noexcept { return XXH3_64bits(data, bytes); }

Digest digest_bytes(std::span<const std::byte> bytes, std::uint64_t seed) noexcept {
  if (has_wide_hash()) {
    const WideHash h = wide_hash(bytes.data(), bytes.size(), seed);
    return canonical({h.low, h.high});
  }
  return canonical(XXH3_128bits_withSeed(bytes.data(), bytes.size(), seed));
}

void DigestStream::Free::operator()(XXH3_state_s* state) const noexcept { XXH3_freeState(state); }

DigestStream::DigestStream(std::uint64_t seed) : state_(XXH3_createState()) {
  if (state_ == nullptr) fail(ErrorCode::OutOfMemory, "no memory for a checksum");
  XXH3_128bits_reset_withSeed(state_.get(), seed);
}

DigestStream& DigestStream::add(std::span<const std::byte> bytes) noexcept {
  if (!bytes.empty()) XXH3_128bits_update(state_.get(), bytes.data(), bytes.size());
  return *this;
}

Digest DigestStream::digest() const noexcept { return canonical(XXH3_128bits_digest(state_.get())); }

std::string digest_text(const Digest& digest) {
  std::string text;
  for (const std::byte b : digest.bytes) text += fmt::format("{:02x}", static_cast<unsigned>(b));
  return text;
}

bool parse_digest(std::string_view text, Digest& digest) noexcept {
  if (text.size() != 2 * digest.bytes.size()) return false;
  for (std::size_t i = 0; i < digest.bytes.size(); ++i) {
    const int high = nibble(text[2 * i]), low = nibble(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    digest.bytes[i] = static_cast<std::byte>(high << 4 | low);
  }
  return true;
}

}  // namespace moeflux
