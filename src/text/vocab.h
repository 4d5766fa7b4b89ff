// The two directions between token strings and ids.
//
// Filled once, then read by any number of threads. Strings are kept in one block; a look-up allocates
// nothing.
#pragma once

#include <moeflux/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moeflux::text {

// Ids stand below this; it keeps the table of ids at 64 MiB for the worst file.
inline constexpr std::int64_t kMaxTokenIds = 1 << 24;

class Vocab {
 public:
  enum class Added {
    Yes,
    SameAgain,    // the same pair was there
    StringTaken,  // the string has another id
    IdTaken,      // the id has another string
    NoRoom,       // more entries than announced, over 2 GiB of strings, or strings chosen to collide in
                  // the hash table, which would make loading quadratic
  };

  // Room for `n` entries; that is all there will be.
  explicit Vocab(std::size_t n = 0);

  // The id must lie in 0 .. kMaxTokenIds - 1. Anything but Yes leaves the vocabulary as it was.
  Added add(std::string_view token, TokenId id);

  std::optional<TokenId> find(std::string_view token) const noexcept;
  bool has(TokenId id) const noexcept;
  // The string of an id that exists.
  std::string_view token(TokenId id) const noexcept;

  std::size_t size() const noexcept { return entries_.size(); }
  // Highest id + 1.
  std::size_t id_end() const noexcept { return by_id_.size(); }

 private:
  struct Entry {
    std::uint32_t offset, size;
    TokenId id;
  };
  struct Slot {
    std::uint32_t hash;   // tells most strangers apart without reading their string
    std::uint32_t entry;  // kNone: free
  };
  static constexpr std::uint32_t kNone = UINT32_MAX;

  std::string_view string_of(const Entry& e) const noexcept {
    return std::string_view(strings_).substr(e.offset, e.size);
  }
  // The slot of the token, or the free one where it would go; nullopt when neither is near.
  std::optional<std::size_t> locate(std::string_view token, std::uint64_t hash) const noexcept;

  std::string strings_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> by_id_;  // index into entries_, kNone for gaps
  std::vector<Slot> slots_;           // open addressing, a power of two, at most half full
};

}  // namespace moeflux::text
