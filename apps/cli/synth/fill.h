// Random tensor contents, a block at a time, at memory speed.
//
// Every byte is a function of the seed, the tensor's name and its place: the order of writing, threads and
// the other tensors do not matter, and a model with fewer layers or experts has the same bytes where both
// have them.
//
// Quantized matrices are never made from floats: codes are raw random bits, and scales and biases give the
// weights their mean and spread. Weight = s * (code - mid) + offset: the scale s varies by 15 % from group to
// group with either sign, mid is the middle of the codes. The offset gives all rows a part in one direction
// that the whole model knows: +-1 per group of 64 columns, the sign drawn from the seed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace moeflux::cli::synth {

enum class FillKind {
  Codes,     // random bits
  Scales,    // BF16
  Biases,    // BF16, -mid * scale + offset
  MxScales,  // U8 exponents of MXFP4
  ValuesBf16,
  ValuesF32,
};

struct Fill {
  FillKind kind = FillKind::Codes;
  std::uint64_t stream = 0;  // chooses the random words; the scales and biases of one matrix share theirs
  double scale = 0;  // Scales, Biases: the middle of |s|; MxScales: the scale to hit in the mean square
  double mid = 0;
  double low = 0, high = 0;  // Values: uniform in [low, high)
  // Offset of row r: common + popular * p(r), p(r) of mean 0 and variance 1 (the popularity of expert r). For
  // Biases, and for Values with columns.
  double common = 0, popular = 0;
  std::uint64_t direction = 0;       // the stream of the signs
  std::uint64_t groups_per_row = 0;  // of 64 columns
};

// The key of a named stream.
std::uint64_t stream_key(std::uint64_t seed, std::string_view name) noexcept;

// Blocks begin at multiples of this many bytes.
inline constexpr std::size_t kBlockBytes = std::size_t{1} << 18;

// Fills a block: the bytes of the tensor from `first_byte` (a multiple of kBlockBytes) on.
void fill_block(const Fill& fill, std::uint64_t first_byte, std::span<std::byte> out) noexcept;

// Standard deviation of uniform codes of so many bits, and of MXFP4 codes.
double code_deviation(int bits) noexcept;
double mxfp4_deviation() noexcept;

}  // namespace moeflux::cli::synth
