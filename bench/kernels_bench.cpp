// Micro-benchmarks of the CPU ops: bytes or operations per second and the share of the probed peak.
//
// Names are op/instruction set/what; shapes are those of a 35B mixture with 3B active parameters (width 2048,
// 256 experts of width 512, 8 chosen). Weights of decode benchmarks are far larger than the caches and used
// in turn.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "bench/peaks.h"
#include "core/thread_pool.h"
#include "io/region_allocator.h"
#include "quant/bands.h"

namespace moeflux::bench {
namespace {

using backend::Backend;
using quant::Format;
using quant::MatrixView;

constexpr std::size_t kDecodeBytes = std::size_t{192} << 20;

// Random bytes with finite scales, kept alive by shared ownership of the benchmark's closure.
class Weights {
 public:
  Weights(Format f, std::int64_t rows, std::int64_t cols, int n, bool bands) : format_(f), rows_(rows), cols_(cols), bands_(bands && quant::has_bands(f, rows, cols)) {
    std::mt19937 rng(1);
    const std::size_t bytes =
        f.matrix_bytes(static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols));
    for (int i = 0; i < n; ++i) {
      const Buffer& m = memory_.emplace_back(allocator_->allocate(bytes + 64, 64));
      const MatrixView w = in_rows(i);
      fill_codes(m, f.kind == quant::FormatKind::BF16 ? bytes : code_bytes(), rng);
      if (f.quantized()) fill_scales(w);
      if (bands_) quant::to_bands(w, m.data(), *allocator_);
    }
  }
  MatrixView view(int i) const { return bands_ ? quant::as_bands(in_rows(i)) : in_rows(i); }
  int count() const { return static_cast<int>(memory_.size()); }
  std::size_t bytes_each() const {
    return format_.matrix_bytes(static_cast<std::uint64_t>(rows_), static_cast<std::uint64_t>(cols_));
  }

 private:
  MatrixView in_rows(int i) const {
    MatrixView w;
    w.format = format_;
    w.rows = rows_;
    w.cols = cols_;
    w.data = memory_[static_cast<std::size_t>(i)].data();
    w.scales = w.data + code_bytes();
    w.biases = w.scales + static_cast<std::uint64_t>(rows_) * w.scale_row_bytes();
    return w;
  }
  std::size_t code_bytes() const {
    return static_cast<std::size_t>(rows_) * format_.row_bytes(static_cast<std::uint64_t>(cols_));
  }
  void fill_codes(const Buffer& m, std::size_t n, std::mt19937& rng) const {
    for (std::size_t i = 0; i + 4 <= n; i += 4) {
      std::uint32_t v = static_cast<std::uint32_t>(rng());
      if (format_.kind == quant::FormatKind::BF16) v = (v & 0x807f807fu) | 0x3c003c00u;
      std::memcpy(m.data() + i, &v, 4);
    }
  }
  void fill_scales(const MatrixView& w) const {
    auto* p = const_cast<std::byte*>(w.scales);
    const std::size_t n = bytes_each() - code_bytes();
    if (format_.kind == quant::FormatKind::Mxfp4) {
      std::memset(p, 120, n);
      return;
    }
    for (std::size_t i = 0; i < n; i += 2) {
      const auto v = static_cast<std::uint16_t>(0x3c00u + i % 64);
      std::memcpy(p + i, &v, 2);
    }
  }
  Format format_;
  std::int64_t rows_, cols_;
  bool bands_;
  std::shared_ptr<io::RegionAllocator> allocator_ = std::make_shared<io::RegionAllocator>();
  std::vector<Buffer> memory_;
};

std::vector<float> random_floats(std::int64_t n, unsigned seed = 3) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> d;
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = d(rng);
  return v;
}

struct Machine {
  int n_threads = 0;
  Peaks peaks;
};

struct Rig {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<backend::Stream> stream;
  Rig(const Machine& m, const std::string& isa)
      : backend(backend::make_cpu_backend({m.n_threads, isa})), stream(backend->create_stream()) {}
  template <class Op>
  void run(const Op& op) {
    backend->run(*stream, op);
  }
};

// Rates over real time, as value and as share of a peak.
void rate(benchmark::State& state, const char* name, double per_iteration, double peak) {
  const double total = per_iteration * static_cast<double>(state.iterations()) * 1e-9;
  state.counters[name] = benchmark::Counter(total, benchmark::Counter::kIsRate);
  if (peak > 0.0) state.counters["share"] = benchmark::Counter(total / peak, benchmark::Counter::kIsRate);
}

