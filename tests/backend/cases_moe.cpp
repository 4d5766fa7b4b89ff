// Router, experts, combination.
#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "backend/cases_matmul.h"
#include "backend/op_cases.h"
#include "backend/view_walk.h"
#include "quant/decode.h"

namespace moeflux::backend::cases {
namespace {

// Ids must agree. Weights: an exp whose argument was rounded once (kU * range of the logits) or a sigmoid,
// the divisor with the same error and its sum16 (or a sum of k), reciprocal and product; normalizing adds the
// sum of k weights, eps and a division; then scaling and the reference's store.
Bounds route_bound(Backend&, const Route& op, const Result& r) {
  double low = HUGE_VAL, high = -HUGE_VAL;
  each_element(op.logits, [&](std::int64_t, std::int64_t at) {
    low = std::min(low, element_value(op.logits, at));
    high = std::max(high, element_value(op.logits, at));
  });
  const auto k = static_cast<double>(op.ids.dim(1));
  const double score =
      op.score == RouterScore::Sigmoid
          ? kSigmoid
          : 2.0 * (kExp + 1.01 * kU * (high - low)) + roundings(dot16_roundings(op.logits.dim(1)) + k + 2.0);
  const double factor = score * (op.normalize ? 2.0 : 1.0) + roundings(k + 2.0) + 2.0 * 1.01 * kU;
  return {std::vector<double>(r.values[0].size(), 0.0), relative(r, 1, factor)};
}

struct RouteShape {
  std::int64_t t, experts, k;
  RouterScore score;
  std::int32_t groups = 1, topk_groups = 1;
  bool bias = false, normalize = false, ties = false;
};

void route_case(const Visitor& visit, unsigned seed, const RouteShape& s) {
  OpCase<Route> c(fmt::format("Route T {} top {} of {} score {} groups {}/{}{}{}{}", s.t, s.k, s.experts,
                              static_cast<int>(s.score), s.topk_groups, s.groups, s.bias ? " bias" : "",
                              s.normalize ? " normalized" : "", s.ties ? " ties" : ""),
                  seed);
  c.op.logits = c.memory.random_gaps({s.t, s.experts}, seed % 3, 2.0);
  if (s.ties)  // three different values only: most choices are ties
    each_element(c.op.logits, [&](std::int64_t, std::int64_t at) {
      c.op.logits.f32()[at] = static_cast<float>(c.memory.below(3));
    });
  if (s.bias) c.op.select_bias = c.memory.random({s.experts}, s.ties ? 0.0 : 0.3);
  c.op.ids = c.memory.ints({s.t, s.k});
  c.op.weights = c.memory.output({s.t, s.k});
  c.op.score = s.score;
  c.op.n_groups = s.groups;
  c.op.topk_groups = s.topk_groups;
  c.op.normalize = s.normalize;
  c.op.norm_eps = s.normalize && s.bias ? 1e-20f : 0.0f;
  c.op.scaling = seed % 2 == 0 ? 2.5f : 1.0f;
  c.bound = route_bound;
  visit(c);
}

// What an error of the activations does to a product with them. Exact: |w| e. In 8 bits: d moves with its
// largest element, all values with d, and an element that lies within its error of a rounding border may
// change by one step.
std::vector<double> perturbed_matmul_bound(const quant::MatrixView& w, const TensorView& bias,
                                           std::span<const float> x, std::span<const double> error,
                                           Precision precision) {
  std::vector<double> moved(error.begin(), error.end());
  if (precision == Precision::Fast && w.format.quantized()) {
    const Quantized q = quantize(x, w.format.group);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t begin = i / w.format.group * w.format.group, g = i / w.format.group;
      const double d = q.d[g];
      if (d == 0.0) continue;
      const double top_error =
          *std::max_element(error.begin() + static_cast<std::ptrdiff_t>(begin),
                            error.begin() + static_cast<std::ptrdiff_t>(begin + w.format.group));
      const double d_error = top_error / (127.0 * d) + 2.0 * kU,
                   value = std::fabs(static_cast<double>(x[i])) / d;
      const double to_border = std::fabs(value - std::floor(value) - 0.5);
      const bool may_step = to_border <= error[i] / d + value * d_error + 2.0 * kU * value;
      moved[i] = std::fabs(q.x8[i]) * d * d_error + (may_step ? d * (1.0 + d_error) : 0.0);
    }
  }
  std::vector<double> bounds = matmul_bound(w, bias, x, precision);
  std::vector<float> row(x.size());
  for (std::int64_t n = 0; n < w.rows; ++n) {
    quant::decode_row(w, n, row);
    // Rounding grows with the terms, which may be larger by what moved: second order, inside the 1.01.
    for (std::size_t i = 0; i < x.size(); ++i)
      bounds[static_cast<std::size_t>(n)] += 1.01 * std::fabs(static_cast<double>(row[i])) * moved[i];
  }
  return bounds;
}

// The bound of one row of work, with the intermediate values of the reference.
std::vector<double> expert_row_bound(Backend& reference, const ExpertFfn& op, const FfnMatrices& m,
                                     std::span<const float> x) {
  const auto inner = static_cast<std::size_t>(m.gate.rows);
  std::vector<float> gate(inner), up(inner), act(inner), input(x.begin(), x.end());
  const auto row = [](std::vector<float>& v) {
    return view_f32(v.data(), {1, static_cast<std::int64_t>(v.size())});
  };
  const std::vector<MatMulPart> parts{{m.gate, m.gate_bias, row(gate)}, {m.up, m.up_bias, row(up)}};
  const auto stream = reference.create_stream();
  reference.run(*stream, MatMul{row(input), parts, op.precision});
  reference.run(*stream, Glu{row(gate), row(up), row(act), op.glu, op.limit, op.alpha});
  const std::vector<double> gate_error = matmul_bound(m.gate, m.gate_bias, x, op.precision);
  const std::vector<double> up_error = matmul_bound(m.up, m.up_bias, x, op.precision);
  std::vector<double> error(inner);
  for (std::size_t i = 0; i < inner; ++i) {
    // |d silu / dg| <= 1.1, also for g * sigmoid(alpha g); |silu(g)| <= |g|; clamping does not enlarge
    // errors.
    const double g = std::fabs(static_cast<double>(gate[i])), u = std::fabs(static_cast<double>(up[i])) + 1.0;
    const double argument = op.glu == GluKind::Clamped ? static_cast<double>(op.alpha) * (g + 1.0) : 0.0;
    error[i] = 1.01 * (1.1 * gate_error[i] * u + g * up_error[i]) +
               std::fabs(static_cast<double>(act[i])) * (kSigmoid + (4.0 + argument) * 1.01 * kU) + kTiny;
  }
  return perturbed_matmul_bound(m.down, m.down_bias, act, error, op.precision);
}

Bounds expert_bound(Backend& reference, const ExpertFfn& op, const Result&) {
  const auto width = static_cast<std::size_t>(op.y.dim(1));
  std::vector<double> bounds(static_cast<std::size_t>(op.y.count()), 0.0);  // rows nobody names stay
  for (const ExpertWork& work : op.works)
    for (std::size_t i = 0; i < work.rows.size(); ++i) {
      const auto row = expert_row_bound(reference, op, work.m, {op.x.row(work.rows[i]), width});
      std::copy(
          row.begin(), row.end(),
          bounds.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(work.slots[i]) * width));
    }
  return {bounds};
}

