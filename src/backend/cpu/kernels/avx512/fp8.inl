// fp8 weights to f32, 64 at a time: every value is a bf16, whose two bytes are made for all 64 at once.

namespace {

// Columns 16 i .. 16 i + 15 into out[i].
MOEFLUX_MATH void e4m3_to_f32x64(__m512i codes, __m512 (&out)[4]) noexcept {
  // Bytes and then words are spread within quarters of a register: quarter q of out[i] is the i-th four codes of quarter q.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  codes = _mm512_permutexvar_epi32(order, codes);
  __m512i low, high;
  e4m3_bytes(codes, low, high);
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xf8);  // high | codes & sign
  const __m512i none = _mm512_setzero_si512(), a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
  out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(none, a));
  out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(none, a));
  out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(none, b));
  out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(none, b));
}

// The weights of 64 columns of a row; unless Whole they are n < 64, zeros after them.
template <bool Whole>
MOEFLUX_MATH void fp8_weights(const std::uint8_t* codes, std::int64_t n, float scale, __m512 (&w)[4]) noexcept {
  e4m3_to_f32x64(Whole ? load512(codes) : _mm512_maskz_loadu_epi8((std::uint64_t{1} << n) - 1, codes), w);
  const __m512 s = _mm512_set1_ps(scale);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) w[i] = _mm512_mul_ps(w[i], s);
}

// One token: four rows at a time. A scale goes with 128 columns.
MOEFLUX_MATH void matvec_fp8(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const std::int64_t cols = b.w.cols;
  for (std::int64_t r = row_begin; r < row_end; r += 4) {
    const std::uint8_t* codes[4];
    const std::byte* scales[4];
    for (int i = 0; i < 4; ++i) {
      const auto row = static_cast<std::uint64_t>(r + i < row_end ? r + i : row_end - 1);
      codes[i] = reinterpret_cast<const std::uint8_t*>(b.w.data) + row * b.w.row_bytes();
      scales[i] = b.w.scales + row * b.w.scale_row_bytes();
    }
    const char* ahead = reinterpret_cast<const char*>(codes[0]) + kAhead;
    __m512 a0 = _mm512_setzero_ps(), a1 = a0, a2 = a0, a3 = a0;
    const auto step = [&]<bool Whole>(std::bool_constant<Whole>, std::int64_t c) __attribute__((always_inline)) {
      const std::int64_t n = cols - c;
      __m512 x[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const std::int64_t left = Whole ? 16 : n - 16 * i;
        x[i] = left >= 16 ? _mm512_loadu_ps(b.x + c + 16 * i) : left > 0 ? _mm512_maskz_loadu_ps(first(left), b.x + c + 16 * i) : _mm512_setzero_ps();
      }
      const auto add = [&](int row, __m512& acc) __attribute__((always_inline)) {
        __m512 w[4];
        _mm_prefetch(ahead + 64 * row, _MM_HINT_T1);
        fp8_weights<Whole>(codes[row] + c, n, quant::load_scalar<DType::F32>(scales[row], c / 128), w);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          if (Whole || n > 16 * i) acc = _mm512_fmadd_ps(x[i], w[i], acc);
      };
      add(0, a0), add(1, a1), add(2, a2), add(3, a3);
      ahead += 4 * 64;
    };
    std::int64_t c = 0;
    for (; c + 64 <= cols; c += 64) step(std::true_type{}, c);
    if (c < cols) step(std::false_type{}, c);
    const __m512 acc[4] = {a0, a1, a2, a3};
    for (int i = 0; i < 4 && r + i < row_end; ++i) {
      const float v = reduce_add(V16{acc[i]});
      y_row(b, 0)[r + i] = b.bias != nullptr ? v + b.bias[r + i] : v;
    }
  }
}

}  // namespace
