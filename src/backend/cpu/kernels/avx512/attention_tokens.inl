// Attention of many tokens over one tile of keys. All query heads of all tokens are rows that meet the tile together, six at a time. The
// tile is brought into an order first, once for all of them: keys side by side, so that a register holds sixteen keys and a dot
// product's sixteen lanes are computed one after another. Their sums then meet as whole registers by the tree of reduce_add, without
// moving anything within one.

namespace {

inline constexpr std::int64_t kTileKeys = Attention::kTile;
inline constexpr int kRowsAtOnce = 6, kQuads = 4;
static_assert(kTileKeys == 64, "four registers of keys");

// A head of a token.
struct TileRow {
  const float* q;
  SoftmaxState* state;
  std::int32_t j0, j1;  // the keys of the tile that it sees
};

// The tile in its order, and what the rows make of it.
struct TileScratch {
  float* keys;    // [lane][head_dim / 16][kTileKeys]
  float* values;  // [v_dim / 64][kTileKeys][64], then [kTileKeys][32] if there are columns left
  float* p;       // [n][kTileKeys]: scores, then weights
  float* half;    // [n][kTileKeys]: sums of lanes whose other half is still to come
  float* c;       // [n]: what the sums so far are multiplied by
  TileRow* rows;  // [n]
  TileScratch(const AttentionGroup& a, std::int64_t n) noexcept
      : keys(a.scores),
        values(keys + kTileKeys * a.head_dim),
        p(values + kTileKeys * a.v_dim),
        half(p + kTileKeys * n),
        c(half + kTileKeys * n),
        rows(reinterpret_cast<TileRow*>(c + (n + 15) / 16 * 16)) {}
};

// The lanes in the order in which a tree that adds those 8, 4, 2 and 1 apart can take them one by one.
constexpr int lane_at(int i) noexcept { return (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | (i & 8) >> 3; }

// Sixteen rows' columns at `at` as sixteen registers of one column each.
template <bool F16>
MOEFLUX_MATH void transpose16(const std::byte* const (&rows)[16], std::int64_t at, __m512 (&out)[16]) noexcept {
  alignas(64) float wide[16][16];
  const float* from[16];
  for (int r = 0; r < 16; ++r) {
    if constexpr (F16) {
      store(wide[r], load_f16(rows[r] + at * 2));
      from[r] = wide[r];
    } else {
      from[r] = reinterpret_cast<const float*>(rows[r]) + at;
    }
  }
  // Quarter i of x[4 b + r] is columns 4 b .. 4 b + 3 of row 4 i + r: loads put them there.
  __m512 x[16];
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(from[r] + 4 * b));
      v = _mm512_mask_broadcast_f32x4(v, 0x00f0, _mm_loadu_ps(from[4 + r] + 4 * b));
      v = _mm512_mask_broadcast_f32x4(v, 0x0f00, _mm_loadu_ps(from[8 + r] + 4 * b));
      x[4 * b + r] = _mm512_mask_broadcast_f32x4(v, 0xf000, _mm_loadu_ps(from[12 + r] + 4 * b));
    }
#pragma GCC unroll 4
  for (int b = 0; b < 16; b += 4) {
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(x[b], x[b + 1])), low23 = _mm512_castps_pd(_mm512_unpacklo_ps(x[b + 2], x[b + 3]));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(x[b], x[b + 1])), high23 = _mm512_castps_pd(_mm512_unpackhi_ps(x[b + 2], x[b + 3]));
    out[b] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
    out[b + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
    out[b + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
    out[b + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
  }
}

// Keys that no token sees repeat one that some see: nothing is made of their scores.
template <bool F16>
void order_tile(const AttentionGroup& a, const TileScratch& s) noexcept {
  constexpr std::int64_t kSize = F16 ? 2 : 4;
  const std::int64_t j0 = a.j_begin, j1 = a.j_end, base = j0 / kTileKeys * kTileKeys;
  const std::int64_t n_steps = a.head_dim / 16;
  for (std::int64_t first = 0; first < kTileKeys; first += 16) {
    const std::byte* rows[16];
    for (std::int64_t r = 0; r < 16; ++r) {
      const std::int64_t j = base + first + r;
      rows[r] = a.k + (j < j0 ? j0 : j < j1 ? j : j1 - 1) * a.k_stride * kSize;
    }
    for (std::int64_t m = 0; m < n_steps; ++m) {
      __m512 x[16];
      transpose16<F16>(rows, 16 * m, x);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_store_ps(s.keys + (i * n_steps + m) * kTileKeys + first, x[lane_at(i)]);
    }
  }
  for (std::int64_t j = j0; j < j1; ++j) {
    const std::byte* v = a.v + j * a.v_stride * kSize;
    for (std::int64_t i = 0; i < a.v_dim; i += 64) {
      const std::int64_t width = a.v_dim - i < 64 ? 32 : 64;
      float* to = s.values + i * kTileKeys + (j - base) * width;
      for (std::int64_t r = 0; r < width; r += 16) store(to + r, load_kv(v, i + r, F16));
    }
  }
}

// The next tile's rows, asked for a few lines at a time: all at once they would wait for each other, and whatever else is asked for would wait
// for them.
class TileAhead {
 public:
  TileAhead(const std::byte* first, std::int64_t stride, std::int64_t bytes, std::int64_t n_rows) noexcept
      : row_(first), stride_(stride), bytes_(bytes), left_(n_rows > 0 ? n_rows : 0) {}
  // The next n_lines of all, spread over n_times calls.
  void spread(int n_times) noexcept { at_once_ = static_cast<int>((left_ * ((bytes_ + 63) / 64) + n_times - 1) / n_times); }
  MOEFLUX_MATH void fetch() noexcept {
    for (int n = at_once_; n > 0 && left_ > 0; --n) {
      _mm_prefetch(reinterpret_cast<const char*>(row_ + at_), _MM_HINT_T1);
      if ((at_ += 64) >= bytes_) at_ = 0, row_ += stride_, --left_;
    }
  }

 private:
  const std::byte* row_;
  std::int64_t stride_, bytes_, left_, at_ = 0;
  int at_once_ = 0;
};

// A quarter of the lanes of six rows' dot products with the tile. Their sum waits in `half` or meets what waits there; after the last quarter
// p has all of it.
MOEFLUX_MATH void score_rows(const TileRow* rows, const float* keys, std::int64_t head_dim, int quad, float* p, float* half,
                             TileAhead& ahead) noexcept {
  constexpr int kRows = kRowsAtOnce;
  const float* q[kRows];
  for (int n = 0; n < kRows; ++n) q[n] = rows[n].q;
  alignas(64) float waiting[2][kRows][kTileKeys];  // sums of one and two lanes
  const float* k = keys + quad * (head_dim / 4) * kTileKeys;
  for (int i = 0;; ++i) {
    ahead.fetch();
    __m512 x[kRows][4];
#pragma GCC unroll 6
    for (int n = 0; n < kRows; ++n)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) x[n][r] = _mm512_setzero_ps();
    for (std::int64_t at = lane_at(4 * quad + i); at < head_dim; at += 16, k += kTileKeys) {
      const __m512 k0 = _mm512_load_ps(k), k1 = _mm512_load_ps(k + 16), k2 = _mm512_load_ps(k + 32), k3 = _mm512_load_ps(k + 48);
#pragma GCC unroll 6
      for (int n = 0; n < kRows; ++n) {
        const __m512 v = _mm512_set1_ps(q[n][at]);
        x[n][0] = _mm512_fmadd_ps(v, k0, x[n][0]);
        x[n][1] = _mm512_fmadd_ps(v, k1, x[n][1]);
        x[n][2] = _mm512_fmadd_ps(v, k2, x[n][2]);
        x[n][3] = _mm512_fmadd_ps(v, k3, x[n][3]);
      }
    }
    const auto meet = [&](const float* other) noexcept {
#pragma GCC unroll 6
      for (int n = 0; n < kRows; ++n)
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) x[n][r] = _mm512_add_ps(_mm512_load_ps(other + n * kTileKeys + 16 * r), x[n][r]);
    };
    float* to = waiting[0][0];
    if (i % 2 == 1) meet(waiting[0][0]), to = waiting[1][0];
    if (i == 3) {
      meet(waiting[1][0]);
      if (quad % 2 == 1) meet(half);
      if (quad == 3) meet(p);
      to = quad % 2 == 1 ? p : half;
    }
#pragma GCC unroll 6
    for (int n = 0; n < kRows; ++n)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) _mm512_store_ps(to + n * kTileKeys + 16 * r, x[n][r]);
    if (i == 3) return;
  }
}