struct FfnShape {
  std::int64_t t, width, inner, works, k;
  quant::Format gate, down;
  GluKind glu;
  bool bias;
};

// Every token goes to k works; slots t * k + r, one slot in the middle is left out.
void expert_case(const Visitor& visit, unsigned seed, const FfnShape& s, Precision precision) {
  OpCase<ExpertFfn> c(fmt::format("ExpertFfn T {} [{}, {}] {} works {} / {}{} {}", s.t, s.inner, s.width,
                                  s.works, s.gate.name(), s.down.name(), s.bias ? " bias" : "",
                                  precision == Precision::Fast ? "fast" : "exact"),
                      seed);
  Memory& m = c.memory;
  c.op.x = m.random_gaps({s.t, s.width}, seed % 2);
  c.op.y = m.output({s.t * s.k, s.width}, seed % 3);
  c.op.glu = s.glu;
  c.op.limit = 7.0f;
  c.op.alpha = 1.702f;
  c.op.precision = precision;
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(s.works)), slots(rows.size());
  for (std::int64_t slot = 0; slot < s.t * s.k; ++slot) {
    if (s.t * s.k > 4 && slot == 3) continue;
    const auto w = static_cast<std::size_t>((slot / s.k + slot % s.k * 3) % s.works);
    rows[w].push_back(static_cast<std::int32_t>(slot / s.k));
    slots[w].push_back(static_cast<std::int32_t>(slot));
  }
  for (std::size_t w = 0; w < rows.size(); ++w) {
    ExpertWork work;
    work.m.gate = m.matrix(s.inner, s.width, s.gate, w % 2 == 1);
    work.m.up = m.matrix(s.inner, s.width, s.gate, w % 2 == 1);
    work.m.down = m.matrix(s.width, s.inner, s.down, w % 2 == 1);
    if (s.bias) {
      work.m.gate_bias = m.random({s.inner}, 0.1);
      work.m.up_bias = m.random({s.inner}, 0.1);
      work.m.down_bias = m.random({s.width}, 0.1);
    }
    work.rows = m.indices(rows[w]);
    work.slots = m.indices(slots[w]);
    c.works.push_back(work);
  }
  c.bound = expert_bound;
  visit(c);
}

}  // namespace

