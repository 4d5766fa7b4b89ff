// Multi-head latent attention in its absorbed form, in prefill and decode alike: every head's query is taken to the latent
// space, all heads attend to one shared key per position, and the latent result is taken back to the head's values.
#include "model/blocks/blocks.h"

namespace moeflux::model {
namespace {

// Values [first, first + width) of every head.
TensorView part_of_heads(const TensorView& heads, std::int64_t first, std::int64_t width) {
  TensorView v = heads;
  v.data = heads.f32() + first;
  v.dims[2] = width;
  return v;
}

}  // namespace

MlaScratch::MlaScratch(Arena& a, const MlaSpec& s, std::int64_t n, std::int64_t d)
    : q(a.f32({n, s.n_heads, s.nope_dim + s.rope_dim})),
      kv(a.f32({n, s.cache_dim()})),
      absorbed(a.f32({n, s.n_heads, s.cache_dim()})),
      latent(a.f32({n, s.n_heads, s.kv_rank})),
      heads(a.f32({n, s.n_heads, s.v_dim})),
      y(a.f32({n, d})) {
  if (s.q_rank > 0) q_latent = a.f32({n, s.q_rank});
}

TensorView attention_mla(Context& c, const MlaSpec& spec, const MlaWeights& w, const RopeWeights& rope, const LayerState& state,
                         const TensorView& x, std::int64_t pos0) {
  const std::int64_t n = x.dim(0);
  const MlaScratch s(c.arena, spec, n, x.dim(1));
  const TensorView q_rows = view_f32(s.q.f32(), {n, spec.q_dim()});
  const bool two_steps = spec.q_rank > 0;
  const backend::MatMulPart parts[] = {{two_steps ? w.q_a : w.q, {}, two_steps ? s.q_latent : q_rows}, {w.kv_a, {}, s.kv}};
  c.run(backend::MatMul{x, parts, c.precision});
  if (two_steps) {
    c.run(backend::RmsNorm{s.q_latent, w.q_norm, s.q_latent, spec.latent_eps});
    c.matmul(s.q_latent, w.q, q_rows, c.precision);
  }

  const TensorView row = view_f32(s.kv.f32(), {n, 1, spec.cache_dim()});
  const TensorView latent_key = part_of_heads(row, 0, spec.kv_rank);
  c.run(backend::RmsNorm{latent_key, w.kv_norm, latent_key, spec.latent_eps});
  if (!rope.inv_freq.empty()) {
    c.run(backend::Rope{part_of_heads(s.q, spec.nope_dim, spec.rope_dim), rope.inv_freq, pos0, rope.style, rope.magnitude});
    c.run(backend::Rope{part_of_heads(row, spec.kv_rank, spec.rope_dim), rope.inv_freq, pos0, rope.style, rope.magnitude});
  }
  c.run(backend::CacheWrite{s.kv, make_view(state.k.data, state.k.dtype, {state.k.dim(0), spec.cache_dim()}), pos0});

  // Files have the key matrices in either orientation; the rotated part of the query goes along.
  const bool inputs_first = w.embed_q.empty();
  c.run(backend::HeadMatMul{s.q, inputs_first ? w.k_b : w.embed_q, s.absorbed, inputs_first});
  c.run(backend::Attention{s.absorbed, state.k, state.v, {}, s.latent, pos0, 0, spec.scale, c.precision});
  c.run(backend::HeadMatMul{s.latent, w.v_b, s.heads, false});
  c.matmul(view_f32(s.heads.f32(), {n, spec.out_dim()}), w.o, s.y, c.precision);
  return s.y;
}

}  // namespace moeflux::model
