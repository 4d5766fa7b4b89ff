#include "quant/bands.h"

#include <cstring>

#include "core/error.h"

namespace moeflux::quant {
namespace {

// Rows in between lie a line further apart than they did: distances that are powers of two would share a set of the cache.
constexpr std::uint64_t kGap = 64;

using Words = std::uint32_t __attribute__((vector_size(16)));  // any compiler's; the widest that every machine has

Words load(const std::byte* p) noexcept {
  Words w;
  std::memcpy(&w, p, sizeof w);
  return w;
}
void store(std::byte* p, Words w) noexcept { std::memcpy(p, &w, sizeof w); }

// Four words of sixteen rows: [16 rows][4 words] at distance `stride` -> [4 words][16 rows].
void turn(const std::byte* from, std::uint64_t stride, std::byte* to) noexcept {
  for (std::uint64_t r = 0; r < kBandRows; r += 4, from += 4 * stride, to += 16) {
    const Words a = load(from), b = load(from + stride), c = load(from + 2 * stride), d = load(from + 3 * stride);
    const Words ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Words cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    store(to, __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5));
    store(to + 64, __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7));
    store(to + 128, __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5));
    store(to + 192, __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7));
  }
}

}  // namespace

MatrixView to_bands(const MatrixView& m, std::byte* memory, Allocator& scratch) {
  const std::uint64_t codes = m.row_bytes(), scales = m.scale_row_bytes(), n_rows = static_cast<std::uint64_t>(m.rows);
  if (!has_bands(m.format, m.rows, m.cols) || m.order != Order::Rows || m.data != memory || m.scales < m.data + n_rows * codes ||
      m.biases < m.scales + n_rows * scales)
    fail(ErrorCode::Internal, "to_bands: {} [{}, {}] does not lie in one piece of memory", m.format.name(), m.rows, m.cols);

  // From the last band to the first: a band ends behind the codes it is made of, never before them, and scales are kept apart.
  const Buffer kept = scratch.allocate(2 * n_rows * scales, 64);
  std::byte* const all_scales = kept.data();
  std::byte* const all_biases = all_scales + n_rows * scales;
  std::memcpy(all_scales, m.scales, n_rows * scales);
  std::memcpy(all_biases, m.biases, n_rows * scales);
  const std::uint64_t n_groups = m.format.n_groups(static_cast<std::uint64_t>(m.cols)), words = m.format.group / 8u;
  const std::uint64_t stride = codes + kGap;
  const Buffer rows = scratch.allocate(kBandRows * stride, 64);
  for (std::int64_t band = m.rows / kBandRows; band-- > 0;) {
    const auto first = static_cast<std::uint64_t>(band * kBandRows);
    for (std::uint64_t r = 0; r < kBandRows; ++r) std::memcpy(rows.data() + r * stride, m.data + (first + r) * codes, codes);
    std::byte* to = memory + static_cast<std::uint64_t>(band) * band_bytes(m.format, m.cols);
    const std::byte* from = rows.data();
    for (std::uint64_t g = 0; g < n_groups; ++g) {
      for (std::uint64_t w = 0; w < words; w += 4, from += 16, to += 4 * 4 * kBandRows) turn(from, stride, to);
      for (std::uint64_t r = first; r < first + kBandRows; ++r, to += 4) {
        std::memcpy(to, all_scales + r * scales + 2 * g, 2);
        std::memcpy(to + 2, all_biases + r * scales + 2 * g, 2);
      }
    }
  }
  return as_bands(m);
}

}  // namespace moeflux::quant