void route_cases(const Visitor& visit) {
  unsigned seed = 4000;
  using enum RouterScore;
  for (const auto& [experts, k] :
       {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 3}, {17, 2}, {31, 8}, {128, 8}, {257, 10}})
    for (const RouterScore score : {Softmax, Sigmoid, SoftmaxOfChosen})
      for (const std::int64_t t : {1, 7})
        for (const bool flag : {false, true})
          route_case(
              visit, seed++,
              {t, experts, k, score, 1, 1, flag && score == Sigmoid, flag && score != SoftmaxOfChosen});
  for (const RouterScore score : {Softmax, Sigmoid})
    for (const bool flag : {false, true}) {
      route_case(visit, seed++, {7, 16, 3, score, 4, 2, flag, flag});
      route_case(visit, seed++, {65, 256, 8, score, 8, 4, flag, true});
      route_case(visit, seed++, {2, 6, 4, score, 3, 2, flag, false});
      route_case(visit, seed++, {7, 24, 5, score, 4, 2, flag, flag, true});
    }
  for (const RouterScore score : {Softmax, Sigmoid, SoftmaxOfChosen})
    for (const std::int64_t t : {0, 65})
      route_case(visit, seed++, {t, 33, 6, score, 1, 1, false, false, true});
}

void expert_ffn_cases(const Visitor& visit) {
  unsigned seed = 5000;
  const quant::Format bf16 = quant::Format::bf16(), f32 = quant::Format::f32(), mx = quant::Format::mxfp4();
  const auto affine = [](int bits, int group, DType dtype) {
    return quant::Format::affine(bits, group, dtype);
  };
  for (const Precision precision : {Precision::Exact, Precision::Fast})
    for (const GluKind glu : {GluKind::Silu, GluKind::Clamped})
      for (const bool bias : {false, true}) {
        expert_case(visit, seed++, {7, 33, 17, 4, 2, bf16, bf16, glu, bias}, precision);
        expert_case(visit, seed++, {1, 1, 3, 1, 1, f32, f32, glu, bias}, precision);
        expert_case(visit, seed++,
                    {1, 128, 64, 8, 8, affine(4, 64, DType::BF16), affine(4, 64, DType::BF16), glu, bias},
                    precision);
        expert_case(visit, seed++,
                    {65, 64, 96, 5, 3, affine(4, 64, DType::BF16), affine(8, 32, DType::F16), glu, bias},
                    precision);
        expert_case(visit, seed++,
                    {2, 128, 128, 3, 2, affine(3, 32, DType::F32), affine(6, 128, DType::BF16), glu, bias},
                    precision);
        expert_case(visit, seed++, {7, 96, 32, 3, 2, mx, mx, glu, bias}, precision);
        // Several slices of the inner width; experts with one, a few and many tokens.
        expert_case(visit, seed++,
                    {40, 192, 320, 9, 2, affine(4, 64, DType::BF16), affine(5, 64, DType::F16), glu, bias},
                    precision);
        expert_case(visit, seed++, {0, 64, 64, 2, 2, affine(4, 64, DType::BF16), bf16, glu, bias}, precision);
        // Few experts of one token for many threads: slices get narrower, as far as groups of the last matrix let them.
        expert_case(visit, seed++, {1, 64, 320, 2, 2, affine(4, 64, DType::BF16), affine(4, 64, DType::BF16), glu, bias}, precision);
        expert_case(visit, seed++, {1, 128, 384, 2, 2, affine(4, 64, DType::BF16), affine(6, 128, DType::BF16), glu, bias}, precision);
        // Many experts of few tokens: most of them are one thread's as a whole, beside slices of the rest, whole groups or parts of them.
        expert_case(visit, seed++, {1, 128, 384, 9, 9, affine(4, 64, DType::BF16), affine(6, 128, DType::BF16), glu, bias}, precision);
        expert_case(visit, seed++, {3, 96, 160, 11, 5, mx, bf16, glu, bias}, precision);
      }
  // Whole bands of sixteen rows, groups of every size, one token and several.
  for (const bool bias : {false, true}) {
    expert_case(visit, seed++, {40, 256, 304, 9, 2, affine(4, 64, DType::BF16), bf16, GluKind::Silu, bias}, Precision::Fast);
    expert_case(visit, seed++, {99, 96, 160, 3, 1, affine(4, 32, DType::BF16), affine(4, 32, DType::BF16), GluKind::Silu, bias}, Precision::Fast);
    expert_case(visit, seed++, {1, 192, 320, 4, 3, affine(4, 32, DType::F16), affine(4, 64, DType::F16), GluKind::Silu, bias}, Precision::Fast);
    expert_case(visit, seed++, {1, 192, 320, 9, 9, affine(4, 64, DType::BF16), affine(4, 64, DType::BF16), GluKind::Silu, bias}, Precision::Fast);
    expert_case(visit, seed++, {4, 128, 256, 11, 6, affine(4, 64, DType::F16), affine(4, 128, DType::F16), GluKind::Silu, bias}, Precision::Fast);
    expert_case(visit, seed++, {5, 128, 384, 2, 2, affine(4, 128, DType::BF16), affine(4, 128, DType::BF16), GluKind::Clamped, bias}, Precision::Fast);
  }
}

