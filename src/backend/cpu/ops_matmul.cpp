// MatMul and ExpertFfn: quantize activations once, then blocks of rows over the pool.
#include <algorithm>
#include <span>

#include "backend/cpu/cpu_internal.h"
#include "core/checked.h"

namespace moeflux::backend::cpu {
namespace {

// Rows a task computes: enough bytes to pay for the hand-out, few enough to balance.
constexpr std::int64_t kRowsPerTask = 16;

// One activation quantization shared by all matrices of the same group size.
struct QuantizedSet {
  std::int64_t group = 0;
  QuantizedRows rows;
};

std::size_t quantized_bytes(std::int64_t n, std::int64_t cols, std::int64_t group) {
  const auto count = static_cast<std::size_t>(n), c = static_cast<std::size_t>(cols), g = static_cast<std::size_t>(cols / group);
  return round_up(count * c, 64) + round_up(count * g * 4, 64) * 2;
}

// Lays out x8, d, sx at `memory` and fills them row by row; row i is x_of(i).
template <class RowOf>
QuantizedRows quantize(const KernelTable& k, ThreadPool& pool, std::byte* memory, std::int64_t n, std::int64_t cols,
                       std::int64_t group, const RowOf& x_of) {
  const auto count = static_cast<std::size_t>(n), groups = static_cast<std::size_t>(cols / group);
  auto* x8 = reinterpret_cast<std::int8_t*>(memory);
  auto* d = reinterpret_cast<float*>(memory + round_up(count * static_cast<std::size_t>(cols), 64));
  auto* sx = reinterpret_cast<std::int32_t*>(reinterpret_cast<std::byte*>(d) + round_up(count * groups * 4, 64));
  const auto row = [&](std::int64_t i, int) noexcept {
    k.quantize_row(x_of(i), cols, group, x8 + i * cols, d + i * (cols / group), sx + i * (cols / group));
  };
  if (n * cols <= kInlineElements)
    for (std::int64_t i = 0; i < n; ++i) row(i, 0);
  else
    pool.run(n, row);
  return {x8, d, sx};
}

bool is_fast(const quant::MatrixView& w, Precision p) noexcept { return p == Precision::Fast && w.format.integer_codes(); }

MatMulFn kernel_for(const KernelTable& k, const quant::MatrixView& w, Precision p) noexcept {
  const auto slot = static_cast<std::size_t>(format_slot(w.format));
  return is_fast(w, p) ? k.fast[slot] : k.exact[slot];
}

// A block of rows of one matrix: what a task runs.
struct RowTask {
  const MatMulBlock* block;
  MatMulFn fn;
  std::int64_t begin, end;
};

// Group sizes in use (32, 64, 128), each quantized once.
constexpr std::int64_t kGroups[] = {32, 64, 128};

template <class RowOf>
void quantize_sets(const KernelTable& k, ThreadPool& pool, Scratch& scratch, std::span<const bool, 3> needed,
                   std::int64_t n, std::int64_t cols, const RowOf& x_of, QuantizedRows (&out)[3]) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < 3; ++i)
    if (needed[i]) total += quantized_bytes(n, cols, kGroups[i]);
  std::byte* at = scratch.get(total);
  for (std::size_t i = 0; i < 3; ++i) {
    if (!needed[i]) continue;
    out[i] = quantize(k, pool, at, n, cols, kGroups[i], x_of);
    at += quantized_bytes(n, cols, kGroups[i]);
  }
}

std::size_t group_slot(const quant::MatrixView& w) noexcept { return w.format.group == 32 ? 0u : w.format.group == 64 ? 1u : 2u; }

void run_tasks(ThreadPool& pool, CpuStream& s, std::span<const RowTask> tasks, std::int64_t max_cols) {
  for (Scratch& w : s.workers) w.get(matmul_scratch_bytes(max_cols));
  pool.run(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i, int worker) noexcept {
    const RowTask& t = tasks[static_cast<std::size_t>(i)];
    MatMulBlock b = *t.block;
    b.scratch = s.workers[static_cast<std::size_t>(worker)].get(0);
    t.fn(b, t.begin, t.end);
  });
}

