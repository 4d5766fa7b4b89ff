// Where the time of a model goes: every op of prefill and of decode with its share, its bytes and its operations.
//
//   model_ops MODEL [PROMPT [DECODE [THREADS [ISA]]]]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "bench/op_times.h"
#include "bench/peaks.h"
#include "core/error.h"
#include "core/thread_pool.h"
#include "engine/expert_setup.h"
#include "format/model_folder.h"
#include "io/region_allocator.h"
#include "model/binder.h"
#include "model/family.h"
#include "session/session.h"

namespace moeflux::bench {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void print(const char* phase, std::int64_t tokens, double wall, const std::map<std::string, OpTime>& times, const Peaks& peaks) {
  fmt::print("{}: {} tokens, {:.3f} s, {:.2f} tok/s\n", phase, tokens, wall, static_cast<double>(tokens) / wall);
  std::vector<std::pair<std::string, OpTime>> rows(times.begin(), times.end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  double sum = 0;
  for (const auto& [label, t] : rows) {
    sum += t.seconds;
    fmt::print("  {:5.1f} %  {:8.3f} ms a token  {:8.1f} us a call  {:6.1f} GB/s ({:3.0f} %)  {:7.1f} GOP/s ({:3.0f} %)  {}\n",
               100 * t.seconds / wall, 1e3 * t.seconds / static_cast<double>(tokens), 1e6 * t.seconds / static_cast<double>(t.calls),
               t.bytes / t.seconds * 1e-9, 100 * t.bytes / t.seconds * 1e-9 / peaks.read_gb_s, t.ops / t.seconds * 1e-9,
               peaks.int_gop_s > 0 ? 100 * t.ops / t.seconds * 1e-9 / peaks.int_gop_s : 0, label);
  }
  fmt::print("  {:5.1f} %  outside of ops\n", 100 * (wall - sum) / wall);
}

std::vector<TokenId> random_tokens(std::int64_t n, std::int64_t vocab) {
  std::mt19937_64 rng(0);
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  for (TokenId& t : tokens) t = TokenId(static_cast<std::int32_t>(rng() % static_cast<std::uint64_t>(vocab)));
  return tokens;
}

void run(const EngineOptions& options, std::int64_t n_prompt, std::int64_t n_decode) {
  const Peaks peaks = probe_peaks(options.n_threads);
  fmt::print("peaks of {} threads: {:.1f} GB/s, {:.0f} GOP/s 8-bit, {:.0f} GFLOP/s f32\n", options.n_threads, peaks.read_gb_s,
             peaks.int_gop_s, peaks.f32_gop_s);
  const auto start = std::chrono::steady_clock::now();
  const format::ModelFolder folder = format::ModelFolder::open(options.model);
  const model::ParsedModel parsed = model::parse_model(folder);
  const model::Binding binding = model::bind(folder, parsed.spec, parsed.names);
  binding.require_complete(folder);
  io::RegionAllocator memory;
  const auto cpu = backend::make_cpu_backend({options.n_threads, options.isa, &memory});
  TimingBackend timing(*cpu);
  const model::Model model(parsed.spec, binding, folder, timing, {}, engine::use_bands(options, timing));
  const engine::ExpertSetup experts = engine::make_expert_store(options, parsed.spec, binding, folder, timing);
  fmt::print("{}, loaded in {:.2f} s\n", cpu->name(), seconds_since(start));

  SessionOptions sizes;
  sizes.ctx_size = n_prompt + n_decode;
  session::Session session({model, *experts.store, timing, options.precision}, sizes);
  const std::vector<TokenId> tokens = random_tokens(n_prompt + n_decode, parsed.spec.vocab_size);
  const std::span<const TokenId> all(tokens);
  session.prefill(all.first(std::min<std::size_t>(all.size(), 16)));  // pages touched, threads awake
  session.reset();
  timing.take();
  for (int i = 0; i < 2; ++i) {  // the second time counts: every expert has been touched
    session.reset();
    timing.take();
    auto from = std::chrono::steady_clock::now();
    session.prefill(all.first(static_cast<std::size_t>(n_prompt)));
    const double wall = seconds_since(from);
    if (i == 1) print("prefill", n_prompt, wall, timing.take(), peaks);
  }
  const auto from = std::chrono::steady_clock::now();
  timing.take();
  for (const TokenId t : all.subspan(static_cast<std::size_t>(n_prompt))) session.step(t);
  if (n_decode > 0) print("decode", n_decode, seconds_since(from), timing.take(), peaks);
}

}  // namespace
}  // namespace moeflux::bench

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: model_ops MODEL [PROMPT [DECODE [THREADS [ISA]]]]\n");
    return 2;
  }
  const auto number = [&](int i, int fallback) { return argc > i ? std::atoi(argv[i]) : fallback; };
  try {
    moeflux::EngineOptions options;
    options.model = argv[1];
    options.n_threads = number(4, moeflux::usable_cores());
    if (argc > 5) options.isa = argv[5];
    moeflux::bench::run(options, number(2, 512), number(3, 64));
  } catch (const moeflux::Error& e) {
    fmt::print(stderr, "model_ops: {}\n", e.what());
    return 1;
  }
  return 0;
}
