// Matrix times tokens. A row is decoded (exact) or unpacked (fast) once into scratch and then meets all tokens;
// each output element has one accumulator chain, so tokens, threads and blocks cannot change its bits.

namespace {

using quant::Format;
using quant::FormatKind;
using quant::MatrixView;

// scale (and bias) of every group of a row as f32.
MOEFLUX_MATH void decode_scales(const std::byte* p, DType dtype, std::int64_t n, float* out) noexcept {
  for (std::int64_t g = 0; g < n; ++g)
    out[g] = dtype == DType::BF16  ? quant::load_scalar<DType::BF16>(p, g)
             : dtype == DType::F16 ? quant::load_scalar<DType::F16>(p, g)
                                   : quant::load_scalar<DType::F32>(p, g);
}

struct RowScratch {
  float* values;  // a decoded row; the codes of a fast row use the same space
  float* scales;
  float* biases;
};

MOEFLUX_MATH RowScratch split_scratch(std::byte* scratch, std::int64_t cols) noexcept {
  auto* f = reinterpret_cast<float*>(scratch);
  const std::int64_t groups = cols / 32 + 16;
  return {f, f + cols, f + cols + groups};
}

template <int Slot>
MOEFLUX_MATH void decode_plain(const std::byte* p, std::int64_t cols, float* out) noexcept {
  std::int64_t i = 0;
  if constexpr (Slot == 0) {
    std::memcpy(out, p, static_cast<std::size_t>(cols) * 4);
    i = cols;
  } else {
    for (; i + 16 <= cols; i += 16) store(out + i, Slot == 1 ? load_f16(p + i * 2) : load_bf16(p + i * 2));
  }
  for (; i < cols; ++i)
    out[i] = Slot == 1 ? quant::load_scalar<DType::F16>(p, i) : quant::load_scalar<DType::BF16>(p, i);
}

template <int Bits>
MOEFLUX_MATH void decode_affine(const MatrixView& w, std::int64_t row, const RowScratch& s) noexcept {
  const std::int64_t group = w.format.group, n_groups = w.cols / group;
  const auto at = static_cast<std::uint64_t>(row);
  decode_scales(w.scales + at * w.scale_row_bytes(), w.format.scale_dtype, n_groups, s.scales);
  decode_scales(w.biases + at * w.scale_row_bytes(), w.format.scale_dtype, n_groups, s.biases);
  const auto* codes = reinterpret_cast<const std::uint8_t*>(w.data) + at * w.row_bytes();
  alignas(64) std::uint8_t u[128];
  for (std::int64_t g = 0; g < n_groups; ++g) {
    quant::unpack<Bits>(codes + g * group / 8 * Bits, group, u);
    const V16 scale = set1(s.scales[g]), bias = set1(s.biases[g]);
    for (std::int64_t i = 0; i < group; i += 16) store(s.values + g * group + i, fma(scale, load_u8(u + i), bias));
  }
}

MOEFLUX_MATH void unpack_mxfp4(const std::uint8_t* p, std::int64_t n, std::int8_t* out) noexcept {
  for (std::int64_t i = 0; i < n / 2; ++i) {
    out[2 * i] = quant::kE2m1Twice[p[i] & 15];
    out[2 * i + 1] = quant::kE2m1Twice[p[i] >> 4];
  }
}

MOEFLUX_MATH void decode_mxfp4(const MatrixView& w, std::int64_t row, const RowScratch& s) noexcept {
  const auto at = static_cast<std::uint64_t>(row);
  const auto* scales = reinterpret_cast<const std::uint8_t*>(w.scales) + at * w.scale_row_bytes();
  const auto* codes = reinterpret_cast<const std::uint8_t*>(w.data) + at * w.row_bytes();
  alignas(64) std::int8_t u[32];
  for (std::int64_t g = 0; g < w.cols / 32; ++g) {
    unpack_mxfp4(codes + g * 16, 32, u);
    const V16 scale = set1(quant::e8m0_half_to_f32(scales[g]));
    for (std::int64_t i = 0; i < 32; i += 16) store(s.values + g * 32 + i, fma(scale, load_i8(u + i), zero()));
  }
}

MOEFLUX_MATH void decode_fp8(const MatrixView& w, std::int64_t row, float* out) noexcept {
  const auto at = static_cast<std::uint64_t>(row);
  const auto* codes = reinterpret_cast<const std::uint8_t*>(w.data) + at * w.row_bytes();
  const std::byte* scales = w.scales + at * w.scale_row_bytes();
  for (std::int64_t first = 0; first < w.cols; first += 128) {
    const float scale = quant::load_scalar<DType::F32>(scales, first / 128);
    const std::int64_t end = first + 128 < w.cols ? first + 128 : w.cols;
    std::int64_t i = first;
    for (; i + 16 <= end; i += 16) store(out + i, mul(load_e4m3(codes + i), set1(scale)));
    for (; i < end; ++i) out[i] = quant::e4m3_to_f32(codes[i]) * scale;
  }
}

// Slots of kernel_table.h: 0 f32, 1 f16, 2 bf16, 3 mxfp4, 4..8 affine 2..6 bits, 9 affine 8 bits, 10 fp8.
template <int Slot>
inline constexpr int kBits = Slot == 9 ? 8 : Slot - 2;

template <int Slot>
MOEFLUX_MATH void decode_row_slot(const MatrixView& w, std::int64_t row, const RowScratch& s) noexcept {
  if constexpr (Slot <= 2)
    decode_plain<Slot>(w.data + static_cast<std::uint64_t>(row) * w.row_bytes(), w.cols, s.values);
  else if constexpr (Slot == 3)
    decode_mxfp4(w, row, s);
  else if constexpr (Slot == 10)
    decode_fp8(w, row, s.values);
  else
    decode_affine<kBits<Slot>>(w, row, s);
}

// Four tokens against one decoded row: each keeps its own sixteen lanes.
MOEFLUX_MATH void dot16_x4(const float* x, std::int64_t stride, const float* w, std::int64_t n, float* out) noexcept {
  V16 a0 = zero(), a1 = zero(), a2 = zero(), a3 = zero();
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const V16 v = load(w + i);
    a0 = fma(load(x + i), v, a0);
    a1 = fma(load(x + stride + i), v, a1);
    a2 = fma(load(x + 2 * stride + i), v, a2);
    a3 = fma(load(x + 3 * stride + i), v, a3);
  }
  if (const std::int64_t rest = n - i; rest > 0) {
    const V16 v = load_n(w + i, rest);
    a0 = fma(load_n(x + i, rest), v, a0);
    a1 = fma(load_n(x + stride + i, rest), v, a1);
    a2 = fma(load_n(x + 2 * stride + i, rest), v, a2);
    a3 = fma(load_n(x + 3 * stride + i, rest), v, a3);
  }
  out[0] = reduce_add(a0), out[1] = reduce_add(a1), out[2] = reduce_add(a2), out[3] = reduce_add(a3);
}

