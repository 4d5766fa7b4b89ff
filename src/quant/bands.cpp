#include "quant/bands.h"

#include <cstring>
#include <vector>

#include "core/error.h"

namespace moeflux::quant {
namespace {

// Rows in between lie a line further apart than they did: distances that are powers of two would share a set of the cache.
constexpr std::uint64_t kGap = 64;

// Sixteen rows of words.
struct Rows {
  std::vector<std::byte> bytes;
  std::uint64_t stride;
  explicit Rows(std::uint64_t row_bytes) : bytes(kBandRows * (row_bytes + kGap)), stride(row_bytes + kGap) {}
  void fill(const std::byte* from) noexcept {
    for (std::uint64_t r = 0; r < kBandRows; ++r) std::memcpy(bytes.data() + r * stride, from + r * (stride - kGap), stride - kGap);
  }
};

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

MatrixView to_bands(const MatrixView& m, std::byte* memory) {
  const std::uint64_t codes = m.row_bytes(), scales = m.scale_row_bytes(), n_rows = static_cast<std::uint64_t>(m.rows);
  if (!has_bands(m.format, m.rows, m.cols) || m.order != Order::Rows || m.data != memory || m.scales < m.data + n_rows * codes ||
      m.biases < m.scales + n_rows * scales)
    fail(ErrorCode::Internal, "to_bands: {} [{}, {}] does not lie in one piece of memory", m.format.name(), m.rows, m.cols);

  // From the last band to the first: a band ends behind the codes it is made of, never before them, and scales are kept apart.
  const std::vector<std::byte> kept(m.scales, m.biases + n_rows * scales);
  const std::byte* const all_scales = kept.data();
  const std::byte* const all_biases = kept.data() + (m.biases - m.scales);
  const std::uint64_t n_groups = m.format.n_groups(static_cast<std::uint64_t>(m.cols)), words = m.format.group / 8u;
  Rows rows(codes);
  for (std::int64_t band = m.rows / kBandRows; band-- > 0;) {
    const auto first = static_cast<std::uint64_t>(band * kBandRows);
    rows.fill(m.data + first * codes);
    std::byte* to = memory + static_cast<std::uint64_t>(band) * band_bytes(m.format, m.cols);
    const std::byte* from = rows.bytes.data();
    for (std::uint64_t g = 0; g < n_groups; ++g) {
      for (std::uint64_t w = 0; w < words; w += 4, from += 16, to += 4 * 4 * kBandRows) turn(from, rows.stride, to);
      for (std::uint64_t r = first; r < first + kBandRows; ++r, to += 4) {
        std::memcpy(to, all_scales + r * scales + 2 * g, 2);
        std::memcpy(to + 2, all_biases + r * scales + 2 * g, 2);
      }
    }
  }
  return as_bands(m);
}

}  // namespace moeflux::quant
