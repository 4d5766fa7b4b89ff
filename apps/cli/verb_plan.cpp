#include <fmt/format.h>
#include <moeflux/plan.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "cli/common.h"
#include "cli/fail.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(std::uint64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

// Lines of a name and what there is to say of it.
struct Table {
  std::string text;
  void operator()(std::string_view name, const std::string& value) { text += fmt::format("{:<12} {}\n", name, value); }
};

std::string device_table(const Plan& p) {
  Table row;
  const MemorySplit& m = p.memory;
  const DeviceSplit& d = m.device;
  row("device", p.device.empty() ? "not here: no rates" : p.device);
  if (m.all_in_memory) {
    row("its memory", fmt::format("{} for everything", text_of(m.ram_bytes)));
    row("  trunk", text_of(m.trunk_bytes));
    row("  session", fmt::format("{} ({} positions, chunks of {})", text_of(m.session_bytes()), m.ctx_size, m.chunk_size));
    row("  other", text_of(m.other_bytes));
    row("  experts", fmt::format("{} for all {}", text_of(m.expert_bytes), m.n_experts));
  } else {
    row("its memory", text_of(d.vram_bytes));
    row("  trunk", text_of(d.trunk_bytes));
    row("  session", fmt::format("{} ({} positions, chunks of {})", text_of(d.session_bytes), m.ctx_size, m.chunk_size));
    row("  other", text_of(d.other_bytes));
    row("  experts", fmt::format("{} for {} of {}, {} to pass through, {} each", text_of(d.n_slots * d.slot_bytes), d.n_slots - d.n_spare, m.n_experts, d.n_spare,
                                 text_of(d.slot_bytes)));
    row("main memory", text_of(m.ram_bytes));
    row("  other", text_of(m.other_bytes));
    row("  experts", fmt::format("{} for {} of {}", text_of(m.expert_bytes), m.n_slots, m.n_experts));
    if (d.vram_bytes < d.least_bytes) row("too low", fmt::format("at least {} of device memory are needed (--vram)", text_of(d.least_bytes)));
    if (m.ram_bytes < m.least_bytes) row("too low", fmt::format("at least {} of main memory are needed (--ram)", text_of(m.least_bytes)));
    if (!p.fits()) return row.text;
    row("least", fmt::format("{} of device memory and {} of main memory would do", text_of(d.least_bytes), text_of(m.least_bytes)));
  }
  row("hit rate", fmt::format("{:.1f} % on the device, {:.1f} % in memory ({})", 100 * p.device_hit_rate, 100 * p.hit_rate, p.hit_rate_source));
  row("one token", fmt::format("{} from device memory, {} over the link, {} of them from disk", bytes_text(p.token_memory_bytes), bytes_text(p.token_link_bytes),
                               bytes_text(p.token_disk_bytes)));
  if (p.device.empty()) return row.text;
  row("machine", fmt::format("device memory {}/s, link {}/s{}", bytes_text(p.speed.device_bytes_per_second), bytes_text(p.speed.link_bytes_per_second),
                             p.hit_rate < 1 ? fmt::format(", disk {}/s{}", bytes_text(p.speed.disk_bytes_per_second), p.speed.disk_direct ? "" : " (through the page cache)") : ""));
  row("decode", fmt::format("at most {:.1f} tok/s, {:.1f} when all is read ahead; the limit is {}", p.decode_dependent, p.decode_ahead, p.decode_limit));
  row("prefill", "not estimated for a device");
  return row.text;
}

std::string table(const Plan& p, std::int64_t n_prompt) {
  if (p.on_device) return device_table(p);
  Table row;
  if (!p.note.empty()) row("device", p.note);
  const MemorySplit& m = p.memory;
  row("ceiling", text_of(m.ram_bytes));
  row("  trunk", text_of(m.trunk_bytes));
  row("  session", fmt::format("{} (cache {} for {} positions, state {}, activations {} for chunks of {})", text_of(m.session_bytes()),
                               text_of(m.kv_bytes), m.ctx_size, text_of(m.state_bytes), text_of(m.activation_bytes), m.chunk_size));
  row("  other", text_of(m.other_bytes));
  row("  experts", fmt::format("{} for {} of {} ({:.1f} %), {} each", text_of(m.expert_bytes), m.n_slots, m.n_experts, 100 * m.cached_share(),
                               text_of(m.slot_bytes)));
  if (m.ram_bytes < m.least_bytes) {
    row("too low", fmt::format("at least {} is needed", text_of(m.least_bytes)));
    return row.text;
  }
  row("least", fmt::format("{} would do", text_of(m.least_bytes)));
  row("hit rate", fmt::format("{:.1f} % ({})", 100 * p.hit_rate, p.hit_rate_source));
  row("machine", fmt::format("memory {}/s by {} threads, disk {}/s{}, arithmetic {:.0f} GOP/s", bytes_text(p.speed.memory_bytes_per_second),
                             p.speed.n_threads, bytes_text(p.speed.disk_bytes_per_second), p.speed.disk_direct ? "" : " (through the page cache)",
                             p.speed.operations_per_second / 1e9));
  row("one token", fmt::format("{} from memory, {} from disk", bytes_text(p.token_memory_bytes), bytes_text(p.token_disk_bytes)));
  row("decode", fmt::format("at most {:.1f} tok/s, {:.1f} when all is read ahead; the limit is {}", p.decode_dependent, p.decode_ahead, p.decode_limit));
  row("prefill", fmt::format("at most {:.0f} tok/s for {} tokens; the limit is {} (disk {:.2f} s, arithmetic {:.2f} s)", p.prefill, n_prompt,
                             p.prefill_limit, p.prompt_disk_seconds, p.prompt_compute_seconds));
  return row.text;
}

