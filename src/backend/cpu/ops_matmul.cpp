// MatMul: activations are quantized once, then the rows of all matrices are one list of tasks.
#include "backend/cpu/matmul_plan.h"

namespace moeflux::backend::cpu {
namespace {

// What follows a task in its matrix, and behind that the next one.
class NextTasks final : public MoreRows {
 public:
  NextTasks(ThreadPool& pool, const MatMulJob& job, const MatMulJob* after, std::int64_t task, int worker) noexcept
      : pool_(pool), job_(job), after_(after), task_(task), worker_(worker) {}
  bool next(std::int64_t& row_end, RowsToCome& then) noexcept override {
    if (row_end >= job_.block.w.rows || !pool_.take(task_ + 1, worker_)) return false;
    ++task_;
    row_end = std::min(job_.block.w.rows, row_end + job_.rows_per_task);
    then = behind(row_end);
    return true;
  }
  RowsToCome behind(std::int64_t row_end) const noexcept {
    if (row_end < job_.block.w.rows) return {&job_.block.w, row_end};
    return {after_ == nullptr ? nullptr : &after_->block.w, 0};
  }

 private:
  ThreadPool& pool_;
  const MatMulJob& job_;
  const MatMulJob* after_;
  std::int64_t task_;
  int worker_;
};

}  // namespace

void run_jobs(ThreadPool& pool, CpuStream& s, std::span<MatMulJob> jobs) {
  std::uint64_t total_bytes = 0;
  for (const MatMulJob& job : jobs) total_bytes += job.block.w.bytes();
  const std::int64_t bytes = bytes_per_task(total_bytes, pool.size());
  std::int64_t n_tasks = 0;
  for (MatMulJob& job : jobs) {
    job.first_task = n_tasks;
    job.rows_per_task = rows_per_task(job.block.w, job.block.n_tokens, bytes);
    n_tasks += (job.block.w.rows + job.rows_per_task - 1) / job.rows_per_task;
  }
  pool.run(n_tasks, [&](std::int64_t i, int worker) noexcept {
    const auto after =
        std::upper_bound(jobs.begin(), jobs.end(), i,
                         [](std::int64_t task, const MatMulJob& j) { return task < j.first_task; });
    const MatMulJob& job = *(after - 1);
    MatMulBlock b = job.block;
    b.scratch = s.workers[static_cast<std::size_t>(worker)].get(0);
    NextTasks more(pool, job, after == jobs.end() ? nullptr : &*after, i, worker);
    b.more = &more;
    const std::int64_t row = (i - job.first_task) * job.rows_per_task, end = std::min(b.w.rows, row + job.rows_per_task);
    b.then = more.behind(end);
    job.fn(b, row, end);
  });
}

void CpuBackend::execute(Stream& stream, const MatMul& op) {
  auto& s = static_cast<CpuStream&>(stream);
  const std::int64_t n = op.x.dim(0), cols = op.x.dim(1);
  std::int64_t tile = 1;
  for (Scratch& w : s.workers) w.get(matmul_scratch_bytes(cols));

  bool needed[kGroupSizes] = {};
  std::size_t bytes = 0;
  for (const MatMulPart& p : op.parts)
    if (is_fast(p.w, op.precision)) {
      needed[group_slot(p.w)] = true;
      tile = std::max(tile, tokens_per_tile(k_, p.w, n));
    }
  for (std::size_t i = 0; i < kGroupSizes; ++i)
    if (needed[i]) bytes += QuantizedBuffer::bytes(n, cols, kGroups[i]);
  std::byte* memory = s.activations.get(bytes);
  QuantizedBuffer xq[kGroupSizes];
  for (std::size_t i = 0; i < kGroupSizes; ++i) {
    if (!needed[i]) continue;
    xq[i] = QuantizedBuffer::at(memory, n, cols, kGroups[i]);
    memory += QuantizedBuffer::bytes(n, cols, kGroups[i]);
    const auto quantize = [&](std::int64_t t, int worker) noexcept {
      const std::int64_t first = t * tile;
      quantize_tile(k_, xq[i], first, std::min(tile, n - first), tile, 0, cols,
                    s.workers[static_cast<std::size_t>(worker)].get(0),
                    [&](std::int64_t r) noexcept { return op.x.row(first + r); });
    };
    if (n * cols <= kInlineElements)
      for (std::int64_t t = 0; t * tile < n; ++t) quantize(t, 0);
    else
      pool_.run((n + tile - 1) / tile, quantize);
  }

  auto* jobs = reinterpret_cast<MatMulJob*>(s.tables.get(op.parts.size() * sizeof(MatMulJob)));
  std::size_t n_jobs = 0;
  for (const MatMulPart& p : op.parts) {
    MatMulJob& job = *new (jobs + n_jobs++) MatMulJob;
    job.block = {p.w,       op.x.f32(),    op.x.stride(0), {}, p.bias.empty() ? nullptr : p.bias.f32(),
                 p.y.f32(), p.y.stride(0), nullptr,        n,  nullptr};
    if (is_fast(p.w, op.precision)) job.block.xq = xq[group_slot(p.w)].rows(0, tile);
    job.fn = kernel_for(k_, p.w, op.precision);
  }
  run_jobs(pool_, s, {jobs, n_jobs});
}

}  // namespace moeflux::backend::cpu
