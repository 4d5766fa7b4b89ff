// ExpertFfn: two fork-joins. The first computes gate, up and their product for slices of the inner width and
// quantizes them where they are; the second the last matrices, straight into the slots.
// One or few tokens: most experts are one thread's from the first matrix to the last, read from memory in one go; only the
// rest, where threads end at different times, is cut that way.
#include <atomic>
#include <new>

#include "backend/cpu/matmul_plan.h"

namespace moeflux::backend::cpu {
namespace {

// Inner columns of a task of the first half: whole groups of the last matrix, so that each is one task's own; long enough that
// where a matrix begins and ends counts little. Parts of groups, whole tiles of rows, only where threads would be without work.
constexpr std::int64_t kMostInnerPerTask = 256, kLeastInnerPerTask = 64, kTasksPerThread = 4;
constexpr std::int64_t kLeastOfGroup = 16, kLeastTasksPerThread = 2;

std::int64_t inner_per_task(std::int64_t n_works, std::int64_t inner, std::int64_t largest_group, int n_threads) noexcept {
  std::int64_t columns = kMostInnerPerTask;
  const auto too_few = [&](std::int64_t per_thread) { return n_works * ((inner + columns - 1) / columns) < per_thread * n_threads; };
  while (columns / 2 >= std::max(kLeastInnerPerTask, largest_group) && too_few(kTasksPerThread)) columns /= 2;
  while (columns / 2 >= kLeastOfGroup && too_few(kLeastTasksPerThread)) columns /= 2;
  return columns;
}

// Experts that are computed by one thread each, the same number for every thread; at least one is left to be cut.
constexpr std::int64_t kLeastWholePerThread = 2, kMostTokensOfWhole = 4;

std::int64_t whole_works(std::int64_t n_works, std::int64_t n_tokens, int n_threads) noexcept {
  if (n_tokens > kMostTokensOfWhole) return 0;
  const std::int64_t per_thread = (n_works - 1) / n_threads;
  return per_thread < kLeastWholePerThread ? 0 : per_thread * n_threads;
}

struct Work {
  const ExpertWork* w = nullptr;
  std::int64_t first = 0, n = 0, tile = 1;  // its rows among the rows of all works
  const float* x = nullptr;                 // exact: [n, cols]
  QuantizedRows xq[kGroupSizes] = {};       // fast
};

struct Plan {
  const ExpertFfn& op;
  std::int64_t cols = 0, inner = 0, total = 0;
  bool need_in[kGroupSizes] = {}, need_mid[kGroupSizes] = {}, need_f32 = false;
  std::span<Work> works = {};
  QuantizedBuffer mid[kGroupSizes] = {};
  float* gate = nullptr;  // [total, inner], then the product
  float* up = nullptr;
  // Where tasks have parts of groups: columns of each group that are computed, [works, groups]. Who completes one quantizes it.
  std::int64_t largest_group = 1, groups = 0;
  std::atomic<std::int64_t>* done = nullptr;
};

const float* bias_of(const TensorView& b) noexcept { return b.empty() ? nullptr : b.f32(); }

void count(Plan& p, const KernelTable& k) noexcept {
  for (std::size_t i = 0; i < p.works.size(); ++i) {
    const ExpertWork& w = p.op.works[i];
    const auto n = static_cast<std::int64_t>(w.rows.size());
    p.works[i].w = &w;
    p.works[i].first = p.total;
    p.works[i].n = n;
    p.total += n;
    p.inner = std::max(p.inner, w.m.gate.rows);
    for (const quant::MatrixView* m : {&w.m.gate, &w.m.up})
      if (is_fast(*m, p.op.precision))
        p.need_in[group_slot(*m)] = true;
      else
        p.need_f32 = true;
    if (is_fast(w.m.down, p.op.precision)) p.need_mid[group_slot(w.m.down)] = true;
    for (const quant::MatrixView* m : {&w.m.gate, &w.m.up, &w.m.down})
      if (is_fast(*m, p.op.precision)) p.works[i].tile = std::max(p.works[i].tile, tokens_per_tile(k, *m, n));
  }
}

// The input of one work: its only row where it lies, or its rows gathered (and brought side by side).
void gather(const KernelTable& k, const Plan& p, Work& w, const QuantizedBuffer (&tokens)[kGroupSizes],
            const QuantizedBuffer (&packed)[kGroupSizes], float* x) noexcept {
  if (w.n == 0) return;
  const auto rows = w.w->rows;
  if (p.need_f32) {
    w.x = p.op.x.row(rows[0]);
    if (w.n > 1) {
      for (std::int64_t i = 0; i < w.n; ++i)
        std::copy_n(p.op.x.row(rows[static_cast<std::size_t>(i)]), p.cols, x + (w.first + i) * p.cols);
      w.x = x + w.first * p.cols;
    }
  }
  for (std::size_t s = 0; s < kGroupSizes; ++s) {
    if (!p.need_in[s]) continue;
    if (w.n == 1) {
      w.xq[s] = tokens[s].rows(rows[0], 1);
      continue;
    }
    w.xq[s] = packed[s].rows(w.first, w.tile);
    const std::int64_t groups = p.cols / kGroups[s];
    for (std::int64_t t = 0; t < w.n; t += w.tile) {
      const std::int64_t n = std::min(w.tile, w.n - t), at = w.first + t;
      const std::int8_t* x8[kMaxTokenTile];
      const float* d[kMaxTokenTile];
      const std::int32_t* sx[kMaxTokenTile];
      for (std::int64_t i = 0; i < n; ++i) {
        const QuantizedRows q = tokens[s].rows(rows[static_cast<std::size_t>(t + i)], 1);
        x8[i] = q.x8, d[i] = q.d, sx[i] = q.sx;
      }
      if (n > 1) {
        k.interleave(x8, d, sx, n, w.tile, p.cols, groups, packed[s].x8 + at * p.cols, packed[s].d + at * groups,
                     packed[s].sx + at * groups);
      } else {
        std::copy_n(x8[0], p.cols, packed[s].x8 + at * p.cols);
        std::copy_n(d[0], groups, packed[s].d + at * groups);
        std::copy_n(sx[0], groups, packed[s].sx + at * groups);
      }
    }
  }
}

// Whole groups of the inner activation of one work.
void quantize_slice(const KernelTable& k, const Plan& p, const Work& w, std::int64_t c0, std::int64_t c1, std::byte* scratch) noexcept {
  const float* const mid = p.gate + w.first * p.inner + c0;
  for (std::int64_t t = 0; t < w.n; t += w.tile)
    quantize_tile(k, p.mid[group_slot(w.w->m.down)], w.first + t, std::min(w.tile, w.n - t), w.tile, c0, c1, scratch,
                  [&](std::int64_t i) noexcept { return mid + (t + i) * p.inner; });
}

// Columns [c0, c1) of the inner activation of one work, in one group of the last matrix or of whole ones; `then`: where the slice that follows begins.
void inner_slice(const KernelTable& k, const Plan& p, const Work& w, std::int64_t c0, std::int64_t c1, RowsToCome then,
                 std::byte* scratch) noexcept {
  const FfnMatrices& m = w.w->m;
  float* gate = p.gate + w.first * p.inner;
  float* up = p.up + w.first * p.inner;
  for (const bool first : {true, false}) {
    const quant::MatrixView& v = first ? m.gate : m.up;
    MatMulBlock b{
        v,       w.x,     p.cols, {},     bias_of(first ? m.gate_bias : m.up_bias), first ? gate : up,
        p.inner, nullptr, w.n,    scratch};
    if (is_fast(v, p.op.precision)) b.xq = w.xq[group_slot(v)];
    b.then = first ? RowsToCome{&m.up, c0} : then;
    kernel_for(k, v, p.op.precision)(b, c0, c1);
  }
  for (std::int64_t i = 0; i < w.n; ++i) {
    float* g = gate + i * p.inner + c0;
    const float* u = up + i * p.inner + c0;
    p.op.glu == GluKind::Silu ? k.silu_glu(g, u, g, c1 - c0)
                              : k.clamped_glu(g, u, g, c1 - c0, p.op.limit, p.op.alpha);
  }
  if (!is_fast(m.down, p.op.precision)) return;
  if (p.done == nullptr || c1 - c0 >= std::min(p.largest_group, p.inner)) return quantize_slice(k, p, w, c0, c1, scratch);
  const std::int64_t group = c0 / p.largest_group, first = group * p.largest_group, last = std::min(p.inner, first + p.largest_group);
  std::atomic<std::int64_t>& done = p.done[(&w - p.works.data()) * p.groups + group];
  if (done.fetch_add(c1 - c0, std::memory_order_acq_rel) + c1 - c0 == last - first) quantize_slice(k, p, w, first, last, scratch);
}

// The last matrix of one work.
MatMulJob down_job(const KernelTable& k, const Plan& p, const Work& w) noexcept {
  const quant::MatrixView& down = w.w->m.down;
  MatMulJob job;
  job.block = {down,           p.gate + w.first * p.inner, p.inner, {}, bias_of(w.w->m.down_bias), p.op.y.f32(), p.op.y.stride(0),
               w.w->slots.data(), w.n, nullptr};
  if (is_fast(down, p.op.precision)) job.block.xq = p.mid[group_slot(down)].rows(w.first, w.tile);
  job.fn = kernel_for(k, down, p.op.precision);
  return job;
}

// One work from its input to its slots.
void whole_work(const KernelTable& k, const Plan& p, const Work& w, RowsToCome then, std::byte* scratch) noexcept {
  inner_slice(k, p, w, 0, p.inner, {&w.w->m.down, 0}, scratch);
  MatMulJob job = down_job(k, p, w);
  job.block.scratch = scratch;
  job.block.then = then;
  job.fn(job.block, 0, job.block.w.rows);
}

// Carves arrays out of one block of memory.
struct Carver {
  std::byte* at;
  template <class T>
  T* take(std::size_t n) noexcept {
    auto* p = reinterpret_cast<T*>(at);
    at += round_up(n * sizeof(T), 64);
    return p;
  }
};

std::size_t set_bytes(const bool (&needed)[kGroupSizes], std::int64_t n, std::int64_t cols) noexcept {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < kGroupSizes; ++i)
    if (needed[i]) bytes += QuantizedBuffer::bytes(n, cols, kGroups[i]);
  return bytes;
}

void carve_sets(Carver& c, const bool (&needed)[kGroupSizes], std::int64_t n, std::int64_t cols,
                QuantizedBuffer (&out)[kGroupSizes]) noexcept {
  for (std::size_t i = 0; i < kGroupSizes; ++i)
    if (needed[i])
      out[i] = QuantizedBuffer::at(c.take<std::byte>(QuantizedBuffer::bytes(n, cols, kGroups[i])), n, cols,
                                   kGroups[i]);
}

}  // namespace

