// Grouped-query attention with optional q/k norm, biases, clipping, partial rotation, window, sinks and output gate.
#include "model/blocks/blocks.h"

namespace moeflux::model {
namespace {

// Per head [query | gate]: a view of one half of each.
TensorView head_part(const TensorView& q, std::int64_t n_heads, std::int64_t head_dim, std::int64_t per_head, std::int64_t offset) {
  TensorView v = view_f32(q.f32() + offset, {q.dim(0), n_heads, head_dim});
  v.strides = {n_heads * per_head, per_head, 1, 0};
  return v;
}

}  // namespace

GqaScratch::GqaScratch(Arena& a, const GqaSpec& s, std::int64_t n, std::int64_t d)
    : q(a.f32({n, s.q_dim()})),
      k(a.f32({n, s.kv_dim()})),
      v(a.f32({n, s.kv_dim()})),
      heads(a.f32({n, s.n_heads, s.head_dim})),
      y(a.f32({n, d})) {}

TensorView attention_gqa(Context& c, const GqaSpec& spec, const GqaWeights& w, const RopeWeights& rope, const LayerState& state,
                         const TensorView& x, std::int64_t pos0, float norm_eps) {
  const std::int64_t n = x.dim(0), hd = spec.head_dim;
  const GqaScratch s(c.arena, spec, n, x.dim(1));
  const backend::MatMulPart parts[] = {{w.q, w.q_bias, s.q}, {w.k, w.k_bias, s.k}, {w.v, w.v_bias, s.v}};
  c.run(backend::MatMul{x, parts, c.precision});

  const std::int64_t per_head = spec.output_gate ? 2 * hd : hd;
  const TensorView q = head_part(s.q, spec.n_heads, hd, per_head, 0);
  const TensorView k = head_part(s.k, spec.n_kv_heads, hd, hd, 0);
  if (spec.qk_norm == QkNorm::Whole) {
    c.run(backend::RmsNorm{s.q, w.q_norm, s.q, norm_eps});
    c.run(backend::RmsNorm{s.k, w.k_norm, s.k, norm_eps});
  } else if (spec.qk_norm == QkNorm::PerHead && spec.clip > 0.0f) {
    c.run(backend::RmsNorm{q, w.q_norm, q, norm_eps});
    c.run(backend::RmsNorm{k, w.k_norm, k, norm_eps});
  }
  if (spec.clip > 0.0f)
    for (const TensorView& part : {s.q, s.k, s.v}) c.run(backend::Clamp{part, part, spec.clip});
  const bool by_head = spec.qk_norm == QkNorm::PerHead && spec.clip == 0.0f;
  const auto flat = [&](const TensorView& cache) { return make_view(cache.data, cache.dtype, {cache.dim(0), spec.kv_dim()}); };
  c.run_sequence(backend::HeadInputs{.q_norm = {q, by_head ? w.q_norm : TensorView{}, q, norm_eps},
                                     .k_norm = {k, by_head ? w.k_norm : TensorView{}, k, norm_eps},
                                     .q_rope = {q, rope.inv_freq, pos0, rope.style, rope.magnitude},
                                     .k_rope = {k, rope.inv_freq, pos0, rope.style, rope.magnitude},
                                     .k = {s.k, flat(state.k), pos0},
                                     .v = {s.v, flat(state.v), pos0}});
  c.run(backend::Attention{q, state.k, state.v, w.sinks, s.heads, pos0, spec.window, spec.scale});
  if (spec.output_gate) c.run(backend::SigmoidGate{s.heads, head_part(s.q, spec.n_heads, hd, per_head, hd), s.heads});
  const backend::MatMulPart out{w.o, w.o_bias, s.y};
  c.run(backend::MatMul{view_f32(s.heads.f32(), {n, spec.n_heads * hd}), {&out, 1}, c.precision});
  return s.y;
}

}  // namespace moeflux::model
