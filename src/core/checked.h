// Arithmetic on sizes that come from files: every overflow is seen.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/error.h"

namespace moeflux {

template <std::integral T>
constexpr std::optional<T> checked_add(T a, T b) noexcept {
  T out{};
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

template <std::integral T>
constexpr std::optional<T> checked_mul(T a, T b) noexcept {
  T out{};
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// As above; an overflow is an InvalidModel error that says what was being computed.
template <std::integral T>
T add_or_fail(T a, T b, std::string_view what) {
  if (auto r = checked_add(a, b)) return *r;
  fail(ErrorCode::InvalidModel, "{}: {} + {} overflows", what, a, b);
}

template <std::integral T>
T mul_or_fail(T a, T b, std::string_view what) {
  if (auto r = checked_mul(a, b)) return *r;
  fail(ErrorCode::InvalidModel, "{}: {} * {} overflows", what, a, b);
}

// Rounds up to a multiple of `unit` (> 0). The caller knows that it fits.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) noexcept {
  return (value + unit - 1) / unit * unit;
}

}  // namespace moeflux
