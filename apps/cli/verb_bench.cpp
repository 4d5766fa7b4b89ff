#include <fmt/format.h>
#include <moeflux/probe.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench_report.h"
#include "cli/common.h"
#include "cli/fail.h"
#include "cli/interrupt.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

std::vector<TokenId> random_tokens(std::int64_t n, std::int64_t vocab_size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  for (TokenId& token : tokens)
    token = TokenId(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocab_size)));
  return tokens;
}

TokenBytes token_bytes(const ModelInfo& info, const BenchOptions& options) {
  TokenBytes bytes;
  bytes.trunk = static_cast<double>(info.trunk_bytes_per_token);
  bytes.experts = static_cast<double>(info.active_expert_bytes_per_token);
  // On average half of the decoded tokens are in the cache beside the prompt.
  const double positions = static_cast<double>(options.n_prompt) + static_cast<double>(options.n_decode) / 2;
  bytes.kv =
      static_cast<double>(info.kv_bytes_per_token_f16) * positions * (options.model.kv == "f16" ? 1 : 2);
  bytes.state = static_cast<double>(info.state_bytes);
  return bytes;
}

double rate(std::int64_t tokens, std::uint64_t ns) {
  return static_cast<double>(tokens) * 1e9 / static_cast<double>(std::max<std::uint64_t>(ns, 1));
}

// One repetition from an empty context; adds its rates. A machine that others use gives more and less of its memory's speed from
// one second to the next: what it gives is asked right before and after the tokens that are timed.
void run_once(const Engine& engine, Session& session, const BenchOptions& options, std::span<const TokenId> tokens,
              BenchResult& result) {
  const SessionStats start = session.stats();
  session.reset();
  const auto prompt = tokens.first(static_cast<std::size_t>(options.n_prompt));
  if (!prompt.empty()) session.prefill(prompt);
  const SessionStats middle = session.stats();
  const bool probed = !options.no_probe && options.n_decode > 0;
  const double before = probed ? engine.probe_weights() : 0;
  for (const TokenId token : tokens.subspan(prompt.size())) session.step(token);
  const SessionStats& end = session.stats();
  result.prefill_totals.add(start, middle, false);
  result.decode_totals.add(middle, end, true);
  if (options.n_prompt > 0)
    result.prefill.values.push_back(rate(options.n_prompt, middle.prefill_ns - start.prefill_ns));
  if (before > 0) result.weights_rate.values.push_back((before + engine.probe_weights()) / 2);
  if (options.n_decode > 0)
    result.decode.values.push_back(rate(options.n_decode, end.decode_ns - middle.decode_ns));
}

void warm_up(Session& session, std::span<const TokenId> tokens) {
  constexpr std::size_t kTokens = 16;  // threads awake, pages touched
  session.prefill(tokens.first(std::min(tokens.size(), kTokens)));
  if (session.position() < session.ctx_size()) session.step(tokens[0]);
}

void measure(const Engine& engine, Session& session, const BenchOptions& options, std::int64_t vocab_size, BenchResult& result) {
  const InterruptGuard guard(session);
  const std::vector<TokenId> tokens =
      random_tokens(options.n_prompt + options.n_decode, vocab_size, options.seed);
  StatusLine line;
  warm_up(session, tokens);
  for (std::int64_t i = 0; i < options.n_repeat; ++i) {
    if (line.due()) line.show(fmt::format("repetition {} of {}", i + 1, options.n_repeat));
    run_once(engine, session, options, tokens, result);
    const std::uint64_t hash = session.stats().logits_hash;
    if (i > 0 && hash != result.logits_hash)
      fail(ErrorCode::Internal, "repetition {} gave logits {} instead of {}", i + 1, hash_text(hash),
           hash_text(result.logits_hash));
    result.logits_hash = hash;
  }
  result.stats = session.stats();
  result.reads.assign(session.reads().begin(), session.reads().end());
}