void combine_cases(const Visitor& visit) {
  unsigned seed = 6000;
  for (const auto& [t, d] :
       {std::pair<std::int64_t, std::int64_t>{0, 9}, {1, 1}, {2, 3}, {7, 17}, {65, 33}, {3, 257}})
    for (const std::int64_t k : {1, 3, 8})
      for (const int shared : {0, 1, 2}) {
        OpCase<Combine> c(fmt::format("Combine [{}, {}, {}] shared {}", t, k, d, shared), seed++);
        c.op.rows = c.memory.random_gaps({t, k, d}, seed % 2);
        c.op.weights = c.memory.random({t, k}, 0.3);
        if (shared >= 1) c.op.shared = c.memory.random_gaps({t, d}, seed % 3);
        if (shared == 2) c.op.shared_gate = c.memory.random_gaps({t, 1}, 2, 3.0);
        c.op.h = c.memory.random_gaps({t, d}, seed % 4);
        // k fmas, the gate, its product, the sum with h, the reference's store.
        c.bound = [](Backend&, const Combine& op, const Result&) {
          std::vector<double> b;
          const auto ranks = static_cast<double>(op.rows.dim(1));
          for (std::int64_t token = 0; token < op.h.dim(0); ++token)
            for (std::int64_t i = 0; i < op.h.dim(1); ++i) {
              double size = std::fabs(static_cast<double>(op.h.row(token)[i]));
              for (std::int64_t r = 0; r < op.rows.dim(1); ++r)
                size += std::fabs(static_cast<double>(op.weights.row(token)[r]) *
                                  static_cast<double>(op.rows.row(token)[r * op.rows.stride(1) + i]));
              const double s =
                  op.shared.empty() ? 0.0 : std::fabs(static_cast<double>(op.shared.row(token)[i]));
              b.push_back(roundings(ranks + 3.0) * (size + s) + kSigmoid * s);
            }
          return Bounds{b};
        };
        visit(c);
      }
}

}  // namespace moeflux::backend::cases
