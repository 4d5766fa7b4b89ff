// HeadMatMul: a small matrix per head.
#include <algorithm>

#include "backend/cpu/cpu_internal.h"

namespace moeflux::backend::cpu {

// A head is a task: its matrix is decoded once and meets all tokens.
void CpuBackend::execute(Stream& stream, const HeadMatMul& op) {
  auto& s = static_cast<CpuStream&>(stream);
  const std::int64_t n = op.x.dim(0), n_in = op.n_inputs(), n_out = op.n_outputs(), passed = op.n_passed();
  const std::int64_t rows = op.w.rows / op.x.dim(1);
  for (Scratch& w : s.workers) w.get(head_matmul_scratch_bytes(n_in, n_out));
  pool_.run(op.x.dim(1), [&](std::int64_t h, int worker) noexcept {
    const float* x = op.x.f32() + h * op.x.stride(1);
    float* y = op.y.f32() + h * op.y.stride(1);
    k_.head_matmul({op.w.slice_rows(h * rows, rows), op.inputs_first, n_in, n_out, x, op.x.stride(0), y, op.y.stride(0), n,
                    s.workers[static_cast<std::size_t>(worker)].get(0)});
    for (std::int64_t t = 0; t < n; ++t) std::copy_n(x + t * op.x.stride(0) + n_in, passed, y + t * op.y.stride(0) + n_out);
  });
}

}  // namespace moeflux::backend::cpu
