// Attention: contexts around tile and group borders, windows, sinks, head ratios.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "backend/op_cases.h"
#include "backend/view_walk.h"

namespace moeflux::backend::cases {
namespace {

double cached(const TensorView& v, std::int64_t j, std::int64_t head, std::int64_t i) {
  return element_value(v, j * v.stride(0) + head * v.stride(1) + i);
}

// One query's scores with the error each may carry into its weight.
struct Scores {
  std::vector<double> p, error;
};

// s_j: a dot16 and the product with scale. exp sees it minus a maximum: the difference is rounded (kU *
// range) and the weight is rescaled once per later tile of its group, per group and by the sink. Each
// rescaling is an exp (whose argument is rounded; the arguments add up to at most the range) and a product.
Scores scores_of(const Attention& op, std::int64_t t, std::int64_t h, std::int64_t first, std::int64_t last) {
  const std::int64_t kv = h / (op.q.dim(1) / op.k.dim(1)), width = op.q.dim(2);
  const double scale = std::fabs(static_cast<double>(op.scale));
  Scores out;
  std::vector<double> s;
  double top = op.sinks.empty() ? -HUGE_VAL : static_cast<double>(op.sinks.f32()[h]), low = HUGE_VAL;
  for (std::int64_t j = first; j <= last; ++j) {
    double dot = 0.0, size = 0.0;
    for (std::int64_t i = 0; i < width; ++i) {
      const double term = cached(op.q, t, h, i) * cached(op.k, j, kv, i);
      dot += term;
      size += std::fabs(term);
    }
    s.push_back(dot * static_cast<double>(op.scale));
    out.error.push_back(scale * size * roundings(dot16_roundings(width) + 1.0));
    top = std::max(top, s.back());
    low = std::min(low, s.back());
  }
  if (!op.sinks.empty()) low = std::min(low, static_cast<double>(op.sinks.f32()[h]));
  const double tiles = static_cast<double>((last - first) / Attention::kTile + 2);
  const double groups = static_cast<double>((last - first) / (Attention::kTile * Attention::kGroupTiles) + 2);
  const double rescalings = std::min(tiles, static_cast<double>(Attention::kGroupTiles)) + groups + 1.0;
  double sum = op.sinks.empty() ? 0.0 : std::exp(static_cast<double>(op.sinks.f32()[h]) - top);
  for (const double x : s) sum += std::exp(x - top);
  for (std::size_t j = 0; j < s.size(); ++j) {
    out.p.push_back(std::exp(s[j] - top) / sum);
    out.error[j] += kExp + 2.0 * 1.01 * kU * (top - low) + rescalings * (kExp + 1.01 * kU);
  }
  return out;
}

// y = sum p_j v_j with p_j off by a factor of 1 + e_j, and the divisor by their mean: the error is sum p_j
// e_j (v_j - y). Adding up takes an fma per key of a group and one per group for y; for l a sum16 per tile,
// then one fma each per tile and group. Reciprocal, product and the reference's store are three more.
Bounds attention_bound(Backend&, const Attention& op, const Result& r) {
  std::vector<double> bounds;
  for (std::int64_t t = 0; t < op.q.dim(0); ++t)
    for (std::int64_t h = 0; h < op.q.dim(1); ++h) {
      const std::int64_t last = op.pos0 + t, kv = h / (op.q.dim(1) / op.k.dim(1));
      const std::int64_t first = op.window == 0 ? 0 : std::max<std::int64_t>(0, last - op.window + 1);
      const Scores s = scores_of(op, t, h, first, last);
      const std::int64_t keys = last - first + 1, group = Attention::kTile * Attention::kGroupTiles;
      const auto groups = static_cast<double>(keys / group + 2),
                 tiles = static_cast<double>(group / Attention::kTile);
      const double adding = roundings(static_cast<double>(std::min(keys, group)) + groups) +
                            roundings(dot16_roundings(Attention::kTile) + tiles + groups + 3.0);
      for (std::int64_t i = 0; i < op.v.dim(2); ++i) {
        const double y = std::fabs(r.values[0][bounds.size()]);
        double bound = kTiny + adding * y;
        for (std::int64_t j = first; j <= last; ++j) {
          const auto at = static_cast<std::size_t>(j - first);
          const double v = std::fabs(cached(op.v, j, kv, i));
          bound += s.p[at] * (s.error[at] * (v + y) + adding * v) + kTiny * v;
        }
        bounds.push_back(bound);
      }
    }
  return {bounds};
}

struct Shape {
  std::int64_t t, heads, kv_heads, width, pos0, window = 0;
  bool f16 = false, sinks = false;
  std::int64_t v_width = 0;  // 0: as the keys
  bool latent = false;       // values are the front of the keys
  bool plain = false;        // no gaps anywhere: every row begins at a multiple of its width
};

void attention_case(const Visitor& visit, unsigned seed, const Shape& s) {
  OpCase<Attention> c(
      fmt::format("Attention T {} H {}/{} width {} from {} window {}{}{}", s.t, s.heads, s.kv_heads, s.width,
                  s.pos0, s.window, s.f16 ? " f16" : "", s.sinks ? " sinks" : ""),
      seed);
  Memory& m = c.memory;
  c.op.q = s.plain         ? m.random({s.t, s.heads, s.width})
           : seed % 3 == 0 ? m.random_interleaved(s.t, s.heads, s.width)
           : seed % 3 == 1 ? m.random_head_major(s.t, s.heads, s.width)
                           : m.random({s.t, s.heads, s.width});
  const std::int64_t capacity = s.pos0 + s.t + 3;  // rows behind the last position must not matter
  c.op.k = s.f16 ? m.random_f16({capacity, s.kv_heads, s.width}) : m.random({capacity, s.kv_heads, s.width});
  const std::int64_t v_width = s.v_width == 0 ? s.width : s.v_width;
  if (s.latent) {
    c.op.v = c.op.k;
    c.op.v.dims[2] = v_width;
  } else {
    c.op.v = s.f16     ? m.random_f16({capacity, s.kv_heads, v_width})
             : s.plain ? m.random({capacity, s.kv_heads, v_width})
                       : m.random_gaps({capacity, s.kv_heads, v_width}, 1);
  }
  if (s.sinks) c.op.sinks = m.random({s.heads}, 3.0);
  c.op.y = m.output({s.t, s.heads, v_width}, seed % 2 == 0 ? 3 : 0);
  c.op.pos0 = s.pos0;
  c.op.window = s.window;
  // Some scores far apart: the running maximum moves and old weights underflow.
  c.op.scale = seed % 4 == 0 ? 4.0f : static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.width)));
  c.bound = attention_bound;
  visit(c);
}

}  // namespace