void CpuBackend::execute(Stream& stream, const ExpertFfn& op) {
  auto& s = static_cast<CpuStream&>(stream);
  const std::size_t n_works = op.works.size(), works_bytes = round_up(n_works * sizeof(Work), 64);
  std::byte* lists = s.tables.get(works_bytes + n_works * sizeof(MatMulJob));
  Plan p{.op = op, .cols = op.x.dim(1), .works = {reinterpret_cast<Work*>(lists), n_works}};
  for (Work& w : p.works) new (&w) Work;
  count(p, k_);
  if (p.total == 0) return;
  for (Scratch& w : s.workers) w.get(matmul_scratch_bytes(std::max(p.cols, p.inner)));

  for (std::size_t i = 0; i < kGroupSizes; ++i)
    if (p.need_mid[i]) p.largest_group = kGroups[i];
  const auto n = static_cast<std::int64_t>(n_works);
  const std::int64_t n_whole = whole_works(n, op.x.dim(0), pool_.size()), n_cut = n - n_whole;
  const std::int64_t columns = inner_per_task(n_cut, p.inner, p.largest_group, pool_.size());
  if (columns < p.largest_group) p.groups = (p.inner + p.largest_group - 1) / p.largest_group;
  const auto n_done = static_cast<std::size_t>(n * p.groups);

  const std::int64_t n_tokens = op.x.dim(0);
  const auto inner_floats = static_cast<std::size_t>(p.total * p.inner);
  const std::size_t gathered_floats =
      p.need_f32 && p.total > 1 ? static_cast<std::size_t>(p.total * p.cols) : 0;
  Carver c{s.partials.get(set_bytes(p.need_in, n_tokens + p.total, p.cols) +
                          set_bytes(p.need_mid, p.total, p.inner) + (2 * inner_floats + gathered_floats) * 4 +
                          n_done * sizeof(*p.done) + 64 * 32)};
  QuantizedBuffer tokens[kGroupSizes], packed[kGroupSizes];
  carve_sets(c, p.need_in, n_tokens, p.cols, tokens);
  carve_sets(c, p.need_in, p.total, p.cols, packed);
  carve_sets(c, p.need_mid, p.total, p.inner, p.mid);
  p.gate = c.take<float>(inner_floats);
  p.up = c.take<float>(inner_floats);
  auto* gathered = c.take<float>(gathered_floats);
  if (n_done > 0) {
    p.done = c.take<std::atomic<std::int64_t>>(n_done);
    for (std::size_t i = 0; i < n_done; ++i) new (p.done + i) std::atomic<std::int64_t>(0);
  }

  const auto quantize = [&](std::int64_t t, int) noexcept {
    for (std::size_t i = 0; i < kGroupSizes; ++i)
      if (p.need_in[i])
        quantize_tile(k_, tokens[i], t, 1, 1, 0, p.cols, nullptr,
                      [&](std::int64_t) noexcept { return op.x.row(t); });
  };
  const auto gather_work = [&](std::int64_t i, int) noexcept {
    gather(k_, p, p.works[static_cast<std::size_t>(i)], tokens, packed, gathered);
  };
  if (n_tokens * p.cols <= kInlineElements) {
    for (std::int64_t t = 0; t < n_tokens; ++t) quantize(t, 0);
    for (std::int64_t i = 0; i < n; ++i) gather_work(i, 0);
  } else {
    pool_.run(n_tokens, quantize);
    pool_.run(n, gather_work);
  }

  // Every thread's share: whole works, then slices of those that are cut.
  const std::int64_t slices = (p.inner + columns - 1) / columns, n_threads = pool_.size();
  const std::int64_t whole_each = n_whole / n_threads, slices_each = (n_cut * slices + n_threads - 1) / n_threads, each = whole_each + slices_each;
  struct Task {
    const Work* work = nullptr;  // null: nothing
    std::int64_t column = 0;
    bool whole = false;
  };
  const auto task_of = [&](std::int64_t i) noexcept {
    const std::int64_t thread = i / each, at = i % each;
    if (at < whole_each) return Task{&p.works[static_cast<std::size_t>(thread * whole_each + at)], 0, true};
    const std::int64_t slice = thread * slices_each + at - whole_each;
    if (slice >= n_cut * slices) return Task{};
    return Task{&p.works[static_cast<std::size_t>(n_whole + slice / slices)], slice % slices * columns, false};
  };
  pool_.run(each * n_threads, [&](std::int64_t i, int worker) noexcept {
    const Task task = task_of(i);
    if (task.work == nullptr || task.work->n == 0) return;
    RowsToCome then;
    if ((i + 1) % each != 0)
      if (const Task next = task_of(i + 1); next.work != nullptr) then = {&next.work->w->m.gate, next.column};
    std::byte* const scratch = s.workers[static_cast<std::size_t>(worker)].get(0);
    if (task.whole)
      whole_work(k_, p, *task.work, then, scratch);
    else
      inner_slice(k_, p, *task.work, task.column, std::min(p.inner, task.column + columns), then, scratch);
  });

  auto* jobs = reinterpret_cast<MatMulJob*>(lists + works_bytes);
  std::size_t n_jobs = 0;
  for (const Work& w : p.works.subspan(static_cast<std::size_t>(n_whole)))
    if (w.n > 0) new (jobs + n_jobs++) MatMulJob(down_job(k_, p, w));
  run_jobs(pool_, s, {jobs, n_jobs});
}

}  // namespace moeflux::backend::cpu