std::int64_t n_row_tasks(std::int64_t rows) noexcept { return (rows + kRowsPerTask - 1) / kRowsPerTask; }

RowTask* append_tasks(RowTask* out, const MatMulBlock* block, MatMulFn fn) noexcept {
  for (std::int64_t r = 0; r < block->w.rows; r += kRowsPerTask)
    *out++ = {block, fn, r, std::min(block->w.rows, r + kRowsPerTask)};
  return out;
}

}  // namespace

void CpuBackend::execute(Stream& stream, const MatMul& op) {
  auto& s = static_cast<CpuStream&>(stream);
  const std::int64_t n = op.x.dim(0), cols = op.x.dim(1);
  bool needed[3] = {};
  std::int64_t n_tasks = 0;
  for (const MatMulPart& p : op.parts) {
    if (is_fast(p.w, op.precision)) needed[group_slot(p.w)] = true;
    n_tasks += n_row_tasks(p.w.rows);
  }
  QuantizedRows xq[3];
  quantize_sets(k_, pool_, s.activations, needed, n, cols, [&](std::int64_t t) noexcept { return op.x.row(t); }, xq);

  const std::size_t block_bytes = round_up(op.parts.size() * sizeof(MatMulBlock), 64);
  std::byte* memory = s.tables.get(block_bytes + static_cast<std::size_t>(n_tasks) * sizeof(RowTask));
  auto* blocks = reinterpret_cast<MatMulBlock*>(memory);
  auto* tasks = reinterpret_cast<RowTask*>(memory + block_bytes);
  RowTask* end = tasks;
  for (std::size_t i = 0; i < op.parts.size(); ++i) {
    const MatMulPart& p = op.parts[i];
    blocks[i] = {p.w, op.x.f32(), op.x.stride(0), {}, p.bias.empty() ? nullptr : p.bias.f32(), p.y.f32(), p.y.stride(0), n, nullptr};
    if (is_fast(p.w, op.precision)) blocks[i].xq = xq[group_slot(p.w)];
    end = append_tasks(end, &blocks[i], kernel_for(k_, p.w, op.precision));
  }
  run_tasks(pool_, s, {tasks, end}, cols);
}

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

namespace {

// Where one work's rows lie among the packed rows of all works.
struct WorkPlan {
  std::int64_t first = 0, n = 0;
};

}  // namespace

