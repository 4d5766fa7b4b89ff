#include <moeflux/plan.h>
#include <moeflux/probe.h>
#include <moeflux/simulate.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <variant>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cuda_backend.h"
#include "core/clock.h"
#include "core/error.h"
#include "engine/backend_setup.h"
#include "engine/budget.h"
#include "engine/inspect.h"
#include "engine/tokenizer.h"
#include "format/model_folder.h"
#include "io/machine.h"
#include "model/family.h"
#include "model/planner.h"

namespace moeflux {
namespace {

// Multiplications and additions of the trunk's matrices for one token, the head not counted: prefill needs it once.
struct CountOperations {
  double& total;
  int operator()(const store::MatrixSource& m) const {
    total += 2.0 * static_cast<double>(m.rows) * static_cast<double>(m.cols);
    return 0;
  }
  int operator()(const store::VectorSource&) const { return 0; }
};

double operations_per_token(const model::ModelSpec& spec, const model::Binding& binding) {
  double total = 0;
  for (std::size_t l = 0; l < spec.layers.size(); ++l) {
    const auto& source = binding.sources.layers[l];
    std::visit([&](const auto& t) { t.map(CountOperations{total}); }, source.mixer);
    std::visit([&](const auto& t) { t.map(CountOperations{total}); }, source.ffn);
    const store::RecordLayout& e = binding.experts.layers[l].layout;
    if (const auto* moe = std::get_if<model::MoeSpec>(&spec.layers[l].ffn))
      for (const store::RecordMatrix* m : {&e.gate, &e.up, &e.down})
        total += 2.0 * static_cast<double>(moe->top_k) * static_cast<double>(m->rows) * static_cast<double>(m->cols);
  }
  return total;
}

// What loading leaves behind in the process.
constexpr std::uint64_t kLoading = 4u << 20;

quant::Format usual_format(const model::Binding& binding) {
  for (const store::ExpertLayer& l : binding.experts.layers)
    if (l.n_experts > 0) return l.layout.gate.format;
  return binding.sources.layers.empty() ? quant::Format::bf16() : binding.sources.embed.format;
}

// Operations per second of the backend on a matrix of the model's format, for about a tenth of a second.
double probe_arithmetic(backend::Backend& backend, Precision precision, quant::Format format, std::int64_t n_tokens) {
  constexpr std::int64_t kRows = 1024, kCols = 2048;
  constexpr std::uint64_t kNanoseconds = 100'000'000;
  const auto stream = backend.create_stream();
  const auto take = [&](std::size_t bytes) {
    Buffer b = backend.allocator().allocate(bytes, 64);
    const std::vector<std::byte> ones(bytes, std::byte{1});
    backend.copier().to_device(b.data(), ones.data(), bytes);
    return b;
  };
  const Buffer codes = take(kRows * format.row_bytes(kCols)), scales = take(kRows * format.scale_row_bytes(kCols) + 64);
  const Buffer x = take(static_cast<std::size_t>(n_tokens * kCols) * 4), y = take(static_cast<std::size_t>(n_tokens * kRows) * 4);
  const quant::MatrixView w{format, kRows, kCols, codes.data(), scales.data(), format.has_biases() ? scales.data() : nullptr};
  const backend::MatMulPart part{w, {}, view_f32(y.as<float>(), {n_tokens, kRows})};
  double best = 0;
  for (const std::uint64_t begin = now_ns(); now_ns() - begin < kNanoseconds;) {
    const std::uint64_t start = now_ns();
    backend.run(*stream, backend::MatMul{view_f32(x.as<float>(), {n_tokens, kCols}), {&part, 1}, precision});
    backend.synchronize(*stream);
    best = std::max(best, 2.0 * static_cast<double>(n_tokens * kRows * kCols) * 1e9 / static_cast<double>(now_ns() - start));
  }
  return best;
}

// Experts of a layer that a chunk of tokens needs, if all are equally likely.
double experts_needed(const model::MoeSpec& moe, double n_tokens) {
  const double e = static_cast<double>(moe.n_experts), k = static_cast<double>(moe.top_k);
  return e * (1.0 - std::pow(1.0 - k / e, n_tokens));
}

void estimate_decode(const ModelInfo& info, Plan& p) {
  const MemorySplit& m = p.memory;
  const double experts = static_cast<double>(info.active_expert_bytes_per_token);
  const double kv = static_cast<double>(m.kv_bytes) / 2;  // a context half full
  const double trunk = static_cast<double>(info.trunk_bytes_per_token) + kv + static_cast<double>(m.state_bytes);
  p.token_memory_bytes = trunk + experts;
  p.token_disk_bytes = experts * (1 - p.hit_rate);
  const double memory = p.token_memory_bytes / p.speed.memory_bytes_per_second;
  const double disk = p.token_disk_bytes > 0 ? p.token_disk_bytes / p.speed.disk_bytes_per_second : 0;
  const double hits = experts * p.hit_rate / p.speed.memory_bytes_per_second;
  p.decode_dependent = 1 / (memory + std::max(0.0, disk - hits));
  p.decode_ahead = 1 / std::max(memory, disk);
  p.decode_limit = disk > memory ? "disk" : "memory";
}

void estimate_prefill(const model::ModelSpec& spec, const model::Binding& binding, const ModelInfo& info, std::int64_t n_prompt, Plan& p) {
  const double n = static_cast<double>(n_prompt), chunk = static_cast<double>(std::min(n_prompt, p.memory.chunk_size));
  double disk_bytes = 0;
  for (const model::LayerSpec& l : spec.layers)
    if (const auto* moe = std::get_if<model::MoeSpec>(&l.ffn)) disk_bytes += experts_needed(*moe, chunk) * static_cast<double>(info.bytes_per_expert);
  disk_bytes *= std::ceil(n / chunk) * (1 - p.memory.cached_share());
  p.prompt_disk_seconds = disk_bytes > 0 ? disk_bytes / p.speed.disk_bytes_per_second : 0;
  p.prompt_compute_seconds = n * operations_per_token(spec, binding) / p.speed.operations_per_second;
  p.prefill = n / std::max(p.prompt_disk_seconds, p.prompt_compute_seconds);
  p.prefill_limit = p.prompt_disk_seconds > p.prompt_compute_seconds ? "disk" : "arithmetic";
}

// Shares of experts that live on the device, and there or in main memory.
std::array<double, 2> cached_shares(const Plan& p) {
  const MemorySplit& m = p.memory;
  if (!p.on_device) return {m.cached_share(), m.cached_share()};
  const auto n = static_cast<double>(std::max<std::uint64_t>(m.n_experts, 1));
  const double device = static_cast<double>(m.device.n_slots - m.device.n_spare) / n;
  return {std::min(1.0, device), std::min(1.0, device + static_cast<double>(m.n_slots) / n)};
}

void estimate_hits(const PlanOptions& options, Plan& p) {
  if (p.memory.all_in_memory) {
    p.hit_rate = p.device_hit_rate = 1;
    p.hit_rate_source = p.on_device ? "all experts are in device memory" : "all experts are in memory";
    return;
  }
  const auto [device, all] = cached_shares(p);
  p.device_hit_rate = device, p.hit_rate = all;
  p.hit_rate_source = "assumed: every expert equally likely, the worst case; record a run with --trace for a real one";
  if (!options.trace.empty()) {
    const std::array shares = {std::max(device, 1e-6), std::max(all, 1e-6)};
    const Simulation s = simulate(options.trace, shares);
    p.device_hit_rate = s.rows[0].ours, p.hit_rate = all >= 1 ? 1 : s.rows[1].ours;
    p.hit_rate_source = "simulated on " + options.trace.filename().string() + " with the same share of experts in memory";
  }
}

// Experts that are not on the device come over the link when a router has chosen them.
void estimate_device_decode(const ModelInfo& info, const model::MemoryPlan& session, Plan& p) {
  const double experts = static_cast<double>(info.active_expert_bytes_per_token);
  const double trunk = static_cast<double>(info.trunk_bytes_per_token) + static_cast<double>(session.kv) / 2 + static_cast<double>(session.recurrent);
  p.token_memory_bytes = trunk + experts * p.device_hit_rate;
  p.token_link_bytes = experts * (1 - p.device_hit_rate);
  p.token_disk_bytes = experts * (1 - p.hit_rate);
  if (p.device.empty()) return;
  const double memory = p.token_memory_bytes / p.speed.device_bytes_per_second, link = p.token_link_bytes / p.speed.link_bytes_per_second;
  const double disk = p.token_disk_bytes > 0 ? p.token_disk_bytes / p.speed.disk_bytes_per_second : 0;
  p.decode_dependent = 1 / (memory + std::max(link, disk));
  p.decode_ahead = 1 / std::max({memory, link, disk});
  p.decode_limit = disk > std::max(memory, link) ? "disk" : link > memory ? "link" : "memory";
}

// The memory of the device that the engine would take, or would if it were there; 0: the CPU.
std::uint64_t find_device(const EngineOptions& options, Plan& p) {
  if (options.backend == BackendKind::Cpu) return 0;
  if (options.gpu >= backend::count_cuda_devices()) {
    if (options.vram_bytes > 0) return options.vram_bytes;
    if (options.backend == BackendKind::Cuda) backend::make_cuda_backend({options.gpu});  // says why not
    return 0;
  }
  const GpuDevice gpu = probe_gpu(options.gpu, true);
  if (!gpu.note.empty()) {
    if (options.backend == BackendKind::Cuda) fail(ErrorCode::Unsupported, "{}", gpu.note);
    p.note = gpu.note;
    return 0;
  }
  p.device = gpu.name;
  p.speed.device_bytes_per_second = gpu.memory_bytes_per_second;
  p.speed.link_bytes_per_second = gpu.to_device_bytes_per_second;
  return engine::device_ceiling(options, gpu.free_bytes);
}

// True: the plan is for a device.
bool plan_device(const EngineOptions& options, const model::ParsedModel& parsed, const model::Binding& binding, std::uint64_t other_bytes, Plan& p) {
  const std::uint64_t device_bytes = find_device(options, p);
  if (device_bytes == 0) return false;
  const MemorySplit split = engine::split_for_device(options, parsed.spec, binding, device_bytes, other_bytes);
  if (options.backend == BackendKind::Auto && !p.device.empty()) {
    p.note = engine::why_not_the_device(split);
    if (!p.note.empty()) {
      p.device.clear();
      return false;
    }
  }
  p.memory = split;
  p.on_device = true;
  return true;
}

}  // namespace

Plan plan_model(const PlanOptions& options) {
  const format::ModelFolder folder = format::ModelFolder::open(options.engine.model);
  const model::ParsedModel parsed = model::parse_model(folder);
  const model::Binding binding = model::bind(folder, parsed.spec, parsed.names);
  binding.require_complete(folder);
  const ModelInfo info = engine::describe(folder, parsed, binding);
  // What an engine takes besides weights: mostly its tokenizer. Measured, so it has to be there.
  const auto tokenizer = engine::load_tokenizer(options.engine.model);
  const auto backend = backend::make_cpu_backend({.n_threads = options.engine.n_threads, .isa = options.engine.isa});
  Plan plan;
  const std::uint64_t other_bytes = io::process_memory().resident + kLoading;
  if (plan_device(options.engine, parsed, binding, other_bytes, plan)) {
    if (!plan.fits()) return plan;
    estimate_hits(options, plan);
    if (!plan.device.empty() && plan.hit_rate < 1) {
      const DiskSpeed disk = probe_disk_speed(options.engine.model, options.engine.io);
      plan.speed.disk_bytes_per_second = disk.bytes_per_second, plan.speed.disk_direct = disk.direct;
    }
    estimate_device_decode(info, model::plan_memory(parsed.spec, binding, plan.memory.ctx_size, plan.memory.chunk_size, options.engine.planned.kv), plan);
    return plan;
  }
  plan.memory = engine::split_memory(options.engine, parsed.spec, binding, other_bytes);
  estimate_hits(options, plan);
  if (!plan.fits()) return plan;

  const MemoryBandwidth memory = probe_memory_bandwidth(options.engine.n_threads);
  const DiskSpeed disk = probe_disk_speed(options.engine.model, options.engine.io);
  // As many tokens together as an expert of a chunk has.
  const double tokens = static_cast<double>(std::min(options.n_prompt, plan.memory.chunk_size) * std::max<std::int64_t>(info.top_k, 1)) /
                        static_cast<double>(std::max<std::int64_t>(info.n_experts, 1));
  plan.speed = {memory.bytes_per_second, disk.bytes_per_second, disk.direct,
                probe_arithmetic(*backend, options.engine.precision, usual_format(binding), std::clamp<std::int64_t>(static_cast<std::int64_t>(tokens), 4, 64)), memory.n_threads, 0, 0};
  estimate_decode(info, plan);
  estimate_prefill(parsed.spec, binding, info, options.n_prompt, plan);
  return plan;
}

}  // namespace moeflux
