// The functions of one instruction set. The backend chooses a table once at start; ops split the work into
// tasks and call its entries, which validate nothing and allocate nothing.
//
// Every table computes the formulas of backend/ops.h to the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/format.h"

namespace moeflux::backend::cpu {

// Activations in 8 bits: per row and group x8, d and the sum of x8. The order of x8 inside a group is the table's
// own. With tile > 1 tokens lie in tiles of that many (the last may have fewer), n tokens of a tile side by side:
// x8 [cols / 4][n][4] (amx has tiles of [cols / 64][n][64], too), d and sx [cols / group][n].
struct QuantizedRows {
  const std::int8_t* x8 = nullptr;   // [T, cols]
  const float* d = nullptr;          // [T, cols / group]
  const std::int32_t* sx = nullptr;  // [T, cols / group]
  std::int64_t tile = 1;
};

// Rows that the same thread will most likely compute next: a kernel may ask memory for them before it ends.
struct RowsToCome {
  const quant::MatrixView* w = nullptr;  // null: not known
  std::int64_t row = 0;
};

// The rows behind a block's, a task at a time, as long as nobody else has them: a kernel that would lose time by ending asks for them
// and goes on. True: rows up to the new `row_end` are to be computed, too, and `then` is what will most likely follow.
struct MoreRows {
  virtual bool next(std::int64_t& row_end, RowsToCome& then) noexcept = 0;

