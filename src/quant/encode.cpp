#include "quant/encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "quant/codes.h"

namespace moeflux::quant {
namespace {

void store_scalar(std::byte* p, DType dtype, float value) {
  if (dtype == DType::F32) {
    std::memcpy(p, &value, 4);
    return;
  }
  const std::uint16_t bits = dtype == DType::BF16 ? f32_to_bf16(value) : f32_to_f16(value);
  std::memcpy(p, &bits, 2);
}

void pack_row(int bits, std::span<const std::uint8_t> codes, std::byte* out) {
  auto* p = reinterpret_cast<std::uint8_t*>(out);
  for (std::size_t i = 0; i < codes.size(); i += 8, p += bits) {
    switch (bits) {
      case 2: pack8<2>(&codes[i], p); break;
      case 3: pack8<3>(&codes[i], p); break;
      case 4: pack8<4>(&codes[i], p); break;
      case 5: pack8<5>(&codes[i], p); break;
      default: pack8<6>(&codes[i], p); break;
    }
  }
}

struct AffineGroup {
  float scale, bias;
};

AffineGroup affine_group(std::span<const float> w, int bits, std::uint8_t* codes) {
  const auto [lo, hi] = std::minmax_element(w.begin(), w.end());
  const float n = static_cast<float>((1 << bits) - 1);
  const bool low_side = std::fabs(*lo) > std::fabs(*hi);
  float scale = std::max((*hi - *lo) / n, 1e-7f);
  if (!low_side) scale = -scale;
  const float edge = low_side ? *lo : *hi;
  const float q0 = std::rint(edge / scale);
  float bias = 0.0f;
  if (q0 != 0.0f) {
    scale = edge / q0;
    bias = edge;
  }
  for (std::size_t i = 0; i < w.size(); ++i)
    codes[i] = static_cast<std::uint8_t>(std::clamp(std::rint((w[i] - bias) / scale), 0.0f, n));
  return {scale, bias};
}

// Nearest e2m1 magnitude; ties go to the even mantissa.
std::uint8_t e2m1_code(float x) {
  const float a = std::fabs(x);
  const std::uint8_t code = a > 5.0f    ? 7
                            : a >= 3.5f  ? 6
                            : a > 2.5f   ? 5
                            : a >= 1.75f ? 4
                            : a > 1.25f  ? 3
                            : a >= 0.75f ? 2
                            : a > 0.25f  ? 1
                                         : 0;
  return static_cast<std::uint8_t>(code | (std::signbit(x) ? 8 : 0));
}

std::uint8_t mxfp4_group(std::span<const float> w, std::uint8_t* codes) {
  float top = 0.0f;
  for (float v : w) top = std::max(top, std::fabs(v));
  const float e = top == 0.0f ? -127.0f : std::clamp(std::rint(std::log2(top / 6.0f)), -127.0f, 127.0f);
  const float scale = std::exp2(e);
  for (std::size_t i = 0; i < w.size(); ++i) codes[i] = e2m1_code(w[i] / scale);
  return static_cast<std::uint8_t>(static_cast<int>(e) + 127);
}

// Nearest e4m3 value; ties go to the even mantissa.
std::uint8_t e4m3_code(float x) {
  std::uint8_t best = 0;
  for (std::uint8_t code = 1; code < 0x7f; ++code) {
    const float old_error = std::fabs(std::fabs(x) - e4m3_to_f32(best)), error = std::fabs(std::fabs(x) - e4m3_to_f32(code));
    if (error < old_error || (error == old_error && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

float fp8_group(std::span<const float> w, std::uint8_t* codes) {
  float top = 0.0f;
  for (float v : w) top = std::max(top, std::fabs(v));
  const float scale = top == 0.0f ? 1.0f : top / 448.0f;
  for (std::size_t i = 0; i < w.size(); ++i) codes[i] = e4m3_code(w[i] / scale);
  return scale;
}

}  // namespace

MatrixView EncodedMatrix::view() const noexcept {
  MatrixView v;
  v.format = format;
  v.rows = rows;
  v.cols = cols;
  v.data = data.data();
  v.scales = scales.empty() ? nullptr : scales.data();
  v.biases = biases.empty() ? nullptr : biases.data();
  return v;
}

EncodedMatrix encode(std::span<const float> values, std::int64_t rows, std::int64_t cols, const Format& format) {
  const auto n_rows = static_cast<std::size_t>(rows), n_cols = static_cast<std::size_t>(cols);
  if (values.size() != n_rows * n_cols || (format.integer_codes() && n_cols % format.group != 0))
    fail(ErrorCode::InvalidArgument, "cannot encode {} values as [{}, {}] {}", values.size(), rows, cols, format.name());
  EncodedMatrix out{format, rows, cols, {}, {}, {}};
  const std::size_t row_bytes = format.row_bytes(n_cols), scale_bytes = format.scale_row_bytes(n_cols);
  out.data.resize(n_rows * row_bytes);
  out.scales.resize(n_rows * scale_bytes);
  if (format.has_biases()) out.biases.resize(n_rows * scale_bytes);
  std::vector<std::uint8_t> codes(n_cols);
  for (std::size_t r = 0; r < n_rows; ++r) {
    const auto row = values.subspan(r * n_cols, n_cols);
    if (!format.quantized()) {
      const std::size_t size = format.bits / 8u;
      for (std::size_t i = 0; i < n_cols; ++i) store_scalar(&out.data[r * row_bytes + i * size], format.scale_dtype, row[i]);
      continue;
    }
    const std::size_t group = format.group, n_groups = format.n_groups(n_cols), size = scale_bytes / n_groups;
    for (std::size_t g = 0; g < n_groups; ++g) {
      const std::size_t at = r * scale_bytes + g * size;
      if (format.kind == FormatKind::Fp8) {
        store_scalar(&out.scales[at], DType::F32, fp8_group(row.subspan(g * group, std::min(group, n_cols - g * group)), &codes[g * group]));
      } else if (format.kind == FormatKind::Mxfp4) {
        out.scales[at] = static_cast<std::byte>(mxfp4_group(row.subspan(g * group, group), &codes[g * group]));
      } else {
        const AffineGroup p = affine_group(row.subspan(g * group, group), format.bits, &codes[g * group]);
        store_scalar(&out.scales[at], format.scale_dtype, p.scale);
        store_scalar(&out.biases[at], format.scale_dtype, p.bias);
      }
    }
    if (format.bits == 8)
      std::memcpy(&out.data[r * row_bytes], codes.data(), n_cols);
    else
      pack_row(format.bits, codes, &out.data[r * row_bytes]);
  }
  return out;
}

}  // namespace moeflux::quant
