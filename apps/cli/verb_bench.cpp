#include <fmt/format.h>
#include <moeflux/probe.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cli/common.h"
#include "cli/fail.h"
#include "cli/interrupt.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

using Json = nlohmann::ordered_json;

struct BenchOptions {
  ModelOptions model;
  std::int64_t n_prompt = 512, n_decode = 64, n_repeat = 5;
  std::uint64_t seed = 0;
  bool json = false;
};

// Every repetition's number; the middle one and the ends are what is reported.
struct Series {
  std::vector<double> values;
  double low() const { return values.empty() ? 0 : *std::min_element(values.begin(), values.end()); }
  double high() const { return values.empty() ? 0 : *std::max_element(values.begin(), values.end()); }
  double median() const {
    if (values.empty()) return 0;
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    const std::size_t half = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }
  Json json() const { return {{"median", median()}, {"min", low()}, {"max", high()}, {"runs", values}}; }
};

// The bytes that decoding one token moves through memory at least.
struct TokenBytes {
  double trunk = 0, experts = 0, kv = 0, state = 0;
  double total() const { return trunk + experts + kv + state; }
};

struct BenchResult {
  double load_seconds = 0;
  Series prefill, decode;  // tok/s
  SessionStats before, after;
  std::uint64_t logits_hash = 0;
  TokenBytes token;
  ProcessMemory memory;
  MemoryBandwidth bandwidth;
  std::string engine_line, backend;
  std::int64_t ctx_size = 0;

  std::int64_t n_tokens() const {
    return after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens;
  }
  double hit_rate() const {
    const std::uint64_t requests = after.expert_requests - before.expert_requests;
    if (requests == 0) return 1;
    return static_cast<double>(after.expert_hits - before.expert_hits) / static_cast<double>(requests);
  }
  double bytes_read_per_token() const {
    return n_tokens() == 0
               ? 0
               : static_cast<double>(after.bytes_read - before.bytes_read) / static_cast<double>(n_tokens());
  }
  double stall_seconds() const { return static_cast<double>(after.stall_ns - before.stall_ns) / 1e9; }
  double compute_seconds() const {
    return static_cast<double>(after.prefill_ns + after.decode_ns - before.prefill_ns - before.decode_ns) /
               1e9 -
           stall_seconds();
  }
  double memory_rate() const { return decode.median() * token.total(); }  // bytes per second
  double memory_share() const {
    return bandwidth.bytes_per_second > 0 ? memory_rate() / bandwidth.bytes_per_second : 0;
  }
};

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

// One repetition from an empty context; adds its rates.
void run_once(Session& session, const BenchOptions& options, std::span<const TokenId> tokens,
              BenchResult& result) {
  const SessionStats start = session.stats();
  session.reset();
  const auto prompt = tokens.first(static_cast<std::size_t>(options.n_prompt));
  if (!prompt.empty()) session.prefill(prompt);
  for (const TokenId token : tokens.subspan(prompt.size())) session.step(token);
  const SessionStats& end = session.stats();
  if (options.n_prompt > 0)
    result.prefill.values.push_back(rate(options.n_prompt, end.prefill_ns - start.prefill_ns));
  if (options.n_decode > 0)
    result.decode.values.push_back(rate(options.n_decode, end.decode_ns - start.decode_ns));
}

void warm_up(Session& session, std::span<const TokenId> tokens) {
  constexpr std::size_t kTokens = 16;  // threads awake, pages touched
  session.prefill(tokens.first(std::min(tokens.size(), kTokens)));
  if (session.position() < session.ctx_size()) session.step(tokens[0]);
}

void measure(Session& session, const BenchOptions& options, std::int64_t vocab_size, BenchResult& result) {
  const InterruptGuard guard(session);
  const std::vector<TokenId> tokens =
      random_tokens(options.n_prompt + options.n_decode, vocab_size, options.seed);
  StatusLine line;
  warm_up(session, tokens);
  result.before = session.stats();
  for (std::int64_t i = 0; i < options.n_repeat; ++i) {
    if (line.due()) line.show(fmt::format("repetition {} of {}", i + 1, options.n_repeat));
    run_once(session, options, tokens, result);
    const std::uint64_t hash = session.stats().logits_hash;
    if (i > 0 && hash != result.logits_hash)
      fail(ErrorCode::Internal, "repetition {} gave logits {} instead of {}", i + 1, hash_text(hash),
           hash_text(result.logits_hash));
    result.logits_hash = hash;
  }
  result.after = session.stats();
}