// One thread is measured in processor time: on a machine that others use, too, it still means something.
void add(const Machine& m, const std::string& name, std::function<void(benchmark::State&)> fn) {
  auto* b = benchmark::RegisterBenchmark(name.c_str(), std::move(fn))->Unit(benchmark::kMicrosecond);
  if (m.n_threads > 1) b->UseRealTime();
}

// From memory, or (cached) one small matrix again and again: what the kernel could do if memory were faster.
void bench_matvec(benchmark::State& state, const Machine& m, const std::string& isa, Format f,
                  Precision precision, bool cached, bool bands) {
  const std::int64_t rows = cached ? 512 : 2048, cols = 2048;
  const int n = cached ? 1 : static_cast<int>(kDecodeBytes / f.matrix_bytes(static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols)));
  const Weights w(f, rows, cols, n, bands);
  Rig rig(m, isa);
  std::vector<float> x = random_floats(cols), y(static_cast<std::size_t>(rows));
  int i = 0;
  for (auto _ : state) {
    const backend::MatMulPart part{w.view(i), {}, view_f32(y.data(), {1, rows})};
    rig.run(backend::MatMul{view_f32(x.data(), {1, cols}), std::span(&part, 1), precision});
    i = (i + 1) % n;
  }
  rate(state, "GB/s", static_cast<double>(w.bytes_each()), m.peaks.read_gb_s);
}

void bench_matmul(benchmark::State& state, const Machine& m, const std::string& isa, Format f,
                  Precision precision, std::int64_t n_tokens, bool bands) {
  const std::int64_t rows = 4096, cols = 2048;
  const Weights w(f, rows, cols, 1, bands);
  Rig rig(m, isa);
  std::vector<float> x = random_floats(n_tokens * cols), y(static_cast<std::size_t>(n_tokens * rows));
  const backend::MatMulPart part{w.view(0), {}, view_f32(y.data(), {n_tokens, rows})};
  for (auto _ : state)
    rig.run(backend::MatMul{view_f32(x.data(), {n_tokens, cols}), std::span(&part, 1), precision});
  const double ops = 2.0 * static_cast<double>(rows * cols * n_tokens);
  rate(state, "GOP/s", ops, precision == Precision::Fast ? m.peaks.int_gop_s : m.peaks.f32_gop_s);
}

// One layer's experts: 8 of 256 for every token.
void bench_experts(benchmark::State& state, const Machine& m, const std::string& isa, Precision precision,
                   std::int64_t n_tokens, bool bands) {
  const std::int64_t width = 2048, inner = 512, n_experts = 256, k = 8;
  const Format f = Format::affine(4, 64, DType::BF16);
  const Weights gate(f, inner, width, n_experts, bands), up(f, inner, width, n_experts, bands),
      down(f, width, inner, n_experts, bands);
  Rig rig(m, isa);
  std::vector<float> x = random_floats(n_tokens * width), y(static_cast<std::size_t>(n_tokens * k * width));
  std::mt19937 rng(5);
  std::vector<std::vector<std::int32_t>> rows, slots;
  std::vector<backend::ExpertWork> works;
  std::vector<std::int32_t> order(static_cast<std::size_t>(n_experts));
  for (std::size_t e = 0; e < order.size(); ++e) order[e] = static_cast<std::int32_t>(e);
  const auto choose = [&] {
    rows.assign(order.size(), {}), slots.assign(order.size(), {}), works.clear();
    for (std::int64_t t = 0; t < n_tokens; ++t) {
      std::shuffle(order.begin(), order.end(), rng);
      for (std::int64_t r = 0; r < k; ++r) {
        const auto e = static_cast<std::size_t>(order[static_cast<std::size_t>(r)]);
        rows[e].push_back(static_cast<std::int32_t>(t));
        slots[e].push_back(static_cast<std::int32_t>(t * k + r));
      }
    }
    for (int e = 0; e < n_experts; ++e)
      if (const auto i = static_cast<std::size_t>(e); !rows[i].empty())
        works.push_back({{gate.view(e), up.view(e), down.view(e), {}, {}, {}}, rows[i], slots[i]});
  };
  double bytes = 0.0, ops = 0.0;
  for (auto _ : state) {
    state.PauseTiming();
    choose();
    state.ResumeTiming();
    backend::ExpertFfn op;
    op.x = view_f32(x.data(), {n_tokens, width});
    op.works = works;
    op.y = view_f32(y.data(), {n_tokens * k, width});
    op.precision = precision;
    rig.run(op);
    bytes = static_cast<double>(works.size() * 3 * gate.bytes_each());
    ops = 2.0 * static_cast<double>(n_tokens * k * 3 * inner * width);
  }
  if (n_tokens <= 4)
    rate(state, "GB/s", bytes, m.peaks.read_gb_s);
  else
    rate(state, "GOP/s", ops, precision == Precision::Fast ? m.peaks.int_gop_s : m.peaks.f32_gop_s);
}

