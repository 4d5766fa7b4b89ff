// The delta-net layer: convolution, gates, recurrence.
#include <cmath>

#include "backend/reference/reference_impl.h"

namespace moeflux::backend {

using reference::at;

void ReferenceBackend::execute(Stream&, const CausalConv& op) {
  const std::int64_t n_before = op.w.dim(1) - 1, n_tokens = op.u.dim(0);
  for (std::int64_t c = 0; c < op.u.dim(1); ++c) {
    std::vector<float> inputs;  // what came before, then this call's
    for (std::int64_t t = 0; t < n_before; ++t) inputs.push_back(at(op.state, t, c));
    for (std::int64_t t = 0; t < n_tokens; ++t) inputs.push_back(at(op.u, t, c));
    for (std::int64_t t = 0; t < n_tokens; ++t) {
      double sum = 0.0;
      for (std::int64_t j = 0; j <= n_before; ++j)
        sum += static_cast<double>(at(op.w, c, j)) *
               static_cast<double>(inputs[static_cast<std::size_t>(t + j)]);
      at(op.y, t, c) = static_cast<float>(reference::silu(sum));
    }
    for (std::int64_t t = 0; t < n_before; ++t)
      at(op.state, t, c) = inputs[static_cast<std::size_t>(n_tokens + t)];
  }
}

void ReferenceBackend::execute(Stream&, const DeltaGates& op) {
  for (std::int64_t t = 0; t < op.a.dim(0); ++t)
    for (std::int64_t h = 0; h < op.a.dim(1); ++h) {
      const double x = static_cast<double>(at(op.a, t, h)) + static_cast<double>(at(op.dt_bias, h));
      const double softplus = x > 0.0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
      at(op.decay, t, h) = static_cast<float>(std::exp(static_cast<double>(at(op.neg_exp_a, h)) * softplus));
      at(op.beta, t, h) = static_cast<float>(reference::sigmoid(static_cast<double>(at(op.b, t, h))));
    }
}

void ReferenceBackend::execute(Stream&, const GatedDelta& op) {
  const std::int64_t key_dim = op.q.dim(2);
  for (std::int64_t h = 0; h < op.v.dim(1); ++h) {
    const std::int64_t kh = op.k_head_of(h);
    for (std::int64_t c = 0; c < op.v.dim(2); ++c) {
      float* stored = &at(op.state, h, c, 0);
      std::vector<double> state(stored, stored + key_dim);
      for (std::int64_t t = 0; t < op.v.dim(0); ++t) {
        double m = 0.0, y = 0.0;
        for (std::int64_t i = 0; i < key_dim; ++i) {
          double& s = state[static_cast<std::size_t>(i)];
          s *= static_cast<double>(at(op.decay, t, h));
          m += static_cast<double>(at(op.k, t, kh, i)) * s;
        }
        const double d =
            static_cast<double>(at(op.beta, t, h)) * (static_cast<double>(at(op.v, t, h, c)) - m);
        for (std::int64_t i = 0; i < key_dim; ++i) {
          double& s = state[static_cast<std::size_t>(i)];
          s += static_cast<double>(at(op.k, t, kh, i)) * d;
          y += static_cast<double>(at(op.q, t, kh, i)) * s;
        }
        at(op.y, t, h, c) = static_cast<float>(y);
      }
      for (std::int64_t i = 0; i < key_dim; ++i)
        stored[i] = static_cast<float>(state[static_cast<std::size_t>(i)]);
    }
  }
}

}  // namespace moeflux::backend
