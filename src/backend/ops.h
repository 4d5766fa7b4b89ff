// The op set: one parameter struct per op, with the formula every backend computes.
//
// A result is defined by its formula, not by a machine: the order of every addition below is part of the
// definition, so all backends, instruction sets and thread counts give the same bytes ("One arithmetic"
// in docs/architecture.md). dot16(a, b) is the f32 dot product over 16 lanes: element i belongs to lane
// i mod 16, fma in ascending order, then lanes l and l+8 are added, then l and l+4, l+2, l+1. exp, sigmoid,
// silu, softplus, sincos are those of core/scalar_math.h.
//
// Views are f32 unless said. T is the number of tokens; any T >= 0 is legal and gives per token the same
// bytes as T = 1. Token views may have gaps between rows; convolution weights and recurrent state are contiguous.
// each_tensor() names every tensor for tracing and checking; weights are listed apart.
#pragma once

#include <moeflux/types.h>

#include <cstdint>
#include <span>

#include "core/tensor_view.h"
#include "quant/format.h"

namespace moeflux::backend {

enum class Access { In, Out, InOut };

using moeflux::Precision;

// y[t] = row tokens[t] of the table, decoded to f32.
struct Embed {
  static constexpr const char* kName = "Embed";
  std::span<const std::int32_t> tokens;  // host memory, each in [0, table.rows)
  quant::MatrixView table;               // [V, D]
  TensorView y;                          // [T, D]
  template <class F>
  void each_tensor(F&& f) {
    f("y", y, Access::Out);
  }
};

// y = a + b, element by element; y may be a.
struct Add {
  static constexpr const char* kName = "Add";
  TensorView a, b, y;  // [T, D]
  template <class F>
  void each_tensor(F&& f) {
    f("a", a, Access::In), f("b", b, Access::In), f("y", y, Access::Out);
  }
};

// Per row: y = (x * r) * weight, r = 1 / sqrt(dot16(x, x) / D + eps). y may be x.
// x is [T, D], or [T, H, D] for a norm per head.
struct RmsNorm {
  static constexpr const char* kName = "RmsNorm";
  TensorView x, weight, y;
  float eps = 0.0f;
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In), f("weight", weight, Access::In), f("y", y, Access::Out);
  }
};

// h = h + delta, then y = RmsNorm(h). The default composes Add and RmsNorm.
struct AddRmsNorm {
  static constexpr const char* kName = "AddRmsNorm";
  TensorView h, delta, weight, y;  // [T, D], [T, D], [D], [T, D]
  float eps = 0.0f;
  template <class F>
  void each_tensor(F&& f) {
    f("h", h, Access::InOut), f("delta", delta, Access::In), f("weight", weight, Access::In), f("y", y, Access::Out);
  }
};

// One of the matrices that MatMul multiplies by the same x.
struct MatMulPart {
  quant::MatrixView w;  // [N, D]
  TensorView bias;      // [N] or empty; added last
  TensorView y;         // [T, N]
};

// y_i[t] = W_i x[t] (+ bias_i) for several matrices that share their input.
//   exact, or a format without integer codes: y = dot16(x, w), w = the decoded row (affine: fma(s, code, b); fp8: code * s).
//   fast: per group of the weight's format d = max|x| / 127, x8 = rint(x / d) clamped to +-127 (0 where d is 0),
//   sx = sum x8; then acc = 0 and for each group in ascending order acc = fma(float(idot), s * d, acc),
//   acc = fma(float(sx), b * d, acc) with idot the exact integer dot product of codes and x8. MXFP4: codes are
//   twice e2m1, s is half the e8m0 scale, no bias term.
struct MatMul {
  static constexpr const char* kName = "MatMul";
  TensorView x;  // [T, D]
  std::span<const MatMulPart> parts;
  Precision precision = Precision::Exact;
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In);
    for (const MatMulPart& p : parts) {
      TensorView bias = p.bias, y = p.y;
      if (!bias.empty()) f("bias", bias, Access::In);
      f("y", y, Access::Out);
    }
  }
};