void bench_attention(benchmark::State& state, const Machine& m, const std::string& isa, std::int64_t n_tokens,
                     std::int64_t pos0, DType kv) {
  const std::int64_t heads = 16, kv_heads = 2, hd = 256, context = pos0 + n_tokens;
  const int layers = n_tokens == 1 ? 16 : 1;
  std::vector<std::vector<std::uint32_t>> k, v;
  const auto n_words = static_cast<std::size_t>(context * kv_heads * hd * (kv == DType::F32 ? 4 : 2) / 4);
  for (int i = 0; i < layers; ++i) {  // two numbers in f16, one in f32
    k.emplace_back(n_words, 0x2c002c00u);
    v.emplace_back(n_words, 0x34003400u);
  }
  Rig rig(m, isa);
  std::vector<float> q = random_floats(n_tokens * heads * hd), y(q.size());
  std::size_t i = 0;
  for (auto _ : state) {
    backend::Attention op;
    op.q = view_f32(q.data(), {n_tokens, heads, hd});
    op.k = make_view(k[i].data(), kv, {context, kv_heads, hd});
    op.v = make_view(v[i].data(), kv, {context, kv_heads, hd});
    op.y = view_f32(y.data(), {n_tokens, heads, hd});
    op.pos0 = pos0;
    op.scale = 0.0625f;
    rig.run(op);
    i = (i + 1) % k.size();
  }
  if (n_tokens == 1)
    rate(state, "GB/s", static_cast<double>(n_words * 8), m.peaks.read_gb_s);
  else
    rate(state, "GOP/s", 4.0 * static_cast<double>((pos0 + n_tokens / 2) * n_tokens * heads * hd),
         m.peaks.f32_gop_s);
}

void bench_delta(benchmark::State& state, const Machine& m, const std::string& isa, std::int64_t n_tokens) {
  const std::int64_t hk = 16, hv = 32, d = 128;
  const int layers = n_tokens == 1 ? 24 : 1;
  Rig rig(m, isa);
  std::vector<float> q = random_floats(n_tokens * hk * d), k = q, v = random_floats(n_tokens * hv * d),
                     y(v.size());
  for (float& f : k) f *= 0.08f;
  std::vector<float> decay(static_cast<std::size_t>(n_tokens * hv), 0.9f), beta(decay.size(), 0.5f);
  std::vector<std::vector<float>> states(static_cast<std::size_t>(layers), random_floats(hv * d * d));
  std::size_t i = 0;
  for (auto _ : state) {
    backend::GatedDelta op;
    op.q = view_f32(q.data(), {n_tokens, hk, d});
    op.k = view_f32(k.data(), {n_tokens, hk, d});
    op.v = view_f32(v.data(), {n_tokens, hv, d});
    op.decay = view_f32(decay.data(), {n_tokens, hv});
    op.beta = view_f32(beta.data(), {n_tokens, hv});
    op.state = view_f32(states[i].data(), {hv, d, d});
    op.y = view_f32(y.data(), {n_tokens, hv, d});
    rig.run(op);
    i = (i + 1) % states.size();
  }
  if (n_tokens == 1)  // the state is read and written
    rate(state, "GB/s", static_cast<double>(hv * d * d * 8), m.peaks.read_gb_s);
  else
    rate(state, "GOP/s", 7.0 * static_cast<double>(n_tokens * hv * d * d), m.peaks.f32_gop_s);
}

void bench_norm(benchmark::State& state, const Machine& m, const std::string& isa, std::int64_t n_tokens) {
  const std::int64_t width = 2048;
  Rig rig(m, isa);
  std::vector<float> h = random_floats(n_tokens * width), delta(h.size(), 0.0f), y(h.size()),
                     w = random_floats(width);
  for (auto _ : state) {
    backend::AddRmsNorm op{view_f32(h.data(), {n_tokens, width}), view_f32(delta.data(), {n_tokens, width}),
                           view_f32(w.data(), {width}), view_f32(y.data(), {n_tokens, width}), 1e-6f};
    rig.run(op);
  }
  rate(state, "GB/s", static_cast<double>(n_tokens * width * 16), 0.0);
}

