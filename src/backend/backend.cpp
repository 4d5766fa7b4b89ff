#include "backend/backend.h"

namespace moeflux::backend {

void Backend::execute(Stream& stream, const AddRmsNorm& op) {
  execute(stream, Add{op.h, op.delta, op.h});
  execute(stream, RmsNorm{op.h, op.weight, op.y, op.eps});
}

void Backend::execute(Stream& stream, const HeadMatMul& op) {
  const std::int64_t n_tokens = op.x.dim(0), n = op.rows_per_head(), k = op.w.cols, passed = op.n_passed();
  const auto part_of = [&](const TensorView& v, std::int64_t head, std::int64_t first, std::int64_t width) {
    TensorView part = view_f32(v.f32() + head * v.stride(1) + first, {n_tokens, width});
    part.strides[0] = v.stride(0);
    return part;
  };
  for (std::int64_t h = 0; h < op.x.dim(1); ++h) {
    const MatMulPart part{op.w.slice_rows(h * n, n), {}, part_of(op.y, h, 0, n)};
    execute(stream, MatMul{part_of(op.x, h, 0, k), {&part, 1}, Precision::Exact});
    if (passed > 0) execute(stream, CacheWrite{part_of(op.x, h, k, passed), part_of(op.y, h, n, passed), 0});
  }
}

}  // namespace moeflux::backend