 protected:
  ~MoreRows() = default;
};

// y[t, r] = W[r] . x[t] (+ bias[r]) for rows [row_begin, row_end) and all tokens.
struct MatMulBlock {
  quant::MatrixView w;
  const float* x = nullptr;  // exact: [T, cols], row stride x_stride
  std::int64_t x_stride = 0;
  QuantizedRows xq;             // fast
  const float* bias = nullptr;  // may be null
  float* y = nullptr;
  std::int64_t y_stride = 0;
  const std::int32_t* slots = nullptr;  // row of y for each token; null: token t has row t
  std::int64_t n_tokens = 0;
  std::byte* scratch = nullptr;  // matmul_scratch_bytes(cols), aligned to 64
  MoreRows* more = nullptr;      // may be null
  RowsToCome then = {};          // behind row_end
};
using MatMulFn = void (*)(const MatMulBlock& block, std::int64_t row_begin, std::int64_t row_end) noexcept;

constexpr std::size_t matmul_scratch_bytes(std::int64_t cols) noexcept {
  // The largest need: codes of 32 rows, or 8 decoded rows, and the scales and biases of their groups (at least 32
  // wide) as f32.
  return static_cast<std::size_t>(cols) * 32 + static_cast<std::size_t>(cols / 32 + 16) * 8 * 32 + 256;
}

// Formats with a kernel of their own; groups and scale types are run-time values inside.
inline constexpr int kFormatSlots = 11;
constexpr int format_slot(const quant::Format& f) noexcept {
  switch (f.kind) {
    case quant::FormatKind::F32: return 0;
    case quant::FormatKind::F16: return 1;
    case quant::FormatKind::BF16: return 2;
    case quant::FormatKind::Mxfp4: return 3;
    case quant::FormatKind::Fp8: return 10;
    case quant::FormatKind::Affine: return f.bits == 8 ? 9 : f.bits + 2;  // 2..6 -> 4..8
  }
  return 0;
}

// One query against the keys [j_begin, j_end) of one group of tiles; running maximum, sum and value sum out.
struct AttentionGroup {
  const float* q = nullptr;        // [hd]
  const std::byte* k = nullptr;    // key of position 0 of this kv head
  const std::byte* v = nullptr;
  std::int64_t k_stride = 0;       // elements from one position to the next
  std::int64_t v_stride = 0;
  bool f16 = false;
  std::int64_t head_dim = 0;  // of query and key
  std::int64_t v_dim = 0;     // of value and acc
  std::int64_t j_begin = 0, j_end = 0;
  float scale = 1.0f;
  float* scores = nullptr;  // Attention::kTile floats of scratch
  bool cold = true;         // keys and values come from memory: worth asking for ahead
};

// Running softmax state of one query: m, l and acc[v_dim].
struct SoftmaxState {
  float m;
  float l;
  float* acc;
};

// Several tokens' query heads of one kv head, up to eight a token, against one tile of keys.
struct TileQuery {
  const float* q = nullptr;             // [n_queries] rows of head_dim
  std::int64_t j_begin = 0, j_end = 0;  // the keys that this token sees of the tile: at least one
  SoftmaxState* state = nullptr;        // [n_queries], gone on from
};
struct AttentionTile {
  AttentionGroup keys;  // but for q; all keys of the tile that some token sees; scores: attention_tile_scratch_bytes
  std::int64_t q_stride = 0;
  int n_queries = 0;
  const TileQuery* queries = nullptr;
  int n = 0;
  std::int64_t next_end = 0;  // keys behind the tile are read soon, up to this one
};

// Of n queries times tokens.
constexpr std::size_t attention_tile_scratch_bytes(std::int64_t head_dim, std::int64_t v_dim, std::int64_t n) noexcept {
  const std::int64_t rows = n + 15;  // a kernel may add some
  return static_cast<std::size_t>((head_dim + v_dim) * 256 + rows * (2 * 256 + 4 + 32) + 64) / 64 * 64;
}

struct DeltaBlock {
  const float* q = nullptr;  // of the key head; token stride qk_stride
  const float* k = nullptr;
  const float* v = nullptr;  // of the value head, column 0
  const float* decay = nullptr;
  const float* beta = nullptr;
  float* state = nullptr;  // [dv, dk]
  float* y = nullptr;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, decay_stride = 0, beta_stride = 0, y_stride = 0;
  std::int64_t n_tokens = 0;
  std::int64_t dk = 0;
};

struct ConvBlock {
  const float* u = nullptr;  // [T, C]
  const float* w = nullptr;  // [C, K]
  const float* state = nullptr;
  float* y = nullptr;
  std::int64_t u_stride = 0, y_stride = 0, n_channels = 0, n_taps = 0, n_tokens = 0;
};

// y[t, n] = sum of x[t, k] * w over k in ascending order, for one head and all tokens.
struct HeadMatMulBlock {
  quant::MatrixView w;        // [outputs, inputs], or [inputs, outputs] when inputs_first
  bool inputs_first = false;
  std::int64_t n_inputs = 0, n_outputs = 0;
  const float* x = nullptr;
  std::int64_t x_stride = 0;
  float* y = nullptr;
  std::int64_t y_stride = 0;
  std::int64_t n_tokens = 0;
  std::byte* scratch = nullptr;  // head_matmul_scratch_bytes, aligned to 64
};

constexpr std::size_t head_matmul_scratch_bytes(std::int64_t n_inputs, std::int64_t n_outputs) noexcept {
  const std::int64_t widest = n_inputs > n_outputs ? n_inputs : n_outputs;
  return static_cast<std::size_t>(n_inputs * n_outputs + widest) * 4 + matmul_scratch_bytes(widest);
}

struct KernelTable {
  const char* name;
  MatMulFn exact[kFormatSlots];
  MatMulFn fast[kFormatSlots];  // null for formats without integer codes
  void (*decode_row)(const quant::MatrixView& w, std::int64_t row, float* out, std::byte* scratch) noexcept;
  void (*quantize_row)(const float* x, std::int64_t cols, std::int64_t group, std::int8_t* x8, float* d,
                       std::int32_t* sx) noexcept;
  void (*add)(const float* a, const float* b, float* y, std::int64_t n) noexcept;
  void (*rms_norm)(const float* x, const float* w, float* y, std::int64_t n, float eps) noexcept;
  void (*gated_rms_norm)(const float* x, const float* gate, const float* w, float* y, std::int64_t n, float eps) noexcept;
  void (*l2_norm)(const float* x, float* y, std::int64_t n, float eps, float scale) noexcept;
  void (*sigmoid_gate)(const float* x, const float* gate, float* y, std::int64_t n) noexcept;
  void (*silu_glu)(const float* gate, const float* up, float* y, std::int64_t n) noexcept;
  void (*clamped_glu)(const float* gate, const float* up, float* y, std::int64_t n, float limit, float alpha) noexcept;
  // out[e] = exp(x[e] - max) and their sum16; sigmoid per element.
  float (*exp_shifted)(const float* x, float* out, std::int64_t n) noexcept;
  void (*sigmoid)(const float* x, float* out, std::int64_t n) noexcept;
  // acc = fma(w[r], rows + r * row_stride, ..) over ranks, then the shared row; h += acc.
  void (*combine)(const float* rows, std::int64_t row_stride, const float* weights, std::int64_t n_ranks,
                  const float* shared, float shared_weight, bool shared_gated, float* h, std::int64_t n) noexcept;
  void (*attention_group)(const AttentionGroup& a, SoftmaxState& out) noexcept;
  void (*attention_merge)(SoftmaxState& into, const SoftmaxState& next, std::int64_t head_dim) noexcept;
  void (*attention_finish)(const SoftmaxState& s, const float* sink, float* y, std::int64_t head_dim) noexcept;
  void (*conv)(const ConvBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept;
  void (*delta_columns)(const DeltaBlock& b, std::int64_t c_begin, std::int64_t c_end) noexcept;
  void (*head_matmul)(const HeadMatMulBlock& b) noexcept;
  // Tokens per tile that the fast kernel of `w` likes best (it takes larger ones, too), and the n <= tile rows of one tile brought side
  // by side (QuantizedRows; how may depend on `tile`); null: the kernels of this table want plain rows.
  std::int64_t (*token_tile)(const quant::MatrixView& w, std::int64_t n_tokens) noexcept;
  void (*interleave)(const std::int8_t* const* x8, const float* const* d, const std::int32_t* const* sx, std::int64_t n,
                     std::int64_t tile, std::int64_t cols, std::int64_t n_groups, std::int8_t* x8_out, float* d_out,
                     std::int32_t* sx_out) noexcept;
  // Whether `fast` takes matrices in bands (quant/bands.h) and likes them better.
  bool bands = false;
  // attention_group for up to 8 query heads of one kv head, q_stride apart, but going on from the states it finds:
  // state[0 .. n_heads), n_heads a multiple of 4 and at least n_queries, all with an acc; a.scores holds 8 tiles. head_dim and
  // v_dim are multiples of 32. Null: not here.
  void (*attention_heads)(const AttentionGroup& a, std::int64_t q_stride, int n_queries, SoftmaxState* state,
                          int n_heads) noexcept;
  // The same for several tokens, which it pays to bring the tile into an order of its own for. Null: attention_heads token by token.
  void (*attention_tile)(const AttentionTile& tile) noexcept;
  // The sum of a multiple of 16 words: reading memory as fast as it comes, for probes.
  std::uint64_t (*sum_words)(const std::uint64_t* words, std::size_t n_words) noexcept;
};

// Whether this CPU's cores read what one token needs faster when kernels ask for it some KB ahead. Intel's server cores, whose memory is far
// away, need that; AMD's gain by it from Zen 5 on (a Zen 4 gets half as fast).
bool reads_better_ahead() noexcept;

// Null where this build or this CPU does not have the instruction set.
const KernelTable* scalar_table() noexcept;
const KernelTable* avx2_table() noexcept;
const KernelTable* avx2vnni_table() noexcept;
const KernelTable* avx512_table() noexcept;
const KernelTable* avx512vnni_table() noexcept;
const KernelTable* avx512vbmi_table() noexcept;
const KernelTable* amx_table() noexcept;
const KernelTable* neon_table() noexcept;

}  // namespace moeflux::backend::cpu