void bench_conv(benchmark::State& state, const Machine& m, const std::string& isa, std::int64_t n_tokens) {
  const std::int64_t channels = 8192, taps = 4;
  Rig rig(m, isa);
  std::vector<float> u = random_floats(n_tokens * channels), w = random_floats(channels * taps),
                     s = random_floats(channels * (taps - 1)), y(u.size());
  for (auto _ : state) {
    backend::CausalConv op{view_f32(u.data(), {n_tokens, channels}), view_f32(w.data(), {channels, taps}),
                           view_f32(s.data(), {taps - 1, channels}),
                           view_f32(y.data(), {n_tokens, channels})};
    rig.run(op);
  }
  rate(state, "GB/s", static_cast<double>(n_tokens * channels * 8), 0.0);
}

void register_isa(const Machine& m, const std::string& isa) {
  const std::vector<std::pair<std::string, Format>> formats = {
      {"q4g64", Format::affine(4, 64, DType::BF16)},
      {"q4g32", Format::affine(4, 32, DType::BF16)},
      {"q4g128", Format::affine(4, 128, DType::BF16)},
      {"q8g64", Format::affine(8, 64, DType::BF16)},
      {"q2g64", Format::affine(2, 64, DType::BF16)},
      {"q3g64", Format::affine(3, 64, DType::BF16)},
      {"q5g64", Format::affine(5, 64, DType::BF16)},
      {"q6g64", Format::affine(6, 64, DType::BF16)},
      {"mxfp4", Format::mxfp4()},
      {"bf16", Format::bf16()}};
  // "bands": as resident matrices lie in fast precision; else rows, as they stream.
  struct How {
    const char* name;
    Precision precision;
    bool bands;
  };
  const How all[] = {{"bands", Precision::Fast, true}, {"fast", Precision::Fast, false}, {"exact", Precision::Exact, false}};
  const bool wants_bands = Rig(m, isa).backend->wants_bands();
  for (const auto& [label, p, bands] : all) {
    if (bands && !wants_bands) continue;
    for (const auto& [name, f] : formats) {
      if ((p == Precision::Fast && !f.quantized()) || (bands && !quant::has_bands(f, quant::kBandRows, f.group))) continue;
      const std::string tail = fmt::format("{}/{}/{}", isa, name, label);
      add(m, "matvec/" + tail, [=, format = f, precision = p, in_bands = bands](benchmark::State& s) { bench_matvec(s, m, isa, format, precision, false, in_bands); });
      add(m, "matvec_cached/" + tail, [=, format = f, precision = p, in_bands = bands](benchmark::State& s) { bench_matvec(s, m, isa, format, precision, true, in_bands); });
      for (const std::int64_t t : {2, 8, 16, 64, 512})
        add(m, fmt::format("matmul/{}/T{}", tail, t),
            [=, format = f, precision = p, in_bands = bands](benchmark::State& s) { bench_matmul(s, m, isa, format, precision, t, in_bands); });
    }
    for (const std::int64_t t : {1, 512})
      add(m, fmt::format("experts/{}/{}/T{}", isa, label, t), [=, precision = p, in_bands = bands](benchmark::State& s) { bench_experts(s, m, isa, precision, t, in_bands); });
  }
  for (const auto& [kv, label] : {std::pair{DType::F32, "f32"}, std::pair{DType::F16, "f16"}}) {
    for (const std::int64_t context : {512, 8192})
      add(m, fmt::format("attention/{}/{}/decode/{}", isa, label, context),
          [=, type = kv](benchmark::State& s) { bench_attention(s, m, isa, 1, context - 1, type); });
    for (const std::int64_t pos0 : {0, 4096})
      add(m, fmt::format("attention/{}/{}/prefill512/{}", isa, label, pos0),
          [=, type = kv](benchmark::State& s) { bench_attention(s, m, isa, 512, pos0, type); });
  }
  for (const std::int64_t t : {1, 512}) {
    add(m, fmt::format("delta/{}/T{}", isa, t), [=](benchmark::State& s) { bench_delta(s, m, isa, t); });
    add(m, fmt::format("conv/{}/T{}", isa, t), [=](benchmark::State& s) { bench_conv(s, m, isa, t); });
    add(m, fmt::format("add_norm/{}/T{}", isa, t), [=](benchmark::State& s) { bench_norm(s, m, isa, t); });
  }
}

}  // namespace
}  // namespace moeflux::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  moeflux::bench::Machine m;
  m.n_threads = argc > 1 ? std::atoi(argv[1]) : moeflux::usable_cores();
  m.peaks = moeflux::bench::probe_peaks(m.n_threads);
  fmt::print("{} threads: memory read {:.1f} GB/s, int8 {:.0f} GOP/s, f32 {:.0f} GFLOP/s\n", m.n_threads,
             m.peaks.read_gb_s, m.peaks.int_gop_s, m.peaks.f32_gop_s);
  for (const std::string& isa : moeflux::backend::supported_isas()) moeflux::bench::register_isa(m, isa);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
