#include "text/vocab.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace moeflux::text {
namespace {

// At half load the longest chain of a quarter million honest strings is some dozens of slots.
constexpr std::size_t kMaxProbes = 1024;

std::uint64_t hash_of(std::string_view token) noexcept { return std::hash<std::string_view>{}(token); }

}  // namespace

Vocab::Vocab(std::size_t n) : slots_(std::bit_ceil(std::max<std::size_t>(16, 2 * n)), Slot{0, kNone}) {
  entries_.reserve(n);
}

std::optional<std::size_t> Vocab::locate(std::string_view token, std::uint64_t hash) const noexcept {
  const std::size_t mask = slots_.size() - 1;
  const auto tag = static_cast<std::uint32_t>(hash >> 32);
  for (std::size_t probe = 0; probe < kMaxProbes; ++probe) {
    const std::size_t at = (hash + probe) & mask;
    const Slot& slot = slots_[at];
    if (slot.entry == kNone) return at;
    if (slot.hash == tag && string_of(entries_[slot.entry]) == token) return at;
  }
  return std::nullopt;
}

Vocab::Added Vocab::add(std::string_view token, TokenId id) {
  const std::uint64_t hash = hash_of(token);
  const auto at = locate(token, hash);
  if (!at) return Added::NoRoom;
  if (slots_[*at].entry != kNone)
    return entries_[slots_[*at].entry].id == id ? Added::SameAgain : Added::StringTaken;
  if (has(id)) return Added::IdTaken;
  const bool full = 2 * (entries_.size() + 1) > slots_.size();
  if (full || token.size() > static_cast<std::size_t>(INT32_MAX) - strings_.size()) return Added::NoRoom;
  const auto index = static_cast<std::uint32_t>(entries_.size());
  entries_.push_back(
      {static_cast<std::uint32_t>(strings_.size()), static_cast<std::uint32_t>(token.size()), id});
  strings_.append(token);
  const auto position = static_cast<std::size_t>(raw(id));
  if (position >= by_id_.size()) by_id_.resize(position + 1, kNone);
  by_id_[position] = index;
  slots_[*at] = {static_cast<std::uint32_t>(hash >> 32), index};
  return Added::Yes;
}

std::optional<TokenId> Vocab::find(std::string_view token) const noexcept {
  const auto at = locate(token, hash_of(token));
  if (!at || slots_[*at].entry == kNone) return std::nullopt;
  return entries_[slots_[*at].entry].id;
}

bool Vocab::has(TokenId id) const noexcept {
  const auto position = static_cast<std::size_t>(raw(id));
  return raw(id) >= 0 && position < by_id_.size() && by_id_[position] != kNone;
}

std::string_view Vocab::token(TokenId id) const noexcept {
  return string_of(entries_[by_id_[static_cast<std::size_t>(raw(id))]]);
}

}  // namespace moeflux::text
