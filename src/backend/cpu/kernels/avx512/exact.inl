// exact matmul. One token: four rows at a time, codes become f32 weights in registers. Many tokens: four rows
// are decoded once and meet tiles of six tokens. Sixteen lanes and their tree as in generic/math.inl.

namespace {

inline constexpr int kExactRows = 4;
inline constexpr int kExactTokens = 6;  // 4 x 6 sums, four weights, one activation: 29 registers

// Codes of at most four bits index a register with all 16 values fma(s, code, b).
template <int Slot>
inline constexpr bool kLookup = Slot >= 3 && Slot <= 6;
template <int Slot>
inline constexpr int kCodeBits = Slot == 3 ? 4 : Slot == 10 ? 8 : kBits<Slot>;

// Sixteen codes of 2, 3, 5 or 6 bits fill 2 * Bits bytes. A lane takes the four bytes in which its code lies and shifts them: kPerWord neighbours take
// the same four, the last ones so that nothing behind the codes is read.
template <int Bits>
struct LaneCodes {
  static constexpr int kPerWord = Bits == 2 ? 16 : Bits == 3 ? 8 : 4;
  static constexpr int first_byte(int lane) noexcept {
    const int byte = lane / kPerWord * kPerWord * Bits / 8;
    return byte < 2 * Bits - 4 ? byte : 2 * Bits - 4;
  }
  alignas(64) std::uint32_t shift[16];
  constexpr LaneCodes() : shift{} {
    for (int l = 0; l < 16; ++l) shift[l] = static_cast<std::uint32_t>(Bits * l - 8 * first_byte(l));
  }
};
template <int Bits>
inline constexpr LaneCodes<Bits> kLaneCodes{};

// Code l of the sixteen at p in the low bits of lane l; those above it are not cleared.
template <int Bits>
MOEFLUX_MATH __m512i lane_codes(const std::uint8_t* p) noexcept {
  constexpr int kPerWord = LaneCodes<Bits>::kPerWord;
  __m512i words = _mm512_broadcastd_epi32(_mm_loadu_si32(p));
#pragma GCC unroll 4
  for (int lane = kPerWord; lane < 16; lane += kPerWord)
    words = _mm512_mask_broadcastd_epi32(words, static_cast<__mmask16>(((1u << kPerWord) - 1) << lane), _mm_loadu_si32(p + LaneCodes<Bits>::first_byte(lane)));
  return _mm512_srlv_epi32(words, load512(kLaneCodes<Bits>.shift));
}

// One row being decoded: weights() gives sixteen of the current group.
template <int Slot>
struct RowReader {
  const std::uint8_t* codes;
  const float* scales;  // f32, by group
  const float* biases;
  __m512 a, b;  // lookup table; or scale and bias