MOEFLUX_MATH float* y_row(const MatMulBlock& b, std::int64_t t) noexcept {
  return b.y + (b.slots != nullptr ? b.slots[t] : t) * b.y_stride;
}

// decode(w, row, scratch): the row as f32.
template <class Decode>
MOEFLUX_MATH void matmul_decoded(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end, const Decode& decode) noexcept {
  const RowScratch s = split_scratch(b.scratch, b.w.cols);
  for (std::int64_t r = row_begin; r < row_end; ++r) {
    decode(b.w, r, s);
    std::int64_t t = 0;
    for (; t + 4 <= b.n_tokens; t += 4) {
      float out[4];
      dot16_x4(b.x + t * b.x_stride, b.x_stride, s.values, b.w.cols, out);
      for (int k = 0; k < 4; ++k)
        y_row(b, t + k)[r] = b.bias != nullptr ? out[k] + b.bias[r] : out[k];
    }
    for (; t < b.n_tokens; ++t) {
      const float v = dot16(b.x + t * b.x_stride, s.values, b.w.cols);
      y_row(b, t)[r] = b.bias != nullptr ? v + b.bias[r] : v;
    }
  }
}

template <int Slot>
void matmul_exact(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  matmul_decoded(b, row_begin, row_end, [](const MatrixView& w, std::int64_t row, const RowScratch& s) noexcept { decode_row_slot<Slot>(w, row, s); });
}