// Every head multiplied by a matrix of its own, which may be stored either way round: y[t, h, n] = sum over k of
// x[t, h, k] * w_h, one fma each from 0 in ascending k, in exact precision always. The P values behind a head's K inputs are
// copied behind its N results.
struct HeadMatMul {
  static constexpr const char* kName = "HeadMatMul";
  TensorView x;         // [T, H, K + P]
  quant::MatrixView w;  // [H * N, K], or [H * K, N] when inputs_first
  TensorView y;         // [T, H, N + P]
  bool inputs_first = false;
  std::int64_t n_inputs() const noexcept { return inputs_first ? w.rows / x.dim(1) : w.cols; }
  std::int64_t n_outputs() const noexcept { return inputs_first ? w.cols : w.rows / x.dim(1); }
  std::int64_t n_passed() const noexcept { return x.dim(2) - n_inputs(); }
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In), f("y", y, Access::Out);
  }
};

enum class RopeStyle : std::uint8_t {
  HalfSplit,    // pairs (x_i, x_{i + r/2})
  Interleaved,  // pairs (x_{2i}, x_{2i+1})
};

// Rotates the first 2 * n_freq values of every head in place: angle = float(pos) * inv_freq[i], c and s its
// cosine and sine times `magnitude`, (a, b) -> (a * c - b * s, b * c + a * s) as fma(a, c, -(b * s)), fma(b, c, a * s).
struct Rope {
  static constexpr const char* kName = "Rope";
  TensorView x;         // [T, H, hd]
  TensorView inv_freq;  // [r / 2]
  std::int64_t pos0 = 0;  // of token 0; the others follow
  RopeStyle style = RopeStyle::HalfSplit;
  float magnitude = 1.0f;
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::InOut), f("inv_freq", inv_freq, Access::In);
  }
};

// Writes rows into a cache at positions pos0.., rounding to the cache's type (F32 or F16, nearest even).
struct CacheWrite {
  static constexpr const char* kName = "CacheWrite";
  TensorView x;      // [T, W]
  TensorView cache;  // [C, W], F32 or F16; the rows pos0 .. pos0 + T - 1 are written
  std::int64_t pos0 = 0;
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In), f("cache", cache, Access::InOut);
  }
};

// Causal grouped-query attention over a cache. Query head h reads kv head h / (H / Hkv). Token t at position
// p = pos0 + t sees keys j in [max(0, p - window + 1), p] (window 0: from 0).
//   Keys come in tiles of kTile at absolute positions, tiles in groups of kGroupTiles. In a group, from
//   m = -inf, l = 0, acc = 0, per tile: s_j = scale * dot16(q, k_j); m' = max(m, max_j s_j); c = exp(m - m')
//   (0 while m is -inf); p_j = exp(s_j - m'); l = fma(l, c, sum16(p)); acc = acc * c, then acc = fma(p_j, v_j, acc)
//   for ascending j; m = m'. (sum16: lane = (j - tile start) mod 16, then the tree of dot16.)
//   Groups are merged in order: M = max(m_a, m_b), x = x_a * exp(m_a - M) + x_b * exp(m_b - M) as
//   fma(x_b, exp(m_b - M), x_a * exp(m_a - M)) for l and acc. A sink enters last: M = max(m, sink),
//   l = fma(l, exp(m - M), exp(sink - M)), acc = acc * exp(m - M). y = acc * (1 / l).
// Values may be narrower or wider than keys, and may be part of them (a latent cache: v is the front of every k).
//   Precision fast lets a backend leave the formula where one kv head serves sixteen query heads or more: queries, keys, values and
//   probabilities may be rounded to 16 bits, exp and the order of additions be another; sums stay f32. A row's bytes still depend on its
//   query, its position and the cache alone. The CPU and the reference compute the formula.
struct Attention {
  static constexpr const char* kName = "Attention";
  static constexpr std::int64_t kTile = 64;        // keys: K and V of a tile stay in the first-level cache
  static constexpr std::int64_t kGroupTiles = 16;  // 1024 keys a group: the unit that may be computed in parallel
  TensorView q;      // [T, H, hd]
  TensorView k;      // [C, Hkv, hd], F32 or F16
  TensorView v;      // [C, Hkv, vd], the type of k
  TensorView sinks;  // [H] or empty
  TensorView y;      // [T, H, vd]
  std::int64_t pos0 = 0;
  std::int64_t window = 0;
  float scale = 1.0f;
  Precision precision = Precision::Exact;
  template <class F>
  void each_tensor(F&& f) {
    f("q", q, Access::In), f("k", k, Access::In), f("v", v, Access::In);
    if (!sinks.empty()) f("sinks", sinks, Access::In);
    f("y", y, Access::Out);
  }
};

