#include "cli/bench_report.h"

#include <fmt/format.h>

#include <algorithm>

namespace moeflux::cli {
namespace {

using Json = nlohmann::ordered_json;

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double share(double part, double whole) { return whole > 0 ? part / whole : 0; }

std::string series_text(const Series& series, std::int64_t n) {
  if (series.values.empty()) return "-";
  return fmt::format("{:.2f} tok/s (min {:.2f}, max {:.2f}; {} tokens, {} repetitions)", series.median(),
                     series.low(), series.high(), n, series.values.size());
}

std::string experts_text(const BenchResult& r, const PhaseTotals& t) {
  std::string text = fmt::format("hit rate {:.1f} %, {} read per token, {}/s from disk", t.hit_rate() * 100,
                                 bytes_text(t.bytes_per_token()), bytes_text(t.disk_rate()));
  if (r.disk.bytes_per_second > 0)
    text += fmt::format(" ({:.0f} % of the probe's {}/s)", 100 * share(t.disk_rate(), r.disk.bytes_per_second),
                        bytes_text(r.disk.bytes_per_second));
  return text + fmt::format(", stalled {:.3f} s of {:.3f} s", t.stall_seconds(), t.seconds());
}

std::string tiers_text(const BenchResult& r, const PhaseTotals& t, double memory_bytes, double reached) {
  const double n = static_cast<double>(t.device_hits + t.host_hits + t.disk_misses);
  std::string text = fmt::format("on the device {:.1f} %, in main memory {:.1f} %, on disk {:.1f} %; a token copies {} to the device and {} back, reads {} from disk",
                                 100 * share(static_cast<double>(t.device_hits), n), 100 * share(static_cast<double>(t.host_hits), n),
                                 100 * share(static_cast<double>(t.disk_misses), n), bytes_text(t.per_token(t.bytes_to_device)),
                                 bytes_text(t.per_token(t.bytes_to_host)), bytes_text(t.bytes_per_token()));
  if (t.cpu_experts > 0) text += fmt::format("; the processor computes {:.1f} experts a token", t.per_token(t.cpu_experts));
  if (const double bound = r.tier_bound(t, memory_bytes); bound > 0)
    text += fmt::format("; {}/s of the link's {}/s, {:.0f} % of the {:.1f} tok/s that link, disk and device memory allow{}, {:.0f} % of the {:.1f} where copies wait for routers",
                        bytes_text(t.rate(t.bytes_to_device)), bytes_text(r.gpu.to_device_bytes_per_second), 100 * share(reached, bound), bound,
                        t.cpu_experts > 0 ? " where the processor computes nothing" : "", 100 * share(reached, r.tier_bound_dependent(t, memory_bytes)), r.tier_bound_dependent(t, memory_bytes));
  return text + fmt::format("; stalled {:.3f} s of {:.3f} s", t.stall_seconds(), t.seconds());
}

Json tiers_json(const BenchResult& r, const PhaseTotals& t, double memory_bytes, double reached) {
  const double bound = r.tier_bound(t, memory_bytes);
  return {{"device_hits", t.device_hits},
          {"host_hits", t.host_hits},
          {"disk_misses", t.disk_misses},
          {"bytes_to_device_per_token", t.per_token(t.bytes_to_device)},
          {"bytes_to_host_per_token", t.per_token(t.bytes_to_host)},
          {"cpu_experts_per_token", t.per_token(t.cpu_experts)},
          {"bytes_to_device_per_second", t.rate(t.bytes_to_device)},
          {"bound_tokens_per_second", bound},
          {"share_of_bound", share(reached, bound)},
          {"bound_dependent_tokens_per_second", r.tier_bound_dependent(t, memory_bytes)},
          {"share_of_bound_dependent", share(reached, r.tier_bound_dependent(t, memory_bytes))}};
}

Json device_json(const BenchResult& r) {
  const DeviceSplit& d = r.split.device;
  return {{"vram_bytes", d.vram_bytes},
          {"vram_least_bytes", d.least_bytes},
          {"ram_least_bytes", r.split.least_bytes},
          {"fixed_bytes", d.fixed_bytes()},
          {"slot_bytes", d.slot_bytes},
          {"device_slots", d.n_slots},
          {"spare_slots", d.n_spare},
          {"host_slots", r.split.n_slots},
          {"link_to_device_bytes_per_second", r.gpu.to_device_bytes_per_second},
          {"link_to_host_bytes_per_second", r.gpu.to_host_bytes_per_second},
          {"memory_bytes_per_second", r.gpu.memory_bytes_per_second}};
}

std::string prefetch_text(const SessionStats& s) {
  std::string text = fmt::format("recall {:.1f} %, precision {:.1f} % ({} read ahead, {} used, {} evicted unused), {} steps with it, {} without",
                                 s.prefetch_recall() * 100, s.prefetch_precision() * 100, s.hints_issued, s.hints_used, s.hints_wasted,
                                 s.prefetch_steps_on, s.prefetch_steps_off);
  if (s.prefetch_on_ns > 0 && s.prefetch_off_ns > 0)
    text += fmt::format("; last trial {:.1f} ms with, {:.1f} ms without", static_cast<double>(s.prefetch_on_ns) / 1e6,
                        static_cast<double>(s.prefetch_off_ns) / 1e6);
  return text;
}

Json totals_json(const PhaseTotals& t) {
  return {{"tokens", t.tokens},
          {"seconds", t.seconds()},
          {"stall_seconds", t.stall_seconds()},
          {"hit_rate", t.hit_rate()},
          {"bytes_read_per_token", t.bytes_per_token()},
          {"disk_bytes_per_second", t.disk_rate()}};
}

Json prefetch_json(const SessionStats& s) {
  return {{"recall", s.prefetch_recall()},
          {"precision", s.prefetch_precision()},
          {"issued", s.hints_issued},
          {"used", s.hints_used},
          {"wasted", s.hints_wasted},
          {"steps_on", s.prefetch_steps_on},
          {"steps_off", s.prefetch_steps_off},
          {"trial_on_ms", static_cast<double>(s.prefetch_on_ns) / 1e6},
          {"trial_off_ms", static_cast<double>(s.prefetch_off_ns) / 1e6}};
}

Json bound_json(const BenchResult& r) {
  const double dependent = median_of(r.bound.dependent), ahead = median_of(r.bound.ahead);
  return {{"dependent_tokens_per_second", dependent},
          {"ahead_tokens_per_second", ahead},
          {"dependent_runs", r.bound.dependent},
          {"ahead_runs", r.bound.ahead},
          {"memory_bytes_per_token", r.bound.memory_bytes},
          {"disk_bytes_per_token", r.bound.disk_bytes},
          {"share_of_dependent", share(r.decode.median(), dependent)},
          {"share_of_ahead", share(r.decode.median(), ahead)}};
}

}  // namespace

double Series::low() const { return values.empty() ? 0 : *std::min_element(values.begin(), values.end()); }
double Series::high() const { return values.empty() ? 0 : *std::max_element(values.begin(), values.end()); }
double Series::median() const { return median_of(values); }
Json Series::json() const { return {{"median", median()}, {"min", low()}, {"max", high()}, {"runs", values}}; }

void PhaseTotals::add(const SessionStats& from, const SessionStats& to, bool decode) {
  tokens += decode ? to.decode_tokens - from.decode_tokens : to.prefill_tokens - from.prefill_tokens;
  ns += decode ? to.decode_ns - from.decode_ns : to.prefill_ns - from.prefill_ns;
  stall_ns += to.stall_ns - from.stall_ns;
  requests += to.expert_requests - from.expert_requests;
  hits += to.expert_hits - from.expert_hits;
  bytes_read += to.bytes_read - from.bytes_read;
  device_hits += to.device_hits - from.device_hits;
  host_hits += to.host_hits - from.host_hits;
  disk_misses += to.disk_misses - from.disk_misses;
  bytes_to_device += to.bytes_to_device - from.bytes_to_device;
  bytes_to_host += to.bytes_to_host - from.bytes_to_host;
  cpu_experts += to.cpu_experts - from.cpu_experts;
}

namespace {

// Seconds a token's copies and reads take, the slowest way; what the processor computed would have come over the link.
double copy_seconds(const BenchResult& r, const PhaseTotals& t) {
  const double to_device = t.per_token(t.bytes_to_device) + t.per_token(t.cpu_experts) * static_cast<double>(r.split.device.slot_bytes);
  return std::max({share(to_device, r.gpu.to_device_bytes_per_second), share(t.per_token(t.bytes_to_host), r.gpu.to_host_bytes_per_second),
                   share(t.bytes_per_token(), r.disk.bytes_per_second)});
}

}  // namespace

double BenchResult::tier_bound(const PhaseTotals& t, double memory_bytes) const {
  const double slowest = std::max(copy_seconds(*this, t), share(memory_bytes, gpu.memory_bytes_per_second));
  return slowest > 0 ? 1 / slowest : 0;
}

double BenchResult::tier_bound_dependent(const PhaseTotals& t, double memory_bytes) const {
  const double sum = copy_seconds(*this, t) + share(memory_bytes, gpu.memory_bytes_per_second);
  return sum > 0 ? 1 / sum : 0;
}

double BenchResult::memory_rate() const { return decode.median() * token.total(); }
double BenchResult::memory_share() const { return share(memory_rate(), bandwidth.bytes_per_second); }
double BenchResult::weights_share() const {
  Series shares;
  for (std::size_t i = 0; i < std::min(decode.values.size(), weights_rate.values.size()); ++i)
    shares.values.push_back(share(decode.values[i] * token.total(), weights_rate.values[i]));
  return shares.median();
}

std::string bench_table(const BenchOptions& options, const BenchResult& r) {
  std::string text;
  const auto row = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("{:<12} {}\n", name, value);
  };
  const bool streamed = !r.split.all_in_memory;
  row("prefill", series_text(r.prefill, options.n_prompt));
  const auto experts = [&](const PhaseTotals& t, double memory_bytes, double reached) {
    row("  experts", r.tiered() ? tiers_text(r, t, memory_bytes, reached) : experts_text(r, t));
  };
  if (streamed && options.n_prompt > 0) experts(r.prefill_totals, 0, r.prefill.median());
  row("decode", series_text(r.decode, options.n_decode));
  if (streamed && options.n_decode > 0) experts(r.decode_totals, r.token.total(), r.decode.median());
  if (!streamed) row("experts", "hit rate 100.0 %, all in memory");
  if (streamed && r.stats.prefetch_steps_on > 0) row("  prefetch", prefetch_text(r.stats));
  row("one token", fmt::format("{} (trunk {}, experts {}, cache {}, state {})", bytes_text(r.token.total()),
                               bytes_text(r.token.trunk), bytes_text(r.token.experts), bytes_text(r.token.kv),
                               bytes_text(r.token.state)));
  if (!options.no_probe && r.bandwidth.bytes_per_second > 0)
    row("memory",
        fmt::format("{}/s in decode, {:.1f} % of the {}/s that {} threads read", bytes_text(r.memory_rate()),
                    r.memory_share() * 100, bytes_text(r.bandwidth.bytes_per_second), r.bandwidth.n_threads));
  if (!r.weights_rate.values.empty())
    row("  weights", fmt::format("{:.1f} % of what the same threads read from these weights around each decode ({}/s, min {}/s, max {}/s)",
                                 r.weights_share() * 100, bytes_text(r.weights_rate.median()), bytes_text(r.weights_rate.low()),
                                 bytes_text(r.weights_rate.high())));
  if (const double bound = median_of(r.bound.dependent); bound > 0) {
    const double ahead = median_of(r.bound.ahead);
    row("bytes only", fmt::format("{:.2f} tok/s dependent, {:.2f} ahead; decode is at {:.0f} % and {:.0f} % ({} from memory, {} from disk a token)",
                                  bound, ahead, 100 * share(r.decode.median(), bound), 100 * share(r.decode.median(), ahead),
                                  bytes_text(r.bound.memory_bytes), bytes_text(r.bound.disk_bytes)));
  }
  row("peak", fmt::format("{} resident, ceiling {}", bytes_text(static_cast<double>(r.memory.peak_bytes)),
                          bytes_text(static_cast<double>(r.split.ram_bytes))));
  row("load", fmt::format("{:.2f} s", r.load_seconds));
  row("logits", hash_text(r.logits_hash));
  return text;
}

