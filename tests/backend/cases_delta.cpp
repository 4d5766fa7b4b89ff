// The delta-net layer: convolution, gates, recurrence.
#include <cmath>

#include <fmt/format.h>

#include "backend/op_cases.h"
#include "core/scalar_math.h"
#include "backend/view_walk.h"

namespace moeflux::backend::cases {
namespace {

// z = sum w u over K fmas; silu passes its error on with a slope of at most 1.1 and adds its own: sigmoid and
// product, the reference's store. The new state is a copy.
Bounds conv_bound(Backend&, const CausalConv& op, const Result& r) {
  const std::int64_t before = op.w.dim(1) - 1, channels = op.u.dim(1);
  std::vector<double> y;
  for (std::int64_t t = 0; t < op.u.dim(0); ++t)
    for (std::int64_t c = 0; c < channels; ++c) {
      double size = 0.0;
      for (std::int64_t j = 0; j <= before; ++j) {
        const std::int64_t at = t - before + j;
        const float u = at < 0 ? op.state.row(at + before)[c] : op.u.row(at)[c];
        size += std::fabs(static_cast<double>(op.w.row(c)[j]) * static_cast<double>(u));
      }
      const double own = std::fabs(r.values[1][y.size()]) * (kSigmoid + 2.0 * 1.01 * kU);
      y.push_back(1.1 * roundings(static_cast<double>(before + 1)) * size + own + kTiny);
    }
  return {std::vector<double>(r.values[0].size(), 0.0), y};
}

double norm(const float* p, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(p[i]) * static_cast<double>(p[i]);
  return std::sqrt(sum);
}

// The recurrence of one column is linear in its state: S' = decay * (I - beta k k^T) S + beta v k, and the
// matrix has norm max(1, |1 - beta |k|^2|) * decay. So the 2-norm of the state's error shrinks or stays, and
// every token adds its own roundings: of the decayed state, of m (a dot16), of v - m and the product with
// beta, of the fma. y adds a dot16.
void column_bound(const GatedDelta& op, std::int64_t h, std::int64_t c, Bounds& bounds) {
  const std::int64_t kh = op.k_head_of(h), dk = op.q.dim(2), dv = op.v.dim(2), heads = op.v.dim(1);
  const auto at = [](const TensorView& v, std::int64_t i, std::int64_t j) {
    return v.f32() + i * v.stride(0) + j * v.stride(1);
  };
  const float* initial = at(op.state, h, c);
  std::vector<double> s(initial, initial + dk);
  double error = 0.0;
  const double dot = roundings(dot16_roundings(dk));
  for (std::int64_t t = 0; t < op.v.dim(0); ++t) {
    const float *q = at(op.q, t, kh), *k = at(op.k, t, kh);
    const auto decay = static_cast<double>(op.decay.row(t)[h]), beta = static_cast<double>(op.beta.row(t)[h]);
    const auto v = static_cast<double>(at(op.v, t, h)[c]);
    const double k_norm = norm(k, dk);
    double m = 0.0, m_size = 0.0, s_norm = 0.0, y_size = 0.0, new_norm = 0.0;
    for (std::int64_t i = 0; i < dk; ++i) {
      double& x = s[static_cast<std::size_t>(i)];
      x *= decay;
      m += static_cast<double>(k[i]) * x;
      m_size += std::fabs(static_cast<double>(k[i]) * x);
      s_norm += x * x;
    }
    const double d = beta * (v - m);
    for (std::int64_t i = 0; i < dk; ++i) {
      double& x = s[static_cast<std::size_t>(i)];
      x += static_cast<double>(k[i]) * d;
      new_norm += x * x;
      y_size += std::fabs(static_cast<double>(q[i]) * x);
    }
    const double grow = std::max(1.0, std::fabs(1.0 - beta * k_norm * k_norm));
    const double d_error = beta * dot * m_size + 2.0 * 1.01 * kU * std::fabs(d);
    error = grow * (decay * error + 1.01 * kU * std::sqrt(s_norm)) + k_norm * d_error +
            1.01 * kU * std::sqrt(new_norm);
    // The errors of m and S in y, and the reference's store.
    bounds[1][static_cast<std::size_t>((t * heads + h) * dv + c)] =
        1.01 * (norm(q, dk) * error + (dot + kU) * y_size) + kTiny;
  }
  double s_norm = 0.0;
  for (const double x : s) s_norm += x * x;
  for (std::int64_t i = 0; i < dk; ++i)
    bounds[0][static_cast<std::size_t>((h * dv + c) * dk + i)] =
        1.01 * (error + kU * std::sqrt(s_norm)) + kTiny;
}

struct DeltaShape {
  std::int64_t t, key_heads, value_heads, dk, dv;
};

void delta_case(const Visitor& visit, unsigned seed, const DeltaShape& s, bool tiled) {
  OpCase<GatedDelta> c(fmt::format("GatedDelta T {} heads {}/{} [{}, {}]{}", s.t, s.value_heads, s.key_heads,
                                   s.dv, s.dk, tiled ? " tiled" : ""),
                       seed);
  Memory& m = c.memory;
  const double unit = 1.0 / std::sqrt(static_cast<double>(s.dk));  // keys of norm about 1
  c.op.q = seed % 2 == 0 ? m.random({s.t, s.key_heads, s.dk}, unit)
                         : m.random_interleaved(s.t, s.key_heads, s.dk, unit);
  c.op.k = seed % 2 == 0 ? m.random({s.t, s.key_heads, s.dk}, unit)
                         : m.random_head_major(s.t, s.key_heads, s.dk, unit);
  c.op.v =
      seed % 2 == 0 ? m.random({s.t, s.value_heads, s.dv}) : m.random_interleaved(s.t, s.value_heads, s.dv);
  c.op.decay = m.random({s.t, s.value_heads});
  c.op.beta = m.random({s.t, s.value_heads});
  for (const TensorView& gate : {c.op.decay, c.op.beta})  // gates lie in (0, 1)
    for (std::int64_t i = 0; i < gate.count(); ++i)
      gate.f32()[i] = 1.0f / (1.0f + math::exp(-gate.f32()[i] - 1.0f));
  c.op.state = m.random({s.value_heads, s.dv, s.dk}, 0.5);
  c.op.y = m.output({s.t, s.value_heads, s.dv}, seed % 3);
  c.op.tiled_heads = tiled;
  c.bound = [](Backend&, const GatedDelta& op, const Result& r) {
    Bounds bounds{std::vector<double>(r.values[0].size()), std::vector<double>(r.values[1].size())};
    for (std::int64_t h = 0; h < op.v.dim(1); ++h)
      for (std::int64_t col = 0; col < op.v.dim(2); ++col) column_bound(op, h, col, bounds);
    return bounds;
  };
  visit(c);
}

}  // namespace

void causal_conv_cases(const Visitor& visit) {
  unsigned seed = 7000;
  for (const std::int64_t t : {1, 2, 7, 65, 0})
    for (const std::int64_t channels : {1, 3, 17, 31, 33, 100, 257})
      for (const std::int64_t taps : {1, 2, 4, 5}) {
        OpCase<CausalConv> c(fmt::format("CausalConv T {} C {} K {}", t, channels, taps), seed++);
        c.op.u = c.memory.random_gaps({t, channels}, seed % 3);
        c.op.w = c.memory.random({channels, taps});
        c.op.state = c.memory.random({taps - 1, channels});
        c.op.y = c.memory.output({t, channels}, seed % 2);
        c.bound = conv_bound;
        visit(c);
      }
}

void delta_gates_cases(const Visitor& visit) {
  unsigned seed = 8000;
  for (const std::int64_t t : {1, 2, 7, 65, 0})
    for (const std::int64_t heads : {1, 3, 17, 32, 33}) {
      OpCase<DeltaGates> c(fmt::format("DeltaGates [{}, {}]", t, heads), seed++);
      c.op.a = c.memory.random_gaps({t, heads}, seed % 2, 6.0);
      c.op.b = c.memory.random_gaps({t, heads}, seed % 3, 6.0);
      c.op.neg_exp_a = c.memory.random({heads});
      for (std::int64_t i = 0; i < heads; ++i) c.op.neg_exp_a.f32()[i] = -math::exp(c.op.neg_exp_a.f32()[i]);
      c.op.dt_bias = c.memory.random({heads}, 2.0);
      c.op.decay = c.memory.output({t, heads}, seed % 2);
      c.op.beta = c.memory.output({t, heads});
      // z = neg_exp_a * softplus(x): the sum x is rounded (softplus has a slope of at most 1), softplus, the
      // product. exp turns the absolute error of z into a relative one and adds its own; then the reference's
      // store.
      c.bound = [](Backend&, const DeltaGates& op, const Result& r) {
        Bounds bounds{{}, relative(r, 1, kSigmoid + 1.01 * kU)};
        for (std::int64_t token = 0; token < op.a.dim(0); ++token)
          for (std::int64_t h = 0; h < op.a.dim(1); ++h) {
            const double x =
                static_cast<double>(op.a.row(token)[h]) + static_cast<double>(op.dt_bias.f32()[h]);
            const double factor = std::fabs(static_cast<double>(op.neg_exp_a.f32()[h]));
            const double softplus = std::log1p(std::exp(x));
            const double z_error = factor * (1.01 * kU * std::fabs(x) + softplus * (kSoftplus + 1.01 * kU));
            const double decay = std::exp(-factor * softplus);
            bounds[0].push_back(1.01 * decay * (z_error + kExp + kU) + kTiny);
          }
        return bounds;
      };
      visit(c);
    }
}

void gated_delta_cases(const Visitor& visit) {
  unsigned seed = 9000;
  for (const std::int64_t t : {1, 2, 7, 65, 0})
    for (const auto& [key_heads, value_heads, dk, dv] : {std::array<std::int64_t, 4>{1, 1, 1, 1},
                                                         {1, 2, 3, 17},
                                                         {2, 2, 17, 3},
                                                         {2, 4, 31, 33},
                                                         {3, 6, 100, 5},
                                                         {1, 8, 128, 16},
                                                         {2, 2, 128, 19},
                                                         {2, 4, 257, 7}})
      for (const bool tiled : {false, true})
        delta_case(visit, seed++, {t, key_heads, value_heads, dk, dv}, tiled);
  // Wide heads, so that tasks take several blocks of columns, and more tokens than are brought together at a time.
  delta_case(visit, seed++, {70, 1, 2, 64, 144}, false);
  delta_case(visit, seed++, {33, 2, 16, 128, 80}, true);
  delta_case(visit, seed++, {300, 1, 2, 16, 16}, false);
}

}  // namespace moeflux::backend::cases