template <int Slot>
void matmul_fast(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const MatrixView& w = b.w;
  const RowScratch s = split_scratch(b.scratch, w.cols);
  const int group = w.format.group;
  const std::int64_t n_groups = w.cols / group;
  auto* u = reinterpret_cast<std::uint8_t*>(s.values);
  auto* c = reinterpret_cast<std::int8_t*>(s.values);
  for (std::int64_t r = row_begin; r < row_end; ++r) {
    const auto at = static_cast<std::uint64_t>(r);
    const auto* codes = reinterpret_cast<const std::uint8_t*>(w.data) + at * w.row_bytes();
    if constexpr (Slot == 3) {
      const auto* e = reinterpret_cast<const std::uint8_t*>(w.scales) + at * w.scale_row_bytes();
      for (std::int64_t g = 0; g < n_groups; ++g) s.scales[g] = quant::e8m0_half_to_f32(e[g]);
      unpack_mxfp4(codes, w.cols, c);
    } else {
      decode_scales(w.scales + at * w.scale_row_bytes(), w.format.scale_dtype, n_groups, s.scales);
      decode_scales(w.biases + at * w.scale_row_bytes(), w.format.scale_dtype, n_groups, s.biases);
      quant::unpack<kBits<Slot>>(codes, w.cols, u);
    }
    for (std::int64_t t = 0; t < b.n_tokens; ++t) {
      const std::int8_t* x8 = b.xq.x8 + t * w.cols;
      const float* d = b.xq.d + t * n_groups;
      const std::int32_t* sx = b.xq.sx + t * n_groups;
      float acc = 0.0f;
      for (std::int64_t g = 0; g < n_groups; ++g) {
        const std::int32_t idot = Slot == 3 ? dot_i8(c + g * group, x8 + g * group, group) : dot_u8(u + g * group, x8 + g * group, group);
        acc = math::fma(static_cast<float>(idot), s.scales[g] * d[g], acc);
        if constexpr (Slot != 3) acc = math::fma(static_cast<float>(sx[g]), s.biases[g] * d[g], acc);
      }
      y_row(b, t)[r] = b.bias != nullptr ? acc + b.bias[r] : acc;
    }
  }
}

void decode_row(const MatrixView& w, std::int64_t row, float* out, std::byte* scratch) noexcept {
  RowScratch s = split_scratch(scratch, w.cols);
  s.values = out;
  switch (format_slot(w.format)) {
    case 0: return decode_row_slot<0>(w, row, s);
    case 1: return decode_row_slot<1>(w, row, s);
    case 2: return decode_row_slot<2>(w, row, s);
    case 3: return decode_row_slot<3>(w, row, s);
    case 4: return decode_row_slot<4>(w, row, s);
    case 5: return decode_row_slot<5>(w, row, s);
    case 6: return decode_row_slot<6>(w, row, s);
    case 7: return decode_row_slot<7>(w, row, s);
    case 8: return decode_row_slot<8>(w, row, s);
    case 10: return decode_row_slot<10>(w, row, s);
    default: return decode_row_slot<9>(w, row, s);
  }
}

void quantize_row(const float* x, std::int64_t cols, std::int64_t group, std::int8_t* x8, float* d,
                  std::int32_t* sx) noexcept {
  const V16 magic = set1(12582912.0f), top = set1(127.0f), bottom = set1(-127.0f);
  for (std::int64_t g = 0; g < cols / group; ++g) {
    const float* p = x + g * group;
    std::int8_t* q = x8 + g * group;
    V16 m = zero();
    for (std::int64_t i = 0; i < group; i += 16) m = max(abs(load(p + i)), m);
    const float scale = reduce_max(m) / 127.0f;
    d[g] = scale;
    if (!(scale > 0.0f)) {
      std::memset(q, 0, static_cast<std::size_t>(group));
      sx[g] = 0;
      continue;
    }
    const V16 s = set1(scale);
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < group; i += 16) {
      const V16 rounded = sub(add(div(load(p + i), s), magic), magic);
      store_i8(q + i, max(min(rounded, top), bottom));
    }
    for (std::int64_t i = 0; i < group; ++i) sum += q[i];
    sx[g] = sum;
  }
}

}  // namespace
