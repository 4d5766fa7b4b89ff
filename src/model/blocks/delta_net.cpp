// Gated DeltaNet: the recurrence itself in prefill and decode, so both give the same bytes.
#include <cmath>

#include "model/blocks/blocks.h"

namespace moeflux::model {
namespace {

// Heads that lie at `offset` in rows of `width` values.
TensorView heads_at(const TensorView& rows, std::int64_t width, std::int64_t offset, std::int64_t n_heads, std::int64_t dim) {
  TensorView v = view_f32(rows.f32() + offset, {rows.dim(0), n_heads, dim});
  v.strides = {width, dim, 1, 0};
  return v;
}

}  // namespace

GatedDeltaScratch::GatedDeltaScratch(Arena& m, const GatedDeltaSpec& s, std::int64_t n, std::int64_t d)
    : qkv(m.f32({n, s.conv_width()})),
      conv(m.f32({n, s.conv_width()})),
      z(m.f32({n, s.value_width()})),
      b(m.f32({n, s.n_v_heads})),
      a(m.f32({n, s.n_v_heads})),
      decay(m.f32({n, s.n_v_heads})),
      beta(m.f32({n, s.n_v_heads})),
      heads(m.f32({n, s.n_v_heads, s.v_dim})),
      y(m.f32({n, d})) {}

TensorView delta_net(Context& c, const GatedDeltaSpec& spec, const GatedDeltaWeights& w, const LayerState& state, const TensorView& x,
                     float norm_eps) {
  const std::int64_t n = x.dim(0), width = spec.conv_width();
  const GatedDeltaScratch s(c.arena, spec, n, x.dim(1));
  const backend::MatMulPart parts[] = {{w.qkv, {}, s.qkv}, {w.z, {}, s.z}, {w.b, {}, s.b}, {w.a, {}, s.a}};
  c.run(backend::MatMul{x, parts, c.precision});
  const TensorView q = heads_at(s.conv, width, 0, spec.n_k_heads, spec.k_dim);
  const TensorView k = heads_at(s.conv, width, spec.key_width(), spec.n_k_heads, spec.k_dim);
  const TensorView v = heads_at(s.conv, width, 2 * spec.key_width(), spec.n_v_heads, spec.v_dim);
  const TensorView gate = heads_at(s.z, spec.value_width(), 0, spec.n_v_heads, spec.v_dim);
  const auto q_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.k_dim)));
  c.run_sequence(backend::DeltaMix{.conv = {s.qkv, view_f32(w.conv.f32(), {width, spec.n_taps}), state.conv, s.conv},
                                   .q_norm = {q, q, spec.l2_eps, q_scale},
                                   .k_norm = {k, k, spec.l2_eps, 1.0f},
                                   .gates = {s.a, s.b, w.neg_exp_a, w.dt_bias, s.decay, s.beta},
                                   .delta = {q, k, v, s.decay, s.beta, state.delta, s.heads},
                                   .norm = {s.heads, gate, w.norm, s.heads, norm_eps}});
  c.matmul(view_f32(s.heads.f32(), {n, spec.value_width()}), w.out, s.y, c.precision);
  return s.y;
}

}  // namespace moeflux::model