// Sixteen registers to one: lane r is what reduce_add or reduce_max makes of x[r].
template <class Op>
MOEFLUX_MATH __m512 reduce16(const float (&x)[16][16], Op op) noexcept {
  __m512 quarters[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const auto fold8 = [&](int q) noexcept {
      const __m512 a = _mm512_load_ps(x[4 * q + k]), b = _mm512_load_ps(x[4 * (q + 1) + k]);
      return op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 a = fold8(0), b = fold8(2);
    quarters[k] = op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const auto fold2 = [&](__m512 a, __m512 b) noexcept {
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return op(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  };
  const __m512 a = fold2(quarters[0], quarters[1]), b = fold2(quarters[2], quarters[3]);
  return op(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

MOEFLUX_MATH __mmask16 lanes_between(std::int64_t begin, std::int64_t end) noexcept {
  const auto below = [](std::int64_t n) noexcept { return n < 0 ? 0u : n < 16 ? (1u << n) - 1u : 0xffffu; };
  return static_cast<__mmask16>(below(end) & ~below(begin));
}

// Scores to weights, for up to sixteen rows.
MOEFLUX_MATH void weigh_rows(const TileRow* rows, int n, float scale, float* p, float* c) noexcept {
  const float minus_inf = -__builtin_inff();
  alignas(64) float x[16][16] = {}, m[16] = {}, l[16] = {};
  for (int r = 0; r < n; ++r) {
    V16 s[4];
    for (int i = 0; i < 4; ++i) {
      float* at = p + r * kTileKeys + 16 * i;
      s[i].a = _mm512_mask_mul_ps(_mm512_set1_ps(minus_inf), lanes_between(rows[r].j0 - 16 * i, rows[r].j1 - 16 * i), _mm512_set1_ps(scale), _mm512_load_ps(at));
      store(at, s[i]);
    }
    store(x[r], max(max(s[0], s[1]), max(s[2], s[3])));
    m[r] = rows[r].state->m, l[r] = rows[r].state->l;
  }
  const __m512 before = _mm512_load_ps(m), top = _mm512_max_ps(before, reduce16(x, [](__m512 a, __m512 b) noexcept { return _mm512_max_ps(a, b); }));
  const __mmask16 begun = _mm512_cmp_ps_mask(before, _mm512_set1_ps(minus_inf), _CMP_NEQ_UQ);
  const __m512 worth = _mm512_maskz_mov_ps(begun, exp(V16{_mm512_sub_ps(before, top)}).a);
  _mm512_store_ps(m, top);
  for (int r = 0; r < n; ++r) {
    V16 sum = zero();
    for (int i = 0; i < 4; ++i) {
      float* at = p + r * kTileKeys + 16 * i;
      const V16 e = exp(sub(load(at), set1(m[r])));
      store(at, e);
      sum = add(sum, e);
    }
    store(x[r], sum);
  }
  _mm512_store_ps(l, _mm512_fmadd_ps(_mm512_load_ps(l), worth, reduce16(x, [](__m512 a, __m512 b) noexcept { return _mm512_add_ps(a, b); })));
  _mm512_mask_storeu_ps(c, first(n), worth);
  for (int r = 0; r < n; ++r) rows[r].state->m = m[r], rows[r].state->l = l[r];
}

// acc = acc * c, then acc = fma(p_j, v_j, acc) for columns [i, i + 16 Regs) of some rows that see the same keys.
template <int Rows, int Regs>
MOEFLUX_MATH void add_rows(const TileRow* rows, const float* values, const float* p, const float* c, std::int64_t i) noexcept {
  __m512 x[Rows][Regs];
#pragma GCC unroll 6
  for (int n = 0; n < Rows; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < Regs; ++r) x[n][r] = _mm512_mul_ps(_mm512_load_ps(rows[n].state->acc + i + 16 * r), _mm512_set1_ps(c[n]));
  const float* v = values + i * kTileKeys + rows->j0 * (16 * Regs);
  for (std::int64_t j = rows->j0; j < rows->j1; ++j, v += 16 * Regs) {
    __m512 now[Regs];
#pragma GCC unroll 4
    for (int r = 0; r < Regs; ++r) now[r] = _mm512_load_ps(v + 16 * r);
#pragma GCC unroll 6
    for (int n = 0; n < Rows; ++n) {
      const __m512 w = _mm512_set1_ps(p[n * kTileKeys + j]);
#pragma GCC unroll 4
      for (int r = 0; r < Regs; ++r) x[n][r] = _mm512_fmadd_ps(w, now[r], x[n][r]);
    }
  }
#pragma GCC unroll 6
  for (int n = 0; n < Rows; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < Regs; ++r) _mm512_store_ps(rows[n].state->acc + i + 16 * r, x[n][r]);
}

template <int Regs>
void add_columns(const TileScratch& s, int n, std::int64_t i, TileAhead& ahead) noexcept {
  for (int r = 0; r < n;) {
    ahead.fetch();
    const TileRow* rows = s.rows + r;
    const float *p = s.p + r * kTileKeys, *c = s.c + r;
    int same = 1;
    while (same < kRowsAtOnce && r + same < n && rows[same].j0 == rows->j0 && rows[same].j1 == rows->j1) ++same;
    switch (same) {
      case 6: add_rows<6, Regs>(rows, s.values, p, c, i), r += 6; break;
      case 5:
      case 4: add_rows<4, Regs>(rows, s.values, p, c, i), r += 4; break;
      case 3:
      case 2: add_rows<2, Regs>(rows, s.values, p, c, i), r += 2; break;
      default: add_rows<1, Regs>(rows, s.values, p, c, i), r += 1; break;
    }
  }
}

void attention_tile(const AttentionTile& tile) noexcept {
  const AttentionGroup& a = tile.keys;
  const std::int64_t base = a.j_begin / kTileKeys * kTileKeys;
  const int n = tile.n * tile.n_queries, n_groups = (n + kRowsAtOnce - 1) / kRowsAtOnce;
  const TileScratch s(a, n_groups * kRowsAtOnce);
  for (int t = 0; t < tile.n; ++t) {
    const TileQuery& query = tile.queries[t];
    for (int h = 0; h < tile.n_queries; ++h)
      s.rows[t * tile.n_queries + h] = {query.q + h * tile.q_stride, query.state + h, static_cast<std::int32_t>(query.j_begin - base),
                                        static_cast<std::int32_t>(query.j_end - base)};
  }
  for (int r = n; r < n_groups * kRowsAtOnce; ++r) s.rows[r] = s.rows[n - 1];
  a.f16 ? order_tile<true>(a, s) : order_tile<false>(a, s);

  const std::int64_t size = a.f16 ? 2 : 4, next = base + kTileKeys, n_next = tile.next_end - next < kTileKeys ? tile.next_end - next : kTileKeys;
  TileAhead next_keys(a.k + next * a.k_stride * size, a.k_stride * size, a.head_dim * size, n_next);
  TileAhead next_values(a.v + next * a.v_stride * size, a.v_stride * size, a.v_dim * size, n_next);
  next_keys.spread(n_groups * kQuads * 4);
  next_values.spread(n_groups * static_cast<int>((a.v_dim + 63) / 64));
  for (int quad = 0; quad < kQuads; ++quad)
    for (int r = 0; r < n_groups * kRowsAtOnce; r += kRowsAtOnce)
      score_rows(s.rows + r, s.keys, a.head_dim, quad, s.p + r * kTileKeys, s.half + r * kTileKeys, next_keys);
  for (int r = 0; r < n; r += 16) weigh_rows(s.rows + r, n - r < 16 ? n - r : 16, a.scale, s.p + r * kTileKeys, s.c + r);
  std::int64_t i = 0;
  for (; i + 64 <= a.v_dim; i += 64) add_columns<4>(s, n, i, next_values);
  if (i < a.v_dim) add_columns<2>(s, n, i, next_values);
}

}  // namespace