// Rows are gathered per work so that each expert multiplies all of its tokens at once; the intermediate of
// every row is its own, and results go straight to their slots after the last matrix.
void CpuBackend::execute(Stream& stream, const ExpertFfn& op) {
  auto& s = static_cast<CpuStream&>(stream);
  const std::int64_t cols = op.x.dim(1);
  std::int64_t total = 0, max_inner = 0, n_tasks = 0;
  bool need_in[3] = {}, need_mid[3] = {};
  for (const ExpertWork& w : op.works) {
    total += static_cast<std::int64_t>(w.rows.size());
    max_inner = std::max(max_inner, w.m.gate.rows);
    n_tasks += std::max(2 * n_row_tasks(w.m.gate.rows), n_row_tasks(w.m.down.rows));
    for (const quant::MatrixView* m : {&w.m.gate, &w.m.up})
      if (is_fast(*m, op.precision)) need_in[group_slot(*m)] = true;
    if (is_fast(w.m.down, op.precision)) need_mid[group_slot(w.m.down)] = true;
  }
  if (total == 0) return;

  const auto rows = static_cast<std::size_t>(total);
  const std::size_t in_bytes = round_up(rows * static_cast<std::size_t>(cols) * 4, 64);
  const std::size_t mid_bytes = round_up(rows * static_cast<std::size_t>(max_inner) * 4, 64);
  std::byte* memory = s.partials.get(2 * in_bytes + 2 * mid_bytes);
  auto* x = reinterpret_cast<float*>(memory);
  auto* out = reinterpret_cast<float*>(memory + in_bytes);
  auto* gate = reinterpret_cast<float*>(memory + 2 * in_bytes);
  auto* up = reinterpret_cast<float*>(memory + 2 * in_bytes + mid_bytes);

  const std::size_t n_works = op.works.size();
  const std::size_t plan_bytes = round_up(n_works * sizeof(WorkPlan), 64);
  const std::size_t block_bytes = round_up(2 * n_works * sizeof(MatMulBlock), 64);
  std::byte* lists = s.tables.get(plan_bytes + block_bytes + static_cast<std::size_t>(n_tasks) * sizeof(RowTask));
  auto* plan = reinterpret_cast<WorkPlan*>(lists);
  auto* blocks = reinterpret_cast<MatMulBlock*>(lists + plan_bytes);
  auto* tasks = reinterpret_cast<RowTask*>(lists + plan_bytes + block_bytes);

  std::int64_t at = 0;
  for (std::size_t i = 0; i < n_works; ++i) {
    plan[i] = {at, static_cast<std::int64_t>(op.works[i].rows.size())};
    for (std::int32_t row : op.works[i].rows) std::copy_n(op.x.row(row), cols, x + at++ * cols);
  }

  const auto bias_of = [](const TensorView& b) { return b.empty() ? nullptr : b.f32(); };
  QuantizedRows xq[3];
  quantize_sets(k_, pool_, s.activations, need_in, total, cols, [&](std::int64_t i) noexcept { return x + i * cols; }, xq);
  const auto offset = [](QuantizedRows q, std::int64_t row, const quant::MatrixView& w) {
    const std::int64_t groups = w.cols / w.format.group;
    return QuantizedRows{q.x8 + row * w.cols, q.d + row * groups, q.sx + row * groups};
  };
  RowTask* end = tasks;
  for (std::size_t i = 0; i < n_works; ++i) {
    const FfnMatrices& m = op.works[i].m;
    if (plan[i].n == 0) continue;
    for (int part = 0; part < 2; ++part) {
      const quant::MatrixView& w = part == 0 ? m.gate : m.up;
      MatMulBlock& b = blocks[2 * i + static_cast<std::size_t>(part)];
      b = {w, x + plan[i].first * cols, cols, {}, bias_of(part == 0 ? m.gate_bias : m.up_bias),
           (part == 0 ? gate : up) + plan[i].first * max_inner, max_inner, plan[i].n, nullptr};
      if (is_fast(w, op.precision)) b.xq = offset(xq[group_slot(w)], plan[i].first, w);
      end = append_tasks(end, &b, kernel_for(k_, w, op.precision));
    }
  }
  run_tasks(pool_, s, {tasks, end}, cols);

  // All experts of an op share their inner width, so rows of `gate` are max_inner apart and full.
  pool_.run(total, [&](std::int64_t i, int) noexcept {
    float* g = gate + i * max_inner;
    if (op.glu == GluKind::Silu)
      k_.silu_glu(g, up + i * max_inner, g, max_inner);
    else
      k_.clamped_glu(g, up + i * max_inner, g, max_inner, op.limit, op.alpha);
  });

  QuantizedRows mq[3];
  quantize_sets(k_, pool_, s.activations, need_mid, total, max_inner, [&](std::int64_t i) noexcept { return gate + i * max_inner; }, mq);
  end = tasks;
  for (std::size_t i = 0; i < n_works; ++i) {
    const FfnMatrices& m = op.works[i].m;
    if (plan[i].n == 0) continue;
    MatMulBlock& b = blocks[2 * i];
    b = {m.down, gate + plan[i].first * max_inner, max_inner, {}, bias_of(m.down_bias), out + plan[i].first * cols, cols, plan[i].n, nullptr};
    if (is_fast(m.down, op.precision)) b.xq = offset(mq[group_slot(m.down)], plan[i].first, m.down);
    end = append_tasks(end, &b, kernel_for(k_, m.down, op.precision));
  }
  run_tasks(pool_, s, {tasks, end}, max_inner);
  for (std::size_t i = 0; i < n_works; ++i)
    for (std::int64_t r = 0; r < plan[i].n; ++r)
      std::copy_n(out + (plan[i].first + r) * cols, cols, op.y.row(op.works[i].slots[static_cast<std::size_t>(r)]));
}

}  // namespace moeflux::backend::cpu