// What the machine could do, when the model is out of the way.
void probe(const BenchOptions& options, BenchResult& result) {
  const ModelOptions& model = options.model;
  const IoKind io = model.io == "uring" ? IoKind::Uring : model.io == "pread" ? IoKind::Pread : IoKind::Auto;
  StatusLine line;
  if (result.tiered()) {
    line.show("probing the device and the disk");
    result.gpu = probe_gpu(model.gpu);
    if (result.stats.disk_misses > 0) result.disk = probe_disk_speed(model.model, io);
    return;
  }
  line.show("probing memory and disk");
  result.bandwidth = probe_memory_bandwidth(model.n_threads);
  if (result.split.all_in_memory) return;
  result.disk = probe_disk_speed(model.model, io);
  BytesProbeOptions bytes;
  bytes.model = model.model;
  bytes.n_threads = model.n_threads;
  bytes.io = io;
  bytes.other_bytes = result.token.kv + result.token.state;
  bytes.reads = result.reads;
  result.bound = probe_token_bytes(bytes);
}

BenchResult run_bench(BenchOptions& options) {
  BenchResult result;
  options.model.ctx_size = std::max<std::int64_t>(options.n_prompt + options.n_decode, 2);
  options.model.record_reads = !options.no_probe;
  if (!options.warm) drop_model_from_page_cache(options.model.model);
  {
    const auto start = std::chrono::steady_clock::now();
    const std::unique_ptr<Engine> engine = open_engine(options.model);
    result.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const std::unique_ptr<Session> session = open_session(*engine, options.model);
    result.engine_line = mode_line(*engine, *session, options.model);
    result.backend = engine->backend_name();
    result.ctx_size = session->ctx_size();
    result.split = engine->memory();
    note(result.engine_line);
    note_memory(*engine);
    result.token = token_bytes(engine->info(), options);
    measure(*engine, *session, options, engine->info().vocab_size, result);
    session->finish_trace();
  }
  // In this order: the probe's own memory is no part of the peak, and the model's not in the way of the
  // probe.
  result.memory = process_memory();
  if (!options.no_probe) probe(options, result);
  return result;
}

}  // namespace

int verb_bench(Arguments arguments) {
  BenchOptions options;
  CLI::App app("Measures prefill and decode, and what they cost.", "moeflux bench");
  add_model_argument(app, options.model.model);
  app.add_option("-p,--prompt", options.n_prompt, "Tokens to prefill; 0: none")
      ->check(at_least(0))
      ->capture_default_str();
  app.add_option("-n,--decode", options.n_decode, "Tokens to decode; 0: none")
      ->check(at_least(0))
      ->capture_default_str();
  app.add_option("-r,--repeat", options.n_repeat, "Repetitions")->check(at_least(1))->capture_default_str();
  app.add_option("--seed", options.seed, "Chooses the tokens")->capture_default_str();
  add_engine_options(app, options.model);
  add_trace_option(app, options.model);
  app.add_option("--replay", options.model.replay,
                 "Take the choice of experts from a recorded trace, mapped onto this model's layers and experts")
      ->check(CLI::ExistingFile)
      ->type_name("FILE");
  app.add_flag("--warm", options.warm, "Leave what the system keeps of the model's files; otherwise it is dropped first");
  app.add_flag("--no-probe", options.no_probe, "Leave out what this machine could do: memory, disk, bytes only");
  app.add_flag("--json", options.json, "One JSON object");
  app.footer(
      "Tokens are random. Each repetition starts from an empty context; the median counts, the spread says "
      "how far to\n"
      "trust it. All repetitions must end in the same logits.\n"
      "`one token` is what a decoded token must read: the trunk but for the embedding table, the experts it "
      "uses, the\n"
      "cache at the middle of the run, the recurrent state. `memory` is that times tok/s, beside a probe of "
      "this "
      "machine;\n"
      "where all experts are in memory, `weights` is the same beside threads that only read them, asked around each decode.\n"
      "Where experts are streamed, `bytes only` moves the same bytes without arithmetic: once with every layer's "
      "reads\n"
      "after its router, once with the next layer's reads under way. Where a device holds some of them, the line says where they\n"
      "were and what link, disk and device memory would allow.\n\n"
      "Examples:\n"
      "  moeflux bench models/demo\n"
      "  moeflux bench models/demo -p 128 -n 32 -r 3 -t 1 --json\n"
      "  moeflux bench MODEL --ram 8GB --replay routing.jsonl\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  if (options.n_prompt + options.n_decode == 0)
    fail(ErrorCode::InvalidArgument, "nothing to measure: both -p and -n are 0");
  const BenchResult result = run_bench(options);
  if (options.json) {
    write_json(bench_json(options, result));
  } else {
    write_out(bench_table(options, result));
  }
  return kExitOk;
}

}  // namespace moeflux::cli
