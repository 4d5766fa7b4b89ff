// Dense feed-forward, and the head.
#include "model/blocks/blocks.h"

namespace moeflux::model {

DenseScratch::DenseScratch(Arena& a, std::int64_t n, std::int64_t d) : y(a.f32({n, d})) {}

void dense_ffn(Context& c, const FfnWeights& w, const TensorView& x, const TensorView& h) {
  const DenseScratch s(c.arena, x.dim(0), x.dim(1));
  const auto rows = all_rows(c.moe, x.dim(0));
  const backend::ExpertWork work{backend::FfnMatrices{w.gate, w.up, w.down, {}, {}, {}}, rows, rows};
  c.run(backend::ExpertFfn{x, {&work, 1}, s.y, backend::GluKind::Silu, 0.0f, 0.0f, c.precision});
  c.run(backend::Add{h, s.y, h});
}

void head(Context& c, const quant::MatrixView& w, const TensorView& x, const TensorView& logits) { c.matmul(x, w, logits, c.precision); }

}  // namespace moeflux::model