Json bench_json(const BenchOptions& options, const BenchResult& r) {
  const std::uint64_t requests = r.prefill_totals.requests + r.decode_totals.requests;
  const std::int64_t tokens = r.prefill_totals.tokens + r.decode_totals.tokens;
  const double stall = r.prefill_totals.stall_seconds() + r.decode_totals.stall_seconds();
  Json json = {{"model", options.model.model},
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
               {"hit_rate", share(static_cast<double>(r.prefill_totals.hits + r.decode_totals.hits), static_cast<double>(requests))},
               {"bytes_read_per_token",
                share(static_cast<double>(r.prefill_totals.bytes_read + r.decode_totals.bytes_read), static_cast<double>(tokens))},
               {"stall_seconds", stall},
               {"compute_seconds", r.prefill_totals.seconds() + r.decode_totals.seconds() - stall},
               {"prefill", totals_json(r.prefill_totals)},
               {"decode", totals_json(r.decode_totals)},
               {"prefetch", prefetch_json(r.stats)},
               {"token_bytes",
                {{"trunk", r.token.trunk},
                 {"experts", r.token.experts},
                 {"kv", r.token.kv},
                 {"state", r.token.state},
                 {"total", r.token.total()}}},
               {"memory_bytes_per_second", r.memory_rate()},
               {"memory_peak_bytes_per_second", r.bandwidth.bytes_per_second},
               {"memory_share", r.memory_share()},
               {"weights_bytes_per_second", r.weights_rate.json()},
               {"weights_share", r.weights_share()},
               {"disk_peak_bytes_per_second", r.disk.bytes_per_second},
               {"experts_in_memory", r.split.n_slots},
               {"expert_bytes", r.split.expert_bytes},
               {"experts", r.split.n_experts},
               {"chunk_size", r.split.chunk_size},
               {"ram_bytes", r.split.ram_bytes},
               {"peak_rss_bytes", r.memory.peak_bytes},
               {"logits_hash", hash_text(r.logits_hash)}};
  if (requests == 0) json["hit_rate"] = 1;
  if (r.tiered()) {
    json["device"] = device_json(r);
    json["prefill"]["tiers"] = tiers_json(r, r.prefill_totals, 0, r.prefill.median());
    json["decode"]["tiers"] = tiers_json(r, r.decode_totals, r.token.total(), r.decode.median());
  }
  if (!r.bound.dependent.empty()) json["bytes_only"] = bound_json(r);
  return json;
}

}  // namespace moeflux::cli
