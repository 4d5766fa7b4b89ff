// Order::Bands: the rows of a matrix brought side by side, so that whoever computes sixteen of them reads one ascending stream.
//
// A band is sixteen rows. Group after group it has
//   codes   [group / 8 words][16 rows][4 bytes]: a word is eight 4-bit codes of a row as they were,
//   scales  [16 rows][scale, bias], 16 bits each.
// Bands follow each other without a gap and take as many bytes as the matrix did.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/buffer.h"
#include "quant/format.h"

namespace moeflux::quant {

inline constexpr std::int64_t kBandRows = 16;

// Which matrices have bands: affine 4-bit codes with 16-bit scales, in whole bands.
constexpr bool has_bands(const Format& f, std::int64_t rows, std::int64_t cols) noexcept {
  return f.kind == FormatKind::Affine && f.bits == 4 && f.scale_dtype != DType::F32 && rows > 0 && rows % kBandRows == 0 && cols % f.group == 0;
}

// Bytes of one group of a band, and of a whole band.
constexpr std::uint64_t band_group_bytes(const Format& f) noexcept { return static_cast<std::uint64_t>(kBandRows) * (f.group / 2u + 4u); }
constexpr std::uint64_t band_bytes(const Format& f, std::int64_t cols) noexcept {
  return static_cast<std::uint64_t>(cols) / f.group * band_group_bytes(f);
}

// The same matrix once it is in bands.
inline MatrixView as_bands(MatrixView m) noexcept {
  m.scales = m.biases = nullptr;
  m.order = Order::Bands;
  return m;
}

// Brings a matrix that has_bands() from Rows to Bands, in place. Its codes, scales and biases lie behind each other in this order
// (with gaps or without) from `memory` on, which is the matrix's alone. Takes a ninth of its size besides from `scratch`,
// of host memory, until it returns.
MatrixView to_bands(const MatrixView& rows, std::byte* memory, Allocator& scratch);

}  // namespace moeflux::quant
