#include "quant/decode.h"

#include <cmath>

#include "core/error.h"
#include "quant/codes.h"

namespace moeflux::quant {
namespace {

float load_any(const std::byte* p, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::F32: return load_scalar<DType::F32>(p, i);
    case DType::F16: return load_scalar<DType::F16>(p, i);
    case DType::BF16: return load_scalar<DType::BF16>(p, i);
    default: fail(ErrorCode::Unsupported, "{} cannot be read as a float", dtype_name(dtype));
  }
}

void unpack_any(int bits, const std::uint8_t* p, std::int64_t n, std::uint8_t* out) {
  switch (bits) {
    case 2: return unpack<2>(p, n, out);
    case 3: return unpack<3>(p, n, out);
    case 4: return unpack<4>(p, n, out);
    case 5: return unpack<5>(p, n, out);
    case 6: return unpack<6>(p, n, out);
    case 8: return unpack<8>(p, n, out);
    default: fail(ErrorCode::Internal, "no codes of {} bits", bits);
  }
}

std::vector<std::uint8_t> raw_codes(const MatrixView& m, std::int64_t row) {
  if (m.order != Order::Rows) fail(ErrorCode::Internal, "a row of {} in bands is not decoded", m.format.name());
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(m.cols));
  const auto* p = reinterpret_cast<const std::uint8_t*>(m.data) + static_cast<std::uint64_t>(row) * m.row_bytes();
  unpack_any(m.format.bits, p, m.cols, codes.data());
  return codes;
}

}  // namespace

GroupParams group_params(const MatrixView& m, std::int64_t row, std::int64_t group) {
  const std::uint64_t skip = static_cast<std::uint64_t>(row) * m.scale_row_bytes();
  if (m.format.kind == FormatKind::Mxfp4)
    return {e8m0_half_to_f32(static_cast<std::uint8_t>(m.scales[skip + static_cast<std::uint64_t>(group)])), 0.0f};
  return {load_any(m.scales + skip, m.format.scale_dtype, group), load_any(m.biases + skip, m.format.scale_dtype, group)};
}

void decode_codes(const MatrixView& m, std::int64_t row, std::span<std::int16_t> out) {
  const std::vector<std::uint8_t> codes = raw_codes(m, row);
  const bool mx = m.format.kind == FormatKind::Mxfp4;
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = mx ? kE2m1Twice[codes[i]] : static_cast<std::int16_t>(codes[i]);
}

void decode_row(const MatrixView& m, std::int64_t row, std::span<float> out) {
  if (!m.format.quantized()) {
    const DType dtype = m.format.scale_dtype;
    return decode_floats(m.data + static_cast<std::uint64_t>(row) * m.row_bytes(), dtype, out);
  }
  if (m.format.kind == FormatKind::Fp8) {
    const auto* codes = reinterpret_cast<const std::uint8_t*>(m.data) + static_cast<std::uint64_t>(row) * m.row_bytes();
    const std::byte* scales = m.scales + static_cast<std::uint64_t>(row) * m.scale_row_bytes();
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = e4m3_to_f32(codes[i]) * load_scalar<DType::F32>(scales, static_cast<std::int64_t>(i / m.format.group));
    return;
  }
  std::vector<std::int16_t> codes(out.size());
  decode_codes(m, row, codes);
  for (std::int64_t g = 0; g < m.cols / m.format.group; ++g) {
    const GroupParams p = group_params(m, row, g);
    for (std::int64_t i = g * m.format.group; i < (g + 1) * m.format.group; ++i)
      out[static_cast<std::size_t>(i)] = std::fma(p.scale, static_cast<float>(codes[static_cast<std::size_t>(i)]), p.bias);
  }
}

void decode_floats(const std::byte* src, DType dtype, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = load_any(src, dtype, static_cast<std::int64_t>(i));
}

}  // namespace moeflux::quant