BenchResult run_bench(BenchOptions& options) {
  BenchResult result;
  options.model.ctx_size = std::max<std::int64_t>(options.n_prompt + options.n_decode, 2);
  {
    const auto start = std::chrono::steady_clock::now();
    const std::unique_ptr<Engine> engine = open_engine(options.model);
    result.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const std::unique_ptr<Session> session = open_session(*engine, options.model);
    result.engine_line = mode_line(*engine, *session, options.model);
    result.backend = engine->backend_name();
    result.ctx_size = session->ctx_size();
    note(result.engine_line);
    result.token = token_bytes(engine->info(), options);
    measure(*session, options, engine->info().vocab_size, result);
  }
  // In this order: the probe's own memory is no part of the peak, and the model's not in the way of the
  // probe.
  result.memory = process_memory();
  result.bandwidth = probe_memory_bandwidth(options.model.n_threads);
  return result;
}

std::string series_text(const Series& series, std::int64_t n) {
  if (series.values.empty()) return "-";
  return fmt::format("{:.2f} tok/s (min {:.2f}, max {:.2f}; {} tokens, {} repetitions)", series.median(),
                     series.low(), series.high(), n, series.values.size());
}

std::string table(const BenchOptions& options, const BenchResult& r) {
  std::string text;
  const auto row = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("{:<12} {}\n", name, value);
  };
  row("prefill", series_text(r.prefill, options.n_prompt));
  row("decode", series_text(r.decode, options.n_decode));
  row("experts", fmt::format("hit rate {:.1f} %, {} read per token, stalled {:.3f} s of {:.3f} s",
                             r.hit_rate() * 100, bytes_text(r.bytes_read_per_token()), r.stall_seconds(),
                             r.stall_seconds() + r.compute_seconds()));
  row("one token", fmt::format("{} (trunk {}, experts {}, cache {}, state {})", bytes_text(r.token.total()),
                               bytes_text(r.token.trunk), bytes_text(r.token.experts), bytes_text(r.token.kv),
                               bytes_text(r.token.state)));
  row("memory",
      fmt::format("{}/s in decode, {:.1f} % of the {}/s that {} threads read", bytes_text(r.memory_rate()),
                  r.memory_share() * 100, bytes_text(r.bandwidth.bytes_per_second), r.bandwidth.n_threads));
  row("peak", fmt::format("{} resident", bytes_text(static_cast<double>(r.memory.peak_bytes))));
  row("load", fmt::format("{:.2f} s", r.load_seconds));
  row("logits", hash_text(r.logits_hash));
  return text;
}

Json result_json(const BenchOptions& options, const BenchResult& r) {
  return {{"model", options.model.model},
          {"backend", r.backend},
          {"precision", options.model.precision},
          {"kv", options.model.kv},
          {"ctx_size", r.ctx_size},
          {"n_prompt", options.n_prompt},
          {"n_decode", options.n_decode},
          {"n_repeat", options.n_repeat},
          {"seed", options.seed},
          {"load_seconds", r.load_seconds},
          {"prefill_tokens_per_second", r.prefill.json()},
          {"decode_tokens_per_second", r.decode.json()},
          {"hit_rate", r.hit_rate()},
          {"bytes_read_per_token", r.bytes_read_per_token()},
          {"stall_seconds", r.stall_seconds()},
          {"compute_seconds", r.compute_seconds()},
          {"token_bytes",
           {{"trunk", r.token.trunk},
            {"experts", r.token.experts},
            {"kv", r.token.kv},
            {"state", r.token.state},
            {"total", r.token.total()}}},
          {"memory_bytes_per_second", r.memory_rate()},
          {"memory_peak_bytes_per_second", r.bandwidth.bytes_per_second},
          {"memory_share", r.memory_share()},
          {"peak_rss_bytes", r.memory.peak_bytes},
          {"logits_hash", hash_text(r.logits_hash)}};
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
  app.add_flag("--json", options.json, "One JSON object");
  app.footer(
      "Tokens are random. Each repetition starts from an empty context; the median counts, the spread says "
      "how far to\n"
      "trust it. All repetitions must end in the same logits.\n"
      "`one token` is what a decoded token must read: the trunk but for the embedding table, the experts it "
      "uses, the\n"
      "cache at the middle of the run, the recurrent state. `memory` is that times tok/s, beside a probe of "
      "this "
      "machine.\n\n"
      "Examples:\n"
      "  moeflux bench models/demo\n"
      "  moeflux bench models/demo -p 128 -n 32 -r 3 -t 1 --json\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  if (options.n_prompt + options.n_decode == 0)
    fail(ErrorCode::InvalidArgument, "nothing to measure: both -p and -n are 0");
  const BenchResult result = run_bench(options);
  if (options.json) {
    write_json(result_json(options, result));
  } else {
    write_out(table(options, result));
  }
  return kExitOk;
}

}  // namespace moeflux::cli
