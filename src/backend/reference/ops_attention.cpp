// Rotary embedding, the key-value cache, attention.
#include <algorithm>
#include <cmath>

#include "backend/reference/reference_impl.h"

namespace moeflux::backend {
namespace {

double cached(const TensorView& v, std::int64_t row, std::int64_t head, std::int64_t i) {
  return element_value(v, row * v.stride(0) + head * v.stride(1) + i);
}

}  // namespace

using reference::at;

void ReferenceBackend::execute(Stream&, const Rope& op) {
  const std::int64_t n_freq = op.inv_freq.dim(0);
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t h = 0; h < op.x.dim(1); ++h)
      for (std::int64_t i = 0; i < n_freq; ++i) {
        const float angle = static_cast<float>(op.pos0 + t) * at(op.inv_freq, i);
        const double c = std::cos(static_cast<double>(angle)) * static_cast<double>(op.magnitude);
        const double s = std::sin(static_cast<double>(angle)) * static_cast<double>(op.magnitude);
        const bool half_split = op.style == RopeStyle::HalfSplit;
        float& first = at(op.x, t, h, half_split ? i : 2 * i);
        float& second = at(op.x, t, h, half_split ? i + n_freq : 2 * i + 1);
        const auto a = static_cast<double>(first), b = static_cast<double>(second);
        first = static_cast<float>(a * c - b * s);
        second = static_cast<float>(b * c + a * s);
      }
}

void ReferenceBackend::execute(Stream&, const CacheWrite& op) {
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t i = 0; i < op.x.dim(1); ++i) {
      const std::int64_t to = (op.pos0 + t) * op.cache.stride(0) + i;
      if (op.cache.dtype == DType::F32)
        op.cache.f32()[to] = at(op.x, t, i);
      else
        op.cache.u16()[to] = f32_to_f16(at(op.x, t, i));
    }
}

void ReferenceBackend::execute(Stream&, const Attention& op) {
  const std::int64_t head_dim = op.q.dim(2), heads_per_kv = op.q.dim(1) / op.k.dim(1);
  for (std::int64_t t = 0; t < op.q.dim(0); ++t)
    for (std::int64_t h = 0; h < op.q.dim(1); ++h) {
      const std::int64_t kv = h / heads_per_kv, last = op.pos0 + t;
      const std::int64_t first = op.window == 0 ? 0 : std::max<std::int64_t>(0, last - op.window + 1);
      std::vector<double> p;
      double top = op.sinks.empty() ? -HUGE_VAL : static_cast<double>(at(op.sinks, h));
      for (std::int64_t j = first; j <= last; ++j) {
        double s = 0.0;
        for (std::int64_t i = 0; i < head_dim; ++i)
          s += static_cast<double>(at(op.q, t, h, i)) * cached(op.k, j, kv, i);
        p.push_back(s * static_cast<double>(op.scale));
        top = std::max(top, p.back());
      }
      double sum = op.sinks.empty() ? 0.0 : std::exp(static_cast<double>(at(op.sinks, h)) - top);
      for (double& s : p) sum += s = std::exp(s - top);
      for (std::int64_t i = 0; i < op.v.dim(2); ++i) {
        double y = 0.0;
        for (std::int64_t j = first; j <= last; ++j)
          y += p[static_cast<std::size_t>(j - first)] * cached(op.v, j, kv, i);
        at(op.y, t, h, i) = static_cast<float>(y / sum);
      }
    }
}

}  // namespace moeflux::backend
