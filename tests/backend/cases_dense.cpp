// Embedding, element-wise ops, norms, rotation, cache.
#include <cmath>

#include <fmt/format.h>

#include "backend/op_cases.h"
#include "backend/view_walk.h"

namespace moeflux::backend::cases {
namespace {

// T x D that no vector width divides, and some that one does.
struct Shape2 {
  std::int64_t t, d;
};
const std::vector<Shape2> kShapes2{{0, 17}, {1, 1},   {2, 3},    {7, 17}, {1, 31},
                                   {2, 33}, {7, 100}, {65, 257}, {3, 256}};

struct Shape3 {
  std::int64_t t, h, d;
};
const std::vector<Shape3> kShapes3{{0, 2, 8},  {1, 1, 1},    {2, 3, 3},   {7, 2, 17}, {1, 4, 31},
                                   {2, 2, 33}, {65, 1, 100}, {7, 3, 257}, {2, 8, 64}};

// Where the views of a case lie.
enum class Layout { Plain, Gaps, InPlace };
constexpr Layout kLayouts[] = {Layout::Plain, Layout::Gaps, Layout::InPlace};
const char* layout_name(Layout l) {
  return l == Layout::Plain ? "plain" : l == Layout::Gaps ? "gaps" : "in place";
}

std::int64_t gap_of(Layout layout) { return layout == Layout::Gaps ? 5 : 0; }

// Roundings behind x * r * weight with r = 1 / sqrt(dot16 / D + eps): the root halves the error of its
// argument (the dot, the division, the addition of eps), then root, reciprocal, two products, and the
// reference's own store.
double rms_factor(std::int64_t d) { return roundings(dot16_roundings(d)) / 2 + 6.0 * 1.01 * kU; }

}  // namespace

void embed_cases(const Visitor& visit) {
  unsigned seed = 100;
  for (const quant::Format& f : all_formats())
    for (const std::int64_t t : {0, 1, 7}) {
      const std::int64_t cols = f.quantized() ? 3 * f.group : 33;
      OpCase<Embed> c(fmt::format("Embed {} T {}", f.name(), t), seed++);
      c.op.table = c.memory.matrix(11, cols, f, seed % 2 == 0);
      std::vector<std::int32_t> tokens;
      for (std::int64_t i = 0; i < t; ++i)
        tokens.push_back(i == 0 ? 10 : static_cast<std::int32_t>(c.memory.below(11)));
      c.op.tokens = c.memory.indices(std::move(tokens));
      c.op.y = c.memory.output({t, cols}, seed % 3);
      // One rounding of an exact expression: nothing to tolerate.
      c.bound = [](Backend&, const Embed&, const Result& r) {
        return Bounds{std::vector<double>(r.values[0].size(), 0.0)};
      };
      visit(c);
    }
}

void add_cases(const Visitor& visit) {
  unsigned seed = 200;
  for (const auto& [t, d] : kShapes2)
    for (const Layout layout : kLayouts) {
      OpCase<Add> c(fmt::format("Add [{}, {}] {}", t, d, layout_name(layout)), seed++);
      c.op.a = c.memory.random_gaps({t, d}, gap_of(layout));
      c.op.b = c.memory.random_gaps({t, d}, gap_of(layout) * 2);
      c.op.y = layout == Layout::InPlace ? c.op.a : c.memory.output({t, d}, gap_of(layout));
      // Both round the same sum once.
      c.bound = [](Backend&, const Add&, const Result& r) {
        return Bounds{std::vector<double>(r.values[0].size(), 0.0)};
      };
      visit(c);
    }
}

void rms_norm_cases(const Visitor& visit) {
  unsigned seed = 300;
  const auto fill = [&](OpCase<RmsNorm>& c, std::int64_t d, Layout layout) {
    c.op.weight = c.memory.random({d});
    c.op.eps = 1e-6f;
    if (layout == Layout::InPlace) c.op.y = c.op.x;
    c.bound = [d](Backend&, const RmsNorm&, const Result& r) {
      return Bounds{relative(r, 0, rms_factor(d))};
    };
    visit(c);
  };
  for (const Layout layout : kLayouts) {
    for (const auto& [t, d] : kShapes2) {
      OpCase<RmsNorm> c(fmt::format("RmsNorm [{}, {}] {}", t, d, layout_name(layout)), seed++);
      c.op.x = c.memory.random_gaps({t, d}, gap_of(layout), 3.0);
      c.op.y = c.memory.output({t, d}, gap_of(layout));
      fill(c, d, layout);
    }
    for (const auto& [t, h, d] : kShapes3) {
      OpCase<RmsNorm> c(fmt::format("RmsNorm [{}, {}, {}] {}", t, h, d, layout_name(layout)), seed++);
      c.op.x =
          layout == Layout::Gaps ? c.memory.random_interleaved(t, h, d) : c.memory.random({t, h, d}, 1e-3);
      c.op.y = layout == Layout::Gaps ? c.memory.random_head_major(t, h, d) : c.memory.output({t, h, d});
      fill(c, d, layout);
    }
  }
}

void add_rms_norm_cases(const Visitor& visit) {
  unsigned seed = 400;
  for (const auto& [t, d] : kShapes2)
    for (const Layout layout : {Layout::Plain, Layout::Gaps}) {
      OpCase<AddRmsNorm> c(fmt::format("AddRmsNorm [{}, {}] {}", t, d, layout_name(layout)), seed++);
      c.op.h = c.memory.random_gaps({t, d}, gap_of(layout));
      c.op.delta = c.memory.random_gaps({t, d}, gap_of(layout));
      c.op.weight = c.memory.random({d});
      c.op.y = c.memory.output({t, d}, gap_of(layout));
      c.op.eps = 1e-5f;
      c.bound = [d = d](Backend&, const AddRmsNorm&, const Result& r) {
        return Bounds{std::vector<double>(r.values[0].size(), 0.0), relative(r, 1, rms_factor(d))};
      };
      visit(c);
    }
}

void l2_norm_cases(const Visitor& visit) {
  unsigned seed = 500;
  for (const auto& [t, h, d] : kShapes3)
    for (const Layout layout : kLayouts) {
      OpCase<L2Norm> c(fmt::format("L2Norm [{}, {}, {}] {}", t, h, d, layout_name(layout)), seed++);
      c.op.x = layout == Layout::Gaps ? c.memory.random_interleaved(t, h, d) : c.memory.random({t, h, d});
      c.op.y = layout == Layout::InPlace ? c.op.x : c.memory.output({t, h, d}, gap_of(layout));
      c.op.eps = 1e-6f;
      c.op.scale = 0.35f;
      // As a norm without the division by D and with one product less.
      c.bound = [d = d](Backend&, const L2Norm&, const Result& r) {
        return Bounds{relative(r, 0, rms_factor(d))};
      };
      visit(c);
    }
}

void gated_rms_norm_cases(const Visitor& visit) {
  unsigned seed = 600;
  for (const auto& [t, h, d] : kShapes3)
    for (const Layout layout : kLayouts) {
      OpCase<GatedRmsNorm> c(fmt::format("GatedRmsNorm [{}, {}, {}] {}", t, h, d, layout_name(layout)),
                             seed++);
      c.op.x = layout == Layout::Gaps ? c.memory.random_head_major(t, h, d) : c.memory.random({t, h, d});
      c.op.gate = layout == Layout::Gaps ? c.memory.random_interleaved(t, h, d, 3.0)
                                         : c.memory.random({t, h, d}, 3.0);
      c.op.weight = c.memory.random({d});
      c.op.y = layout == Layout::InPlace ? c.op.x : c.memory.output({t, h, d}, gap_of(layout));
      c.op.eps = 1e-6f;
      // silu is a sigmoid and a product; one more product with it.
      c.bound = [d = d](Backend&, const GatedRmsNorm&, const Result& r) {
        return Bounds{relative(r, 0, rms_factor(d) + kSigmoid + 2.0 * 1.01 * kU)};
      };
      visit(c);
    }
}

void sigmoid_gate_cases(const Visitor& visit) {
  unsigned seed = 700;
  for (const auto& [t, h, d] : kShapes3)
    for (const Layout layout : kLayouts) {
      OpCase<SigmoidGate> c(fmt::format("SigmoidGate [{}, {}, {}] {}", t, h, d, layout_name(layout)), seed++);
      c.op.x = c.memory.random_gaps({t, h, d}, gap_of(layout));
      c.op.gate =
          layout == Layout::Gaps ? c.memory.random_interleaved(t, h, d) : c.memory.random({t, h, d}, 30.0);
      c.op.y = layout == Layout::InPlace ? c.op.x : c.memory.output({t, h, d}, gap_of(layout));
      // The product and the reference's store; far below zero the gate itself is below the normal range.
      c.bound = [](Backend&, const SigmoidGate& op, const Result& r) {
        std::vector<double> b = relative(r, 0, kSigmoid + 2.0 * 1.01 * kU);
        each_element(op.x, [&](std::int64_t i, std::int64_t at) {
          b[static_cast<std::size_t>(i)] += kTiny * (1.0 + std::fabs(element_value(op.x, at)));
        });
        return Bounds{b};
      };
      visit(c);
    }
}

void glu_cases(const Visitor& visit) {
  unsigned seed = 800;
  for (const auto& [t, d] : kShapes2)
    for (const Layout layout : kLayouts)
      for (const GluKind kind : {GluKind::Silu, GluKind::Clamped}) {
        OpCase<Glu> c(fmt::format("Glu {} [{}, {}] {}", static_cast<int>(kind), t, d, layout_name(layout)),
                      seed++);
        c.op.gate = c.memory.random_gaps({t, d}, gap_of(layout), 6.0);
        c.op.up = c.memory.random_gaps({t, d}, gap_of(layout), 6.0);
        c.op.y = layout == Layout::InPlace ? c.op.gate : c.memory.output({t, d}, gap_of(layout));
        c.op.kind = kind;
        c.op.limit = 7.0f;
        c.op.alpha = 1.702f;
        // Silu: two products. Clamped: u + 1 (relative to itself: u + 1 is rounded once), alpha * g enters
        // the sigmoid with a relative error of kU, which it passes on as at most kU * |alpha g|, then two
        // products.
        c.bound = [](Backend&, const Glu& op, const Result& r) {
          const double argument = op.kind == GluKind::Clamped ? 1.702 * 40.0 + 1.0 : 0.0;
          return Bounds{relative(r, 0, kSigmoid + (3.0 + argument) * 1.01 * kU)};
        };
        visit(c);
      }
}

void rope_cases(const Visitor& visit) {
  unsigned seed = 900;
  for (const auto& [t, h, d] : kShapes3)
    for (const std::int64_t pos0 : {0, 5, 131071, 1000003})
      for (const RopeStyle style : {RopeStyle::HalfSplit, RopeStyle::Interleaved}) {
        const std::int64_t n_freq =
            seed % 2 == 0 ? d / 2 : (d + 3) / 4 / 2;  // whole heads, and a part of them
        OpCase<Rope> c(fmt::format("Rope [{}, {}, {}] {} frequencies, style {}, from {}", t, h, d, n_freq,
                                   static_cast<int>(style), pos0),
                       seed++);
        c.op.x = seed % 3 == 0   ? c.memory.random({t, h, d})
                 : seed % 3 == 1 ? c.memory.random_interleaved(t, h, d)
                                 : c.memory.random_head_major(t, h, d);
        std::vector<float> inv_freq;
        for (std::int64_t i = 0; i < n_freq; ++i)
          inv_freq.push_back(
              static_cast<float>(std::pow(1e4, -static_cast<double>(i) / static_cast<double>(n_freq))));
        c.op.inv_freq = c.memory.values({n_freq}, inv_freq);
        c.op.pos0 = pos0;
        c.op.style = style;
        c.op.magnitude = seed % 4 == 0 ? 1.3465736f : 1.0f;
        // Sine and cosine, times magnitude, the product, the fma, the store: of |a| + |b|, as |c|, |s| <=
        // magnitude.
        c.bound = [](Backend&, const Rope& op, const Result&) {
          const std::int64_t n = op.inv_freq.dim(0), width = op.x.dim(2);
          std::vector<double> b(static_cast<std::size_t>(op.x.count()), 0.0);
          each_element(op.x, [&](std::int64_t index, std::int64_t at) {
            const std::int64_t i = index % width;
            if (i >= 2 * n) return;
            const bool half = op.style == RopeStyle::HalfSplit;
            const std::int64_t other = half ? (i < n ? at + n : at - n) : (i % 2 == 0 ? at + 1 : at - 1);
            const double size = std::fabs(element_value(op.x, at)) + std::fabs(element_value(op.x, other));
            b[static_cast<std::size_t>(index)] =
                (kSinCos + 4.0 * 1.01 * kU) * size * static_cast<double>(op.magnitude);
          });
          return Bounds{b};
        };
        visit(c);
      }
}

void cache_write_cases(const Visitor& visit) {
  unsigned seed = 1000;
  for (const auto& [t, d] : kShapes2)
    for (const bool f16 : {false, true})
      for (const std::int64_t pos0 : {0, 3}) {
        OpCase<CacheWrite> c(fmt::format("CacheWrite [{}, {}] {} at {}", t, d, f16 ? "f16" : "f32", pos0),
                             seed++);
        c.op.x = c.memory.random_gaps({t, d}, pos0, pos0 == 0 ? 1.0 : 3e4);  // some beyond the range of f16
        c.op.cache = f16 ? c.memory.random_f16({t + 5, d}) : c.memory.random_gaps({t + 5, d}, 2);
        c.op.pos0 = pos0;
        c.bound = [](Backend&, const CacheWrite&, const Result& r) {
          return Bounds{std::vector<double>(r.values[0].size(), 0.0)};
        };
        visit(c);
      }
}

}  // namespace moeflux::backend::cases