// y = min(max(x, -limit), limit), element by element; y may be x.
struct Clamp {
  static constexpr const char* kName = "Clamp";
  TensorView x, y;  // [T, D]
  float limit = 0.0f;
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In), f("y", y, Access::Out);
  }
};

// y = x * sigmoid(gate), element by element; y may be x.
struct SigmoidGate {
  static constexpr const char* kName = "SigmoidGate";
  TensorView x, gate, y;  // [T, H, hd]
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In), f("gate", gate, Access::In), f("y", y, Access::Out);
  }
};

enum class GluKind : std::uint8_t {
  Silu,     // silu(g) * u
  Clamped,  // g' = min(g, limit), u' = clamp(u, -limit, limit): (u' + 1) * (g' * sigmoid(alpha * g'))
};

// y = glu(gate, up), element by element; y may be gate.
struct Glu {
  static constexpr const char* kName = "Glu";
  TensorView gate, up, y;  // [T, I]
  GluKind kind = GluKind::Silu;
  float limit = 0.0f;  // Clamped
  float alpha = 0.0f;  // Clamped
  template <class F>
  void each_tensor(F&& f) {
    f("gate", gate, Access::In), f("up", up, Access::In), f("y", y, Access::Out);
  }
};

enum class RouterScore : std::uint8_t {
  Softmax,          // over all experts: exp(x - max) * (1 / sum16(exp))
  Sigmoid,          // per expert
  SoftmaxOfChosen,  // selection by logits, softmax over the k chosen (sum in rank order)
};

// Chooses k of E experts per token and gives them weights, best first; ties go to the lower index.
//   key = score (+ select_bias). With n_groups > 1 the group value is the sum of its two best keys
//   (Sigmoid) or its best key (Softmax); experts outside the topk_groups best groups cannot be chosen.
//   weight = score of the chosen; normalize: / (sum in rank order + norm_eps); then * scaling.
struct Route {
  static constexpr const char* kName = "Route";
  TensorView logits;       // [T, E]
  TensorView select_bias;  // [E] or empty
  TensorView ids;          // [T, k], I32
  TensorView weights;      // [T, k]
  RouterScore score = RouterScore::Softmax;
  std::int32_t n_groups = 1;
  std::int32_t topk_groups = 1;
  bool normalize = false;
  float norm_eps = 0.0f;
  float scaling = 1.0f;
  template <class F>
  void each_tensor(F&& f) {
    f("logits", logits, Access::In);
    if (!select_bias.empty()) f("select_bias", select_bias, Access::In);
    f("ids", ids, Access::Out), f("weights", weights, Access::Out);
  }
};

// The matrices of one expert (or of a dense or shared feed-forward).
struct FfnMatrices {
  quant::MatrixView gate, up, down;              // [I, D], [I, D], [D, I]
  TensorView gate_bias, up_bias, down_bias;      // [I], [I], [D] or empty
};