  MOEFLUX_MATH void start_group(std::int64_t g) noexcept {
    if constexpr (Slot <= 2) return;
    a = _mm512_set1_ps(scales[g]);
    if constexpr (Slot == 10) return;
    b = Slot == 3 ? _mm512_setzero_ps() : _mm512_set1_ps(biases[g]);
    if constexpr (Slot == 3)
      a = _mm512_fmadd_ps(a, _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), b);
    else if constexpr (Slot == 4)
      a = _mm512_fmadd_ps(a, _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3), b);
    else if constexpr (Slot == 5)
      a = _mm512_fmadd_ps(a, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7), b);
    else if constexpr (Slot == 6)
      a = _mm512_fmadd_ps(a, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), b);
  }

  // Columns c .. c + 15, c a multiple of 16.
  MOEFLUX_MATH V16 weights(std::int64_t c) const noexcept {
    const auto* p = reinterpret_cast<const std::byte*>(codes);
    if constexpr (Slot == 0) return load(reinterpret_cast<const float*>(p) + c);
    if constexpr (Slot == 1) return load_f16(p + 2 * c);
    if constexpr (Slot == 2) return load_bf16(p + 2 * c);
    if constexpr (Slot == 10) return mul(load_e4m3(codes + c), V16{a});
    if constexpr (Slot >= 3 && Slot < 10) {
      constexpr int kWidth = kCodeBits<Slot>;
      const std::uint8_t* q = codes + c / 8 * kWidth;
      if constexpr (kLookup<Slot>) {
        return {_mm512_permutexvar_ps(kWidth == 4 ? lane_nibbles(q) : lane_codes<kWidth>(q), a)};
      } else if constexpr (kWidth == 8) {
        return {_mm512_fmadd_ps(a, load_u8(q).a, b)};
      } else {
        const __m512i code = _mm512_and_si512(lane_codes<kWidth>(q), _mm512_set1_epi32((1 << kWidth) - 1));
        return {_mm512_fmadd_ps(a, _mm512_cvtepi32_ps(code), b)};
      }
    }
    return zero();
  }

  // The last n < 16 columns of a row without whole groups, zeros after them.
  MOEFLUX_MATH V16 rest(std::int64_t c, std::int64_t n) const noexcept {
    if constexpr (Slot == 10) return mul(e4m3_to_f32(_mm_maskz_loadu_epi8(first(n), codes + c)), V16{a});
    if constexpr (Slot == 0) return load_n(reinterpret_cast<const float*>(codes) + c, n);
    const __m256i h = _mm256_maskz_loadu_epi16(first(n), codes + 2 * c);
    if constexpr (Slot == 1) return {_mm512_cvtph_ps(h)};
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
  }
};

MOEFLUX_MATH void widen_scales(const std::byte* p, DType dtype, std::int64_t n, float* out) noexcept {
  if (dtype == DType::F32) {
    std::memcpy(out, p, static_cast<std::size_t>(n) * 4);
    return;
  }
  std::int64_t g = 0;
  for (; g + 16 <= n; g += 16)
    store(out + g, dtype == DType::BF16 ? load_bf16(p + 2 * g) : load_f16(p + 2 * g));
  for (; g < n; ++g)
    out[g] =
        dtype == DType::BF16 ? quant::load_scalar<DType::BF16>(p, g) : quant::load_scalar<DType::F16>(p, g);
}

// Readers for rows r .. r + 3 (past the end: the last one again); scales go to `scratch`.
template <int Slot>
MOEFLUX_MATH void open_rows(const MatrixView& w, std::int64_t r, std::int64_t end, float* scratch,
                            RowReader<Slot> (&rows)[kExactRows]) noexcept {
  const std::int64_t n_groups = Slot <= 2 ? 0 : static_cast<std::int64_t>(w.format.n_groups(static_cast<std::uint64_t>(w.cols)));
  for (int i = 0; i < kExactRows; ++i) {
    const auto at = static_cast<std::uint64_t>(r + i < end ? r + i : end - 1);
    rows[i].codes = reinterpret_cast<const std::uint8_t*>(w.data) + at * w.row_bytes();
    if constexpr (Slot == 3) {
      for (std::int64_t g = 0; g < n_groups; ++g)
        scratch[g] = quant::e8m0_half_to_f32(
            static_cast<std::uint8_t>(w.scales[at * w.scale_row_bytes() + static_cast<std::uint64_t>(g)]));
      rows[i].scales = scratch;
      scratch += n_groups;
    } else if constexpr (Slot == 10) {
      std::memcpy(scratch, w.scales + at * w.scale_row_bytes(), static_cast<std::size_t>(n_groups) * 4);
      rows[i].scales = scratch;
      scratch += n_groups;
    } else if constexpr (Slot > 3) {
      widen_scales(w.scales + at * w.scale_row_bytes(), w.format.scale_dtype, n_groups, scratch);
      widen_scales(w.biases + at * w.scale_row_bytes(), w.format.scale_dtype, n_groups, scratch + n_groups);
      rows[i].scales = scratch;
      rows[i].biases = scratch + n_groups;
      scratch += 2 * n_groups;
    }
  }
}

