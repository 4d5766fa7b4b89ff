// The gated delta rule of many tokens: some rows at a time from the first-level cache. Rows in registers would wait for their own chains
// (sums over keys, a tree, the way back) most of the time; several have enough to do meanwhile. What a token still has to do with the
// state and what the next one begins with go in one pass, so that it is read and written once a token.
//
// The instruction set supplies: kDeltaRows, a divisor of 16; DeltaSums, what passes keep between them; and for rows s [kDeltaRows][dk] of
// the state
//   delta_begin(s, dk, k, decay, kept, sums)                        s *= decay; sums = k . s
//   delta_pass<Last>(s, dk, k, q, d, next_k, decay, kept, sums, y)  s += d k; y = q . s; unless it is the Last: s *= decay; sums = next_k . s
// and delta_one(b, c, c_end): columns from c on of one token; where the others begin.

namespace {

// Some tokens' keys and queries without gaps: in the op's tensors a head's lie as far apart as all heads are wide, often a power of two, so
// that few of them stay in the caches. Keys of one token more: the pass of the last one asks for them.
struct DeltaTokens {
  static constexpr std::int64_t kFloats = 4096;
  alignas(64) float q[kFloats];
  alignas(64) float k[2 * kFloats];

  MOEFLUX_MATH static std::int64_t most(std::int64_t dk) noexcept { return kFloats / dk; }
  // Tokens [t0, t1); values and results of columns [c0, c1) are asked for meanwhile.
  MOEFLUX_MATH void fill(const DeltaBlock& b, std::int64_t t0, std::int64_t t1, std::int64_t c0, std::int64_t c1) noexcept {
    for (std::int64_t t = t0; t < t1; ++t) {
      const float *from_q = b.q + t * b.q_stride, *from_k = b.k + t * b.k_stride;
      for (std::int64_t i = 0; i < b.dk; i += 16) {
        store(q + (t - t0) * b.dk + i, load(from_q + i));
        store(k + (t - t0) * b.dk + i, load(from_k + i));
      }
      for (std::int64_t c = c0; c < c1; c += 16) {
        __builtin_prefetch(b.v + t * b.v_stride + c, 0, 2);
        __builtin_prefetch(b.y + t * b.y_stride + c, 1, 2);
      }
    }
    if (t1 < b.n_tokens)
      for (std::int64_t i = 0; i < b.dk; i += 16) store(k + (t1 - t0) * b.dk + i, load(b.k + t1 * b.k_stride + i));
  }
};

// d[0 .. 16): what rows from c on are corrected by for token t. `sums` of kDeltaRows of them.
MOEFLUX_MATH void correct(const DeltaBlock& b, std::int64_t c, std::int64_t t, const float* sums, float* d) noexcept {
  const float* v = b.v + t * b.v_stride + c;
  const float beta = b.beta[t * b.beta_stride];
  for (int i = 0; i < kDeltaRows; ++i) d[i] = beta * (v[i] - sums[i]);
}

// Tokens [t0, t1), which are in `in`, for sixteen rows from c on: while the sums of some find their way back the others are multiplied.
// d[16]: the corrections of t0, then of t1.
void delta_rows16(const DeltaBlock& b, std::int64_t c, std::int64_t t0, std::int64_t t1, const DeltaTokens& in, DeltaSums& kept, float* d) noexcept {
  for (std::int64_t t = t0; t < t1; ++t) {
    const float *q = in.q + (t - t0) * b.dk, *k = in.k + (t - t0) * b.dk;
    for (std::int64_t h = 0; h < 16; h += kDeltaRows) {
      float *s = b.state + (c + h) * b.dk, *y = b.y + t * b.y_stride + c + h;
      alignas(64) float sums[kDeltaRows];
      if (t + 1 < b.n_tokens) {
        delta_pass<false>(s, b.dk, k, q, d + h, k + b.dk, b.decay[(t + 1) * b.decay_stride], kept, sums, y);
        correct(b, c + h, t + 1, sums, d + h);
      } else {
        delta_pass<true>(s, b.dk, k, q, d + h, nullptr, 0.0f, kept, sums, y);
      }
    }
  }
}

inline constexpr std::int64_t kMostDeltaColumns = 128;

// [c_begin, c_end): a multiple of sixteen columns, at most kMostDeltaColumns.
void delta_many(const DeltaBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  DeltaTokens in;
  DeltaSums kept;
  alignas(64) float d[kMostDeltaColumns], sums[kDeltaRows];
  for (std::int64_t t0 = 0; t0 < b.n_tokens; t0 += DeltaTokens::most(b.dk)) {
    const std::int64_t t1 = b.n_tokens - t0 < DeltaTokens::most(b.dk) ? b.n_tokens : t0 + DeltaTokens::most(b.dk);
    in.fill(b, t0, t1, c_begin, c_end);
    if (t0 == 0)
      for (std::int64_t c = c_begin; c < c_end; c += kDeltaRows) {
        delta_begin(b.state + c * b.dk, b.dk, in.k, b.decay[0], kept, sums);
        correct(b, c, 0, sums, d + (c - c_begin));
      }
    for (std::int64_t c = c_begin; c < c_end; c += 16) delta_rows16(b, c, t0, t1, in, kept, d + (c - c_begin));
  }
}

void delta_columns_tiles(const DeltaBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept {
  std::int64_t c = c_begin;
  if (b.n_tokens == 1) {
    c = delta_one(b, c, c_end);
  } else if (b.dk % 16 == 0 && b.dk <= DeltaTokens::kFloats) {
    const std::int64_t whole = c_begin + (c_end - c_begin) / 16 * 16;
    for (; c < whole; c += kMostDeltaColumns) delta_many(b, c, whole - c < kMostDeltaColumns ? whole : c + kMostDeltaColumns);
    c = whole;
  }
  if (c < c_end) delta_columns(b, c, c_end);
}

}  // namespace