void attention_cases(const Visitor& visit) {
  unsigned seed = 3000;
  for (const std::int64_t width : {1, 3, 17, 31, 33, 64, 100, 128, 257})
    for (const std::int64_t ratio : {1, 2, 8})
      for (const bool f16 : {false, true})
        attention_case(visit, seed++, {2, 2 * ratio, 2, width, 70, 0, f16, ratio == 2});
  // Contexts around the borders of tiles (64) and groups (1024).
  for (const std::int64_t context : {1, 2, 63, 64, 65, 128, 1023, 1024, 1025, 2500})
    for (const std::int64_t t : {1, 2, 7, 65}) {
      if (t > context) continue;
      for (const std::int64_t window : {0, 1, 63, 64, 100, 1024, 5000}) {
        if (window > context + 64 && window != 5000) continue;
        if (t == 65 && context > 1025) continue;  // one long prompt below is enough
        attention_case(visit, seed, {t, 2, 1, 17, context - t, window, seed % 2 == 0, seed % 5 == 0});
        ++seed;
      }
    }
  // Heads that share a kv head are computed together where the width allows: full and partial sets of them.
  for (const std::int64_t ratio : {2, 3, 4, 5, 7, 8, 9, 12, 16})
    for (const std::int64_t context : {1, 66, 1027})
      attention_case(visit, seed++,
                     {context < 3 ? 1 : 3, 2 * ratio, 2, 32, context - (context < 3 ? 1 : 3),
                      ratio % 3 == 0 ? 65 : 0, ratio % 2 == 0, ratio == 5});
  attention_case(visit, seed++, {1, 16, 2, 256, 2100, 0, true, false});
  attention_case(visit, seed++, {65, 4, 2, 33, 2435, 0, true, true});
  attention_case(visit, seed++, {0, 4, 2, 33, 10, 0, false, false});
  attention_case(visit, seed++, {130, 2, 2, 8, 0, 0, false, false});
  attention_case(visit, seed++, {130, 2, 2, 8, 1000, 70, true, true});
  // Prompts long enough for tokens to be taken a few at a time over a tile of keys, across tiles, groups and windows.
  for (const bool f16 : {false, true})
    for (const std::int64_t window : {0, 70, 1100}) {
      attention_case(visit, seed++, {37, 8, 2, 32, 40, window, f16, true});
      attention_case(visit, seed++, {35, 10, 2, 32, 1003, window, f16, false});
    }
  // Values of another width, and a latent cache whose values are part of its keys.
  for (const bool f16 : {false, true}) {
    attention_case(visit, seed++, {3, 4, 2, 17, 70, 0, f16, false, 33});
    attention_case(visit, seed++, {3, 4, 2, 33, 1100, 0, f16, true, 5});
    attention_case(visit, seed++, {7, 8, 1, 80, 1020, 0, f16, false, 64, true});
    attention_case(visit, seed++, {1, 4, 1, 19, 2100, 0, f16, false, 13, true});
  }
  // Heads together: widths that are no multiple of a kernel's block of columns, values wider and narrower than keys, latent caches.
  for (const bool f16 : {false, true})
    for (const std::int64_t ratio : {2, 3, 6, 9}) {
      attention_case(visit, seed++, {2, ratio, 1, 256, 61, ratio == 6 ? 65 : 0, f16, ratio % 2 == 0});
      attention_case(visit, seed++, {1, 2 * ratio, 2, 160, 1024, ratio == 3 ? 70 : 0, f16, ratio == 9});
      attention_case(visit, seed++, {2, 2 * ratio, 2, 64, 129, 0, f16, ratio == 2, 96});
      attention_case(visit, seed++, {ratio == 3 ? 35 : 2, 2 * ratio, 2, 96, 90, 0, f16, true, 32});
      attention_case(visit, seed++, {1, ratio, 1, 160, 1090, ratio == 6 ? 100 : 0, f16, false, 128, true});
      attention_case(visit, seed++, {ratio == 9 ? 33 : 2, 2 * ratio, 1, 96, 90, 0, f16, false, 64, true});
    }
  // The heads of one token or two whose rows lie side by side, as in a model.
  for (const std::int64_t pos0 : {0, 15, 16, 63, 64, 515, 1023, 1024, 2100, 4000})
    for (const std::int64_t window : {0, 100, 1100})
      attention_case(visit, seed++, {1, 16, 2, pos0 < 1000 ? 256 : 64, pos0, window, false, pos0 % 2 == 1, 0, false, true});
  for (const std::int64_t pos0 : {0, 14, 1022, 3000}) {
    attention_case(visit, seed++, {2, 16, 2, 128, pos0, pos0 == 0 ? 0 : 65, false, true, 0, false, true});
    attention_case(visit, seed++, {2, 3, 1, 48, pos0, 0, false, false, 36, false, true});
    attention_case(visit, seed++, {1, 32, 8, 64, pos0, 0, false, true, 0, false, true});
  }
  // Far beyond every border: 33,000 keys.
  attention_case(visit, seed++, {1, 2, 1, 12, 32999, 0, true, true});
  attention_case(visit, seed++, {2, 2, 1, 20, 32999, 0, false, false, 16, true});
  attention_case(visit, seed++, {1, 2, 2, 8, 32999, 4096, false, true});
}

}  // namespace moeflux::backend::cases