// Calls step(c, n): sixteen columns from c, or the last n < 16; start(g) before each group.
template <int Slot, class Start, class Step, class Rest>
MOEFLUX_MATH void each_column(const MatrixView& w, const Start& start, const Step& step,
                              const Rest& rest) noexcept {
  if constexpr (Slot <= 2) {
    std::int64_t c = 0;
    for (; c + 16 <= w.cols; c += 16) step(c);
    if (c < w.cols) rest(c, w.cols - c);
  } else {
    const std::int64_t group = w.format.group;
    for (std::int64_t g = 0; g * group < w.cols; ++g) {
      start(g);
      std::int64_t c = g * group;
      const std::int64_t end = Slot != 10 || c + group < w.cols ? c + group : w.cols;
      for (; c + 16 <= end; c += 16) step(c);
      if constexpr (Slot == 10)
        if (c < end) rest(c, end - c);
    }
  }
}

MOEFLUX_MATH void put(const MatMulBlock& b, std::int64_t t, std::int64_t r, float v) noexcept {
  y_row(b, t)[r] = b.bias != nullptr ? v + b.bias[r] : v;
}

template <int Slot>
void matvec_exact(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  auto* scratch = reinterpret_cast<float*>(b.scratch);
  for (std::int64_t r = row_begin; r < row_end; r += kExactRows) {
    RowReader<Slot> rows[kExactRows] = {};
    open_rows<Slot>(b.w, r, row_end, scratch, rows);
    [[maybe_unused]] const char* ahead = reinterpret_cast<const char*>(rows[0].codes) + kAhead;
    [[maybe_unused]] const int group_bytes = Slot <= 2 ? 0 : b.w.format.group / 8 * kCodeBits<Slot>;
    RowReader<Slot> r0 = rows[0], r1 = rows[1], r2 = rows[2], r3 = rows[3];
    V16 a0 = zero(), a1 = zero(), a2 = zero(), a3 = zero();
    each_column<Slot>(
        b.w,
        [&](std::int64_t g) __attribute__((always_inline)) {
          // The next four rows follow these in memory; a group's bytes of all four are asked for at a time.
          for (int i = 0; i < kExactRows * group_bytes; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
          ahead += kExactRows * group_bytes;
          r0.start_group(g), r1.start_group(g), r2.start_group(g), r3.start_group(g);
        },
        [&](std::int64_t c) __attribute__((always_inline)) {
          const V16 x = load(b.x + c);
          a0 = fma(x, r0.weights(c), a0);
          a1 = fma(x, r1.weights(c), a1);
          a2 = fma(x, r2.weights(c), a2);
          a3 = fma(x, r3.weights(c), a3);
        },
        [&](std::int64_t c, std::int64_t n) __attribute__((always_inline)) {
          const V16 x = load_n(b.x + c, n);
          a0 = fma(x, r0.rest(c, n), a0);
          a1 = fma(x, r1.rest(c, n), a1);
          a2 = fma(x, r2.rest(c, n), a2);
          a3 = fma(x, r3.rest(c, n), a3);
        });
    const V16 acc[kExactRows] = {a0, a1, a2, a3};
    for (int i = 0; i < kExactRows && r + i < row_end; ++i) put(b, 0, r + i, reduce_add(acc[i]));
  }
}

// NT tokens against four decoded rows; columns past the end are zeros in w. Named variables for the reason
// given in gemm.inl.
#define MOEFLUX_EACH_TOKEN(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define MOEFLUX_CLEAR(t) V16 a##t = zero(), b##t = zero(), c##t = zero(), d##t = zero();
#define MOEFLUX_STEP(t)                                                \
  if constexpr (NT > t) {                                              \
    const V16 v{_mm512_maskz_loadu_ps(mask, x + t * m.x_stride + at)}; \
    a##t = fma(v, w0, a##t), b##t = fma(v, w1, b##t);                  \
    c##t = fma(v, w2, c##t), d##t = fma(v, w3, d##t);                  \
  }
#define MOEFLUX_FINISH(t)                                    \
  if constexpr (NT > t) {                                    \
    put(m, t0 + t, r, reduce_add(a##t));                     \
    if (n_rows > 1) put(m, t0 + t, r + 1, reduce_add(b##t)); \
    if (n_rows > 2) put(m, t0 + t, r + 2, reduce_add(c##t)); \
    if (n_rows > 3) put(m, t0 + t, r + 3, reduce_add(d##t)); \
  }

template <int NT>
void exact_tile(const MatMulBlock& m, std::int64_t t0, std::int64_t r, std::int64_t n_rows, const float* w,
                std::int64_t w_stride) noexcept {
  MOEFLUX_EACH_TOKEN(MOEFLUX_CLEAR)
  const float* x = m.x + t0 * m.x_stride;
  for (std::int64_t at = 0; at < m.w.cols; at += 16) {
    const __mmask16 mask = m.w.cols - at >= 16 ? static_cast<__mmask16>(0xffff) : first(m.w.cols - at);
    const V16 w0 = load(w + at), w1 = load(w + w_stride + at), w2 = load(w + 2 * w_stride + at),
              w3 = load(w + 3 * w_stride + at);
    MOEFLUX_EACH_TOKEN(MOEFLUX_STEP)
  }
  MOEFLUX_EACH_TOKEN(MOEFLUX_FINISH)
}

#undef MOEFLUX_EACH_TOKEN
#undef MOEFLUX_CLEAR
#undef MOEFLUX_STEP
#undef MOEFLUX_FINISH

using ExactTileFn = void (*)(const MatMulBlock&, std::int64_t, std::int64_t, std::int64_t, const float*,
                             std::int64_t) noexcept;
inline constexpr ExactTileFn kExactTiles[kExactTokens] = {exact_tile<1>, exact_tile<2>, exact_tile<3>,
                                                          exact_tile<4>, exact_tile<5>, exact_tile<6>};

template <int Slot>
void gemm_exact(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  const std::int64_t stride = (b.w.cols + 15) / 16 * 16;
  auto* w = reinterpret_cast<float*>(b.scratch);
  for (std::int64_t r = row_begin; r < row_end; r += kExactRows) {
    RowReader<Slot> rows[kExactRows] = {};
    open_rows<Slot>(b.w, r, row_end, w + kExactRows * stride, rows);
    [[maybe_unused]] const char* ahead = reinterpret_cast<const char*>(rows[0].codes) + kAhead;
    [[maybe_unused]] const int group_bytes = Slot <= 2 ? 0 : b.w.format.group / 8 * kCodeBits<Slot>;
    each_column<Slot>(
        b.w,
        [&](std::int64_t g) __attribute__((always_inline)) {
          for (int i = 0; i < kExactRows * group_bytes; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
          ahead += kExactRows * group_bytes;
#pragma GCC unroll 4
          for (int i = 0; i < kExactRows; ++i) rows[i].start_group(g);
        },
        [&](std::int64_t c) __attribute__((always_inline)) {
          if constexpr (Slot <= 2) {
            for (int i = 0; i < kExactRows * (Slot == 0 ? 64 : 32); i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
            ahead += kExactRows * (Slot == 0 ? 64 : 32);
          }
#pragma GCC unroll 4
          for (int i = 0; i < kExactRows; ++i) store(w + i * stride + c, rows[i].weights(c));
        },
        [&](std::int64_t c, std::int64_t n) __attribute__((always_inline)) {
          for (int i = 0; i < kExactRows; ++i) store(w + i * stride + c, rows[i].rest(c, n));
        });
    for (std::int64_t t = 0; t < b.n_tokens; t += kExactTokens) {
      const std::int64_t n = b.n_tokens - t < kExactTokens ? b.n_tokens - t : kExactTokens;
      kExactTiles[n - 1](b, t, r, row_end - r, w, stride);
    }
  }
}

template <int Slot>
void matmul_exact_tiles(const MatMulBlock& b, std::int64_t row_begin, std::int64_t row_end) noexcept {
  if (b.n_tokens > 1) return gemm_exact<Slot>(b, row_begin, row_end);
  if constexpr (Slot == 10)
    matvec_fp8(b, row_begin, row_end);
  else
    matvec_exact<Slot>(b, row_begin, row_end);
}

}  // namespace