// One expert's share of a layer: token rows[i] of x, result to row slots[i] of y.
struct ExpertWork {
  FfnMatrices m;
  std::span<const std::int32_t> rows;   // host memory
  std::span<const std::int32_t> slots;  // host memory, unique over all works of an op
};

// y[slot] = down(glu(gate(x[row]), up(x[row]))) for every work: MatMul, Glu, MatMul with their arithmetic.
struct ExpertFfn {
  static constexpr const char* kName = "ExpertFfn";
  TensorView x;  // [T, D]
  std::span<const ExpertWork> works;
  TensorView y;  // [S, D]
  GluKind glu = GluKind::Silu;
  float limit = 0.0f;
  float alpha = 0.0f;
  Precision precision = Precision::Exact;
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In), f("y", y, Access::InOut);  // rows of y that no work names stay as they are
  }
};

// All experts of a layer by the router's choice, without the host looking at it: y[t * k + r] = what ExpertFfn gives for
// token t and expert ids[t, r], and, where there is a shared expert, shared_y[t] likewise. Only for backends that offer
// it (Backend::routes_on_device) and experts that are all in their memory; not one of the ops every backend has.
struct RoutedFfn {
  TensorView x;                            // [T, D]
  TensorView ids;                          // [T, k], I32
  FfnMatrices first;                       // of slot 0
  std::uint64_t stride = 0;                // bytes from one slot's matrices to the next slot's
  const std::int32_t* slot_of = nullptr;   // [n_experts], the backend's memory; null: expert e lies in slot e
  std::int64_t host_offset = 0;            // bytes from slot 0 to slot 0 of main memory: slot_of is -2 - s for its slot s
  std::int64_t n_experts = 0;
  std::int64_t n_lent = 0;                 // slots behind slot_of's n_experts entries that take what is read from main memory (run_routed)
  TensorView y;                            // [T * k, D]
  FfnMatrices shared;                      // gate empty: none
  TensorView shared_y;                     // [T, D]
  GluKind glu = GluKind::Silu;             // of the routed experts; the shared one has Silu
  float limit = 0.0f;
  float alpha = 0.0f;
  Precision precision = Precision::Exact;
};

// h = h + s, s = sum over ranks r of weights[t, r] * rows[t, r] as fma from 0 in rank order, then the shared
// expert: s = fma(sigmoid(shared_gate[t]), shared[t], s), or s + shared[t] without a gate.
struct Combine {
  static constexpr const char* kName = "Combine";
  TensorView rows;         // [T, k, D]
  TensorView weights;      // [T, k]
  TensorView shared;       // [T, D] or empty
  TensorView shared_gate;  // [T, 1] or empty: before the sigmoid
  TensorView h;            // [T, D]
  template <class F>
  void each_tensor(F&& f) {
    f("rows", rows, Access::In), f("weights", weights, Access::In);
    if (!shared.empty()) f("shared", shared, Access::In);
    if (!shared_gate.empty()) f("shared_gate", shared_gate, Access::In);
    f("h", h, Access::InOut);
  }
};

// Depthwise causal convolution and silu: y_t[c] = silu(sum_j w[c, j] * u_{t-(K-1)+j}[c]), fma from 0 in ascending
// j; rows before the first token come from `state` (the K-1 inputs before it), which is advanced by T rows.
struct CausalConv {
  static constexpr const char* kName = "CausalConv";
  static constexpr std::int64_t kMaxTaps = 16;  // published models have 4
  TensorView u;      // [T, C]
  TensorView w;      // [C, K], oldest tap first, 1 <= K <= kMaxTaps
  TensorView state;  // [K-1, C]
  TensorView y;      // [T, C]
  template <class F>
  void each_tensor(F&& f) {
    f("u", u, Access::In), f("w", w, Access::In), f("state", state, Access::InOut), f("y", y, Access::Out);
  }
};

