#include "quant/format.h"

#include <fmt/format.h>

#include "core/error.h"

namespace moeflux::quant {

std::string Format::name() const {
  switch (kind) {
    case FormatKind::F32: return "f32";
    case FormatKind::F16: return "f16";
    case FormatKind::BF16: return "bf16";
    case FormatKind::Mxfp4: return "mxfp4";
    case FormatKind::Fp8: return "fp8";
    case FormatKind::Affine: break;
  }
  std::string text = fmt::format("affine {}-bit g{}", bits, group);
  if (scale_dtype != DType::BF16) text += scale_dtype == DType::F16 ? " f16" : " f32";
  return text;
}

Format Format::affine(std::int64_t bits, std::int64_t group, DType scale_dtype) {
  const bool bits_ok = bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
  const bool group_ok = group == 32 || group == 64 || group == 128;
  const bool dtype_ok = scale_dtype == DType::BF16 || scale_dtype == DType::F16 || scale_dtype == DType::F32;
  if (!bits_ok || !group_ok || !dtype_ok)
    fail(ErrorCode::Unsupported, "affine quantization with {} bits, groups of {} and {} scales is not supported", bits,
         group, dtype_name(scale_dtype));
  return {FormatKind::Affine, static_cast<std::uint8_t>(bits), static_cast<std::uint16_t>(group), scale_dtype};
}

MatrixView MatrixView::slice_rows(std::int64_t begin, std::int64_t n) const noexcept {
  MatrixView v = *this;
  const auto skip = static_cast<std::uint64_t>(begin);
  v.rows = n;
  v.data = data + skip * row_bytes();
  if (scales != nullptr) v.scales = scales + skip * scale_row_bytes();
  if (biases != nullptr) v.biases = biases + skip * scale_row_bytes();
  return v;
}

}  // namespace moeflux::quant
