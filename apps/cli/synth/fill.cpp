#include "cli/synth/fill.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace moeflux::cli::synth {
namespace {

static_assert(std::endian::native == std::endian::little, "blocks are written as they lie in memory");

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
constexpr std::uint64_t kGroupColumns = 64;

// The finalizer of SplitMix64: a counter goes in, 64 independent-looking bits come out.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t word(std::uint64_t stream, std::uint64_t index) noexcept {
  return mix(stream + (index + 1) * kGolden);
}

std::uint16_t to_bf16(double value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

double from_bf16(std::uint16_t value) noexcept {
  return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16));
}

template <class T>
void store(std::span<std::byte> out, std::size_t index, T value) noexcept {
  std::memcpy(out.data() + index * sizeof(T), &value, sizeof(T));
}

double sign(const Fill& fill, std::uint64_t group) noexcept {
  return (word(fill.direction, group / 64) >> (group % 64) & 1) != 0 ? 1.0 : -1.0;
}

// Mean 0, variance 1, nearly exponential, as the popularity of trained experts is: few are wanted by almost
// every token, most by few. n leading zeros (geometric) minus a uniform fraction is -log2 of a uniform number
// up to 0.09.
double popularity(const Fill& fill, std::uint64_t row) noexcept {
  const std::uint64_t bits = word(~fill.stream, row) | 1;
  const int zeros = std::countl_zero(bits);
  const double fraction = std::ldexp(static_cast<double>(bits), zeros - 63) - 1.0;
  return (static_cast<double>(zeros) - fraction - 0.5) / 1.4433756729740645;  // sqrt(2 + 1/12)
}

void fill_codes(const Fill& fill, std::uint64_t first_byte, std::span<std::byte> out) noexcept {
  const std::uint64_t first = first_byte / 8;
  const std::size_t n_words = out.size() / 8;
  for (std::size_t i = 0; i < n_words; ++i) store(out, i, word(fill.stream, first + i));
  if (out.size() % 8 != 0) {
    const std::uint64_t last = word(fill.stream, first + n_words);
    std::memcpy(out.data() + n_words * 8, &last, out.size() % 8);
  }
}

// The sixteen scales a group may have: 85 % to 115 %, half of them negative.
std::array<std::uint16_t, 16> scale_table(const Fill& fill) noexcept {
  std::array<std::uint16_t, 16> table{};
  for (std::size_t i = 0; i < table.size(); ++i) {
    const double factor = 0.85 + 0.3 * static_cast<double>(i / 2) / 7.0;
    table[i] = to_bf16(fill.scale * (i % 2 == 0 ? factor : -factor));
  }
  return table;
}

std::size_t pick(const Fill& fill, std::uint64_t index) noexcept {
  return static_cast<std::size_t>(word(fill.stream, index / 16) >> (index % 16 * 4) & 15);
}

void fill_table(const Fill& fill, const std::array<std::uint16_t, 16>& table, std::uint64_t first_byte,
                std::span<std::byte> out) noexcept {
  const std::uint64_t first = first_byte / 2;  // a multiple of 16
  const std::size_t n = out.size() / 2;
  for (std::size_t i = 0; i < n; i += 16) {
    std::uint64_t bits = word(fill.stream, (first + i) / 16);
    const std::size_t end = std::min<std::size_t>(i + 16, n);
    for (std::size_t j = i; j < end; ++j, bits >>= 4) store(out, j, table[bits & 15]);
  }
}

void fill_biases(const Fill& fill, std::uint64_t first_byte, std::span<std::byte> out) noexcept {
  std::array<std::uint16_t, 16> table = scale_table(fill);
  if (fill.common == 0 && fill.popular == 0) {
    for (std::uint16_t& entry : table) entry = to_bf16(-fill.mid * from_bf16(entry));
    fill_table(fill, table, first_byte, out);
    return;
  }
  const std::uint64_t first = first_byte / 2;
  for (std::size_t i = 0; i < out.size() / 2; ++i) {
    const std::uint64_t index = first + i;
    const double offset = fill.common + fill.popular * popularity(fill, index / fill.groups_per_row);
    const double scale = from_bf16(table[pick(fill, index)]);
    store(out, i, to_bf16(-fill.mid * scale + offset * sign(fill, index % fill.groups_per_row)));
  }
}

void fill_mx_scales(const Fill& fill, std::uint64_t first_byte, std::span<std::byte> out) noexcept {
  // Two neighbouring powers of two, mixed so that the mean square is right.
  int exponent = 0;
  const double fraction = std::frexp(fill.scale, &exponent) * 2;  // scale = fraction * 2^(exponent - 1)
  const double share = (fraction * fraction - 1) / 3;             // of the upper one
  const auto threshold = static_cast<std::uint64_t>(share * 256);
  const auto low = static_cast<std::uint8_t>(exponent - 1 + 127);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint64_t index = first_byte + i;
    const std::uint64_t bits = word(fill.stream, index / 8) >> (index % 8 * 8) & 0xff;
    out[i] = static_cast<std::byte>(low + (bits < threshold ? 1 : 0));
  }
}

double value(const Fill& fill, std::uint64_t index) noexcept {
  const std::uint64_t bits = word(fill.stream, index / 4) >> (index % 4 * 16) & 0xffff;
  const double plain = fill.low + (fill.high - fill.low) * (static_cast<double>(bits) + 0.5) / 65536.0;
  if (fill.groups_per_row == 0) return plain;
  const std::uint64_t columns = fill.groups_per_row * kGroupColumns;
  const double offset = fill.common + fill.popular * popularity(fill, index / columns);
  return plain + offset * sign(fill, index % columns / kGroupColumns);
}

}  // namespace

std::uint64_t stream_key(std::uint64_t seed, std::string_view name) noexcept {
  std::uint64_t hash = mix(seed + kGolden);
  for (const char c : name) hash = mix(hash ^ static_cast<unsigned char>(c)) + kGolden;
  return hash;
}

void fill_block(const Fill& fill, std::uint64_t first_byte, std::span<std::byte> out) noexcept {
  switch (fill.kind) {
    case FillKind::Codes:
      return fill_codes(fill, first_byte, out);
    case FillKind::Scales:
      return fill_table(fill, scale_table(fill), first_byte, out);
    case FillKind::Biases:
      return fill_biases(fill, first_byte, out);
    case FillKind::MxScales:
      return fill_mx_scales(fill, first_byte, out);
    case FillKind::ValuesBf16:
      for (std::size_t i = 0; i < out.size() / 2; ++i)
        store(out, i, to_bf16(value(fill, first_byte / 2 + i)));
      return;
    case FillKind::ValuesF32:
      for (std::size_t i = 0; i < out.size() / 4; ++i)
        store(out, i, static_cast<float>(value(fill, first_byte / 4 + i)));
      return;
  }
}

double code_deviation(int bits) noexcept {
  const double n = std::ldexp(1.0, bits);
  return std::sqrt((n * n - 1) / 12);
}

double mxfp4_deviation() noexcept {
  // 0, 0.5, 1, 1.5, 2, 3, 4, 6 with either sign.
  return std::sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8);
}

}  // namespace moeflux::cli::synth
