// Weight formats: how the numbers of a matrix lie in memory. Kernels are selected by format; experts
// keep theirs from disk to multiplier.
//
//   F32, F16, BF16  plain values, row-major.
//   Affine          unsigned codes of 2, 3, 4, 5, 6 or 8 bits, each row one little-endian bit stream;
//                   per group of 32, 64 or 128 inputs a scale and a bias: w = scale * code + bias.
//   Mxfp4           codes of 4 bits (e2m1), per 32 inputs one e8m0 scale: w = e2m1(code) * 2^(u - 127).
//   Fp8             codes of 8 bits (e4m3), per row and 128 inputs (the last group may be short) one f32 scale:
//                   w = e4m3(code) * scale, rounded to f32. Files share a scale among 128 rows; memory does not.
//
// This folder is the only place that knows where a code's bits are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace moeflux::quant {

enum class FormatKind : std::uint8_t { F32, F16, BF16, Affine, Mxfp4, Fp8 };

struct Format {
  FormatKind kind = FormatKind::F32;
  std::uint8_t bits = 32;               // of one code
  std::uint16_t group = 0;              // inputs that share a scale; 0 for plain formats
  DType scale_dtype = DType::BF16;      // affine: BF16, F16 or F32, for scales and biases alike

  friend bool operator==(const Format&, const Format&) = default;

  bool quantized() const noexcept { return group != 0; }
  bool has_biases() const noexcept { return kind == FormatKind::Affine; }
  // Codes are integers times a scale: fast precision multiplies them by 8-bit activations. All other formats see f32
  // activations in both precisions.
  bool integer_codes() const noexcept { return kind == FormatKind::Affine || kind == FormatKind::Mxfp4; }

  // Bytes of one row's codes, and of one row's scales (biases take the same again). `cols` must be a
  // multiple of the group, except for Fp8.
  std::uint64_t row_bytes(std::uint64_t cols) const noexcept { return cols * bits / 8; }
  std::uint64_t scale_row_bytes(std::uint64_t cols) const noexcept {
    return quantized() ? n_groups(cols) * (kind == FormatKind::Mxfp4 ? 1 : dtype_bits(scale_dtype) / 8) : 0;
  }
  // Groups of a row; quantized formats only.
  std::uint64_t n_groups(std::uint64_t cols) const noexcept { return (cols + group - 1) / group; }
  // Everything a [rows, cols] matrix needs: codes, scales, biases.
  std::uint64_t matrix_bytes(std::uint64_t rows, std::uint64_t cols) const noexcept {
    return rows * (row_bytes(cols) + scale_row_bytes(cols) * (has_biases() ? 2 : 1));
  }

  // "bf16", "affine 4-bit g64", "mxfp4", "fp8".
  std::string name() const;

  // The formats; affine() throws Unsupported for bits, groups or scale types that do not exist.
  static constexpr Format f32() noexcept { return {FormatKind::F32, 32, 0, DType::F32}; }
  static constexpr Format f16() noexcept { return {FormatKind::F16, 16, 0, DType::F16}; }
  static constexpr Format bf16() noexcept { return {FormatKind::BF16, 16, 0, DType::BF16}; }
  static constexpr Format mxfp4() noexcept { return {FormatKind::Mxfp4, 4, 32, DType::U8}; }
  static constexpr Format fp8() noexcept { return {FormatKind::Fp8, 8, 128, DType::F32}; }
  static Format affine(std::int64_t bits, std::int64_t group, DType scale_dtype);
};

// How the rows of a matrix lie in memory.
enum class Order : std::uint8_t {
  Rows,   // one after another, scales and biases apart: as files have them
  Bands,  // sixteen side by side, scales and biases among them (quant/bands.h): one ascending stream for kernels that compute sixteen
};

// A matrix W[rows, cols] (rows = outputs) in some format; y = W x. Whoever made the view keeps the memory.
struct MatrixView {
  Format format;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const std::byte* data = nullptr;    // codes or plain values, rows * row_bytes; bands: everything
  const std::byte* scales = nullptr;  // quantized formats; bands: null
  const std::byte* biases = nullptr;  // affine; bands: null
  Order order = Order::Rows;

  bool empty() const noexcept { return data == nullptr; }
  std::uint64_t row_bytes() const noexcept { return format.row_bytes(static_cast<std::uint64_t>(cols)); }
  std::uint64_t scale_row_bytes() const noexcept { return format.scale_row_bytes(static_cast<std::uint64_t>(cols)); }
  std::uint64_t bytes() const noexcept {
    return format.matrix_bytes(static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols));
  }
  // Rows [begin, begin + n); order Rows.
  MatrixView slice_rows(std::int64_t begin, std::int64_t n) const noexcept;
};

}  // namespace moeflux::quant