Json memory_json(const MemorySplit& m) {
  return {{"ram_bytes", m.ram_bytes},
          {"trunk_bytes", m.trunk_bytes},
          {"kv_bytes", m.kv_bytes},
          {"state_bytes", m.state_bytes},
          {"activation_bytes", m.activation_bytes},
          {"other_bytes", m.other_bytes},
          {"expert_bytes", m.expert_bytes},
          {"slot_bytes", m.slot_bytes},
          {"experts_in_memory", m.n_slots},
          {"experts", m.n_experts},
          {"least_bytes", m.least_bytes},
          {"ctx_size", m.ctx_size},
          {"chunk_size", m.chunk_size},
          {"all_in_memory", m.all_in_memory}};
}

// A device's plan has no rates where the device is not here, and none of prefill.
Json device_json(const Plan& p, Json json) {
  const DeviceSplit& d = p.memory.device;
  json["device"] = {{"name", p.device},
                    {"vram_bytes", p.memory.all_in_memory ? p.memory.ram_bytes : d.vram_bytes},
                    {"slots", d.n_slots},
                    {"spare_slots", d.n_spare},
                    {"least_bytes", d.least_bytes},
                    {"hit_rate", p.device_hit_rate}};
  if (!p.fits()) return json;
  json["decode"] = {{"memory_bytes_per_token", p.token_memory_bytes}, {"link_bytes_per_token", p.token_link_bytes}, {"disk_bytes_per_token", p.token_disk_bytes}};
  if (p.device.empty()) return json;
  json["machine"] = {{"device_bytes_per_second", p.speed.device_bytes_per_second},
                     {"link_bytes_per_second", p.speed.link_bytes_per_second},
                     {"disk_bytes_per_second", p.speed.disk_bytes_per_second}};
  json["decode"]["tokens_per_second"] = p.decode_dependent;
  json["decode"]["tokens_per_second_ahead"] = p.decode_ahead;
  json["decode"]["limit"] = p.decode_limit;
  return json;
}

Json plan_json(const Plan& p, std::int64_t n_prompt) {
  Json json = {{"fits", p.fits()}, {"memory", memory_json(p.memory)}, {"hit_rate", p.hit_rate}, {"hit_rate_source", p.hit_rate_source}};
  if (p.on_device) return device_json(p, std::move(json));
  if (!p.note.empty()) json["note"] = p.note;
  if (!p.fits()) return json;
  json["machine"] = {{"memory_bytes_per_second", p.speed.memory_bytes_per_second},
                     {"disk_bytes_per_second", p.speed.disk_bytes_per_second},
                     {"disk_direct", p.speed.disk_direct},
                     {"operations_per_second", p.speed.operations_per_second},
                     {"threads", p.speed.n_threads}};
  json["decode"] = {{"memory_bytes_per_token", p.token_memory_bytes},
                    {"disk_bytes_per_token", p.token_disk_bytes},
                    {"tokens_per_second", p.decode_dependent},
                    {"tokens_per_second_ahead", p.decode_ahead},
                    {"limit", p.decode_limit}};
  json["prefill"] = {{"n_prompt", n_prompt},
                     {"tokens_per_second", p.prefill},
                     {"disk_seconds", p.prompt_disk_seconds},
                     {"compute_seconds", p.prompt_compute_seconds},
                     {"limit", p.prefill_limit}};
  return json;
}

}  // namespace

int verb_plan(Arguments arguments) {
  ModelOptions model;
  PlanOptions options;
  bool json = false;
  CLI::App app("Says what a model will take of this machine and how fast it can be.", "moeflux plan");
  add_model_argument(app, model.model);
  app.add_option("-p,--prompt", options.n_prompt, "Tokens of the prompt that prefill is estimated for")->check(at_least(1))->capture_default_str();
  app.add_option("--trace", options.trace, "Recorded routing, as --trace of `run` writes it: a real hit rate instead of the worst case")
      ->check(CLI::ExistingFile)
      ->type_name("FILE");
  add_ctx_option(app, model);
  add_engine_options(app, model);
  app.add_flag("--json", json, "One JSON object");
  app.footer(
      "Reads config.json, tokenizer.json and the headers of the weight files, nothing else, and looks at disk, memory and arithmetic of\n"
      "this machine for about a second. The rates are bounds: no run can be faster. With a CUDA device the plan is for that; --vram without one\n"
      "plans for a device with so much memory.\n\n"
      "Examples:\n"
      "  moeflux plan MODEL\n"
      "  moeflux plan MODEL --ram 16GB --ctx-size 32768 --kv f16\n"
      "  moeflux plan MODEL --vram 24GB --ram 64GB\n"
      "  moeflux plan MODEL --ram 8GB --trace routing.jsonl --json\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  options.engine = engine_options(model);
  const Plan plan = plan_model(options);
  if (json) {
    write_json(plan_json(plan, options.n_prompt));
  } else {
    write_out(table(plan, options.n_prompt));
  }
  return plan.fits() ? kExitOk : kExitUserError;
}

}  // namespace moeflux::cli