// y = x * (scale / sqrt(dot16(x, x) + eps)) per head; y may be x.
struct L2Norm {
  static constexpr const char* kName = "L2Norm";
  TensorView x, y;  // [T, H, D]
  float eps = 0.0f;
  float scale = 1.0f;
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In), f("y", y, Access::Out);
  }
};

// The gates of a delta-net layer: decay = exp(neg_exp_a * softplus(a + dt_bias)), beta = sigmoid(b).
struct DeltaGates {
  static constexpr const char* kName = "DeltaGates";
  TensorView a, b;         // [T, Hv]
  TensorView neg_exp_a;    // [Hv]
  TensorView dt_bias;      // [Hv]
  TensorView decay, beta;  // [T, Hv]
  template <class F>
  void each_tensor(F&& f) {
    f("a", a, Access::In), f("b", b, Access::In), f("neg_exp_a", neg_exp_a, Access::In);
    f("dt_bias", dt_bias, Access::In), f("decay", decay, Access::Out), f("beta", beta, Access::Out);
  }
};

// The gated delta rule, token by token; value head h uses key head k_head_of(h). For every value head and every
// column c of its state row S[c, :] (dk values): S = S * decay; m = dot16(k, S); d = beta * (v_c - m);
// S = fma(k, d, S); y_c = dot16(q, S). Columns are independent: that is the parallelism.
struct GatedDelta {
  static constexpr const char* kName = "GatedDelta";
  TensorView q, k;         // [T, Hk, dk], normed and scaled
  TensorView v;            // [T, Hv, dv]
  TensorView decay, beta;  // [T, Hv]
  TensorView state;        // [Hv, dv, dk]
  TensorView y;            // [T, Hv, dv]
  bool tiled_heads = false;  // value head h uses key head h mod Hk instead of h / (Hv / Hk)
  std::int64_t k_head_of(std::int64_t h) const noexcept {
    return tiled_heads ? h % q.dim(1) : h / (v.dim(1) / q.dim(1));
  }
  template <class F>
  void each_tensor(F&& f) {
    f("q", q, Access::In), f("k", k, Access::In), f("v", v, Access::In), f("decay", decay, Access::In);
    f("beta", beta, Access::In), f("state", state, Access::InOut), f("y", y, Access::Out);
  }
};

// y = RmsNorm(x) * silu(gate) per head; y may be x.
struct GatedRmsNorm {
  static constexpr const char* kName = "GatedRmsNorm";
  TensorView x, gate;  // [T, H, D]
  TensorView weight;   // [D]
  TensorView y;        // [T, H, D]
  float eps = 0.0f;
  template <class F>
  void each_tensor(F&& f) {
    f("x", x, Access::In), f("gate", gate, Access::In), f("weight", weight, Access::In), f("y", y, Access::Out);
  }
};

// Every op, for code that must not forget one: MOEFLUX_FOR_EACH_OP(X) expands X(Embed) X(Add) ..
#define MOEFLUX_FOR_EACH_OP(X)                                                                               \
  X(Embed) X(Add) X(RmsNorm) X(AddRmsNorm) X(MatMul) X(HeadMatMul) X(Rope) X(CacheWrite) X(Attention)        \
  X(Clamp) X(SigmoidGate)                                                                                    \
  X(Glu) X(Route) X(ExpertFfn) X(Combine) X(CausalConv) X(L2Norm) X(DeltaGates) X(GatedDelta) X(GatedRmsNorm)

// Shapes, dtypes and strides, checked once at the entry: throws Internal naming op and tensor. Kernels
// validate nothing. Token and row numbers are checked here too.
#define MOEFLUX_DECLARE_CHECK(Op) void check(const Op& op);
MOEFLUX_FOR_EACH_OP(MOEFLUX_DECLARE_CHECK)
#undef MOEFLUX_DECLARE_CHECK

}  // namespace moeflux::backend
