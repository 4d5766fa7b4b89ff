// Embed, Add, norms, gates, rope, cache writes: row by row.
#include <algorithm>
#include <cstring>

#include "backend/cpu/cpu_internal.h"
#include "core/float_bits.h"
#include "core/scalar_math.h"

namespace moeflux::backend::cpu {
namespace {

// Calls fn(row) for every row, on the pool when there is enough of it.
template <class F>
void for_rows(ThreadPool& pool, std::int64_t rows, std::int64_t width, const F& fn) noexcept {
  if (rows * width <= kInlineElements) {
    for (std::int64_t i = 0; i < rows; ++i) fn(i);
    return;
  }
  const std::int64_t per_task = std::max<std::int64_t>(1, kInlineElements / std::max<std::int64_t>(width, 1));
  pool.run((rows + per_task - 1) / per_task, [&](std::int64_t task, int) noexcept {
    const std::int64_t end = std::min(rows, (task + 1) * per_task);
    for (std::int64_t i = task * per_task; i < end; ++i) fn(i);
  });
}

}  // namespace

void CpuBackend::execute(Stream& stream, const Embed& op) {
  auto& s = static_cast<CpuStream&>(stream);
  std::byte* scratch = s.activations.get(matmul_scratch_bytes(op.table.cols));
  for (std::int64_t t = 0; t < op.y.dim(0); ++t)
    k_.decode_row(op.table, op.tokens[static_cast<std::size_t>(t)], op.y.row(t), scratch);
}

void CpuBackend::execute(Stream&, const Add& op) {
  for_rows(pool_, op.y.dim(0), op.y.dim(1), [&](std::int64_t t) noexcept { k_.add(op.a.row(t), op.b.row(t), op.y.row(t), op.y.dim(1)); });
}

void CpuBackend::execute(Stream&, const RmsNorm& op) {
  const std::int64_t d = op.weight.dim(0);
  for_rows(pool_, n_rows(op.x), d, [&](std::int64_t i) noexcept {
    k_.rms_norm(head_row(op.x, i), op.weight.f32(), head_row(op.y, i), d, op.eps);
  });
}

void CpuBackend::execute(Stream&, const AddRmsNorm& op) {
  const std::int64_t d = op.weight.dim(0);
  for_rows(pool_, op.h.dim(0), d, [&](std::int64_t t) noexcept {
    k_.add(op.h.row(t), op.delta.row(t), op.h.row(t), d);
    k_.rms_norm(op.h.row(t), op.weight.f32(), op.y.row(t), d, op.eps);
  });
}

void CpuBackend::execute(Stream&, const GatedRmsNorm& op) {
  const std::int64_t d = op.weight.dim(0);
  for_rows(pool_, n_rows(op.x), d, [&](std::int64_t i) noexcept {
    k_.gated_rms_norm(head_row(op.x, i), head_row(op.gate, i), op.weight.f32(), head_row(op.y, i), d, op.eps);
  });
}

void CpuBackend::execute(Stream&, const L2Norm& op) {
  const std::int64_t d = op.x.dim(2);
  for_rows(pool_, n_rows(op.x), d, [&](std::int64_t i) noexcept {
    k_.l2_norm(head_row(op.x, i), head_row(op.y, i), d, op.eps, op.scale);
  });
}

void CpuBackend::execute(Stream&, const Clamp& op) {
  const std::int64_t d = op.x.dim(1);
  for_rows(pool_, op.x.dim(0), d, [&](std::int64_t t) noexcept {
    const float* x = op.x.row(t);
    float* y = op.y.row(t);
    for (std::int64_t i = 0; i < d; ++i) {
      const float low = x[i] < -op.limit ? -op.limit : x[i];
      y[i] = low > op.limit ? op.limit : low;
    }
  });
}

void CpuBackend::execute(Stream&, const SigmoidGate& op) {
  const std::int64_t d = op.x.dim(2);
  for_rows(pool_, n_rows(op.x), d, [&](std::int64_t i) noexcept {
    k_.sigmoid_gate(head_row(op.x, i), head_row(op.gate, i), head_row(op.y, i), d);
  });
}

void CpuBackend::execute(Stream&, const Glu& op) {
  const std::int64_t d = op.y.dim(1);
  for_rows(pool_, op.y.dim(0), d, [&](std::int64_t t) noexcept {
    if (op.kind == GluKind::Silu)
      k_.silu_glu(op.gate.row(t), op.up.row(t), op.y.row(t), d);
    else
      k_.clamped_glu(op.gate.row(t), op.up.row(t), op.y.row(t), d, op.limit, op.alpha);
  });
}

void CpuBackend::execute(Stream& stream, const Rope& op) {
  const std::int64_t n_tokens = op.x.dim(0), n_heads = op.x.dim(1), half = op.inv_freq.dim(0);
  auto& s = static_cast<CpuStream&>(stream);
  auto* table = reinterpret_cast<float*>(s.activations.get(static_cast<std::size_t>(n_tokens * half) * 8));
  const auto rotate = [&](std::int64_t t) noexcept {
    float* cs = table + t * half * 2;
    for (std::int64_t i = 0; i < half; ++i) {
      const math::SinCos v = math::sincos(static_cast<float>(op.pos0 + t) * op.inv_freq.f32()[i]);
      cs[i] = v.cos * op.magnitude;
      cs[half + i] = v.sin * op.magnitude;
    }
    const bool split = op.style == RopeStyle::HalfSplit;
    for (std::int64_t h = 0; h < n_heads; ++h) {
      float* x = op.x.f32() + t * op.x.stride(0) + h * op.x.stride(1);
      for (std::int64_t i = 0; i < half; ++i) {
        float& a = x[split ? i : 2 * i];
        float& b = x[split ? i + half : 2 * i + 1];
        const float c = cs[i], sn = cs[half + i], a0 = a, b0 = b;
        a = math::fma(a0, c, -(b0 * sn));
        b = math::fma(b0, c, a0 * sn);
      }
    }
  };
  for_rows(pool_, n_tokens, half * (n_heads + 8), rotate);
}

void CpuBackend::execute(Stream&, const CacheWrite& op) {
  const std::int64_t width = op.x.dim(1);
  for_rows(pool_, op.x.dim(0), width, [&](std::int64_t t) noexcept {
    const float* x = op.x.row(t);
    const std::int64_t at = (op.pos0 + t) * op.cache.stride(0);
    if (op.cache.dtype == DType::F32) {
      std::memcpy(op.cache.f32() + at, x, static_cast<std::size_t>(width) * 4);
    } else {
      std::uint16_t* out = op.cache.u16() + at;
      for (std::int64_t i = 0; i < width; ++i) out[i] = f32_to_f16(x[i]);
    }
  });
}

}  // namespace moeflux::backend::cpu
