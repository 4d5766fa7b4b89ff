#include <fmt/format.h>
#include <moeflux/simulate.h>

#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cli/common.h"
#include "cli/fail.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

// "5%" or "0.05". Whether it makes sense is the simulation's to say.
double parse_share(std::string_view text) {
  const bool percent = text.ends_with('%');
  const std::string_view digits = percent ? text.substr(0, text.size() - 1) : text;
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.empty())
    fail(ErrorCode::InvalidArgument, "--cache: \"{}\" is no share such as 25% or 0.25", text);
  return percent ? value / 100 : value;
}

std::vector<double> parse_shares(std::string_view text) {
  std::vector<double> shares;
  while (true) {
    const std::size_t comma = text.find(',');
    shares.push_back(parse_share(text.substr(0, comma)));
    if (comma == std::string_view::npos) return shares;
    text.remove_prefix(comma + 1);
  }
}

std::string table(const Simulation& simulation) {
  std::string text = fmt::format("{}{} layers of {} experts, {} tokens, {} requests\n\n",
                                 simulation.model.empty() ? "" : simulation.model + ": ", simulation.n_layers,
                                 simulation.n_experts, simulation.n_steps, simulation.n_requests);
  text += fmt::format("{:>8} {:>8} {:>8} {:>8} {:>8}\n", "cache", "experts", "ours", "LRU", "Belady");
  for (const SimulationRow& row : simulation.rows)
    text += fmt::format("{:>8} {:>8} {:>8.3f} {:>8.3f} {:>8.3f}\n", fmt::format("{:.4g} %", row.cache * 100),
                        row.n_slots, row.ours, row.lru, row.belady);
  return text;
}

nlohmann::ordered_json simulation_json(const Simulation& simulation) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const SimulationRow& row : simulation.rows)
    rows.push_back({{"cache", row.cache},
                    {"n_slots", row.n_slots},
                    {"ours", row.ours},
                    {"lru", row.lru},
                    {"belady", row.belady}});
  return {{"model", simulation.model},           {"n_layers", simulation.n_layers},
          {"n_experts", simulation.n_experts},   {"n_steps", simulation.n_steps},
          {"n_requests", simulation.n_requests}, {"rows", std::move(rows)}};
}

}  // namespace

int verb_simulate(Arguments arguments) {
  std::string trace;
  std::string cache = "5%,10%,25%,50%";
  bool json = false;
  CLI::App app("Hit rates of an expert cache on a recorded run.", "moeflux simulate");
  app.add_option("TRACE", trace, "Routing trace, as --trace writes it")->required()->type_name("");
  app.add_option("--cache", cache, "Shares of all experts that fit, separated by commas")
      ->type_name("LIST")
      ->capture_default_str();
  app.add_flag("--json", json, "One JSON object; hit rates from 0 to 1");
  app.footer(
      "ours: the policy of the engine. LRU: least recently used. Belady: knowing the future, what none can "
      "beat.\n\n"
      "Examples:\n"
      "  moeflux simulate run.jsonl\n"
      "  moeflux simulate run.jsonl --cache 10%,0.3 --json\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  std::error_code ignored;
  if (!std::filesystem::exists(trace, ignored))
    fail(ErrorCode::InvalidArgument, "{}: there is no such file", trace);
  const Simulation simulation = simulate(trace, parse_shares(cache));
  if (json) {
    write_json(simulation_json(simulation));
  } else {
    write_out(table(simulation));
  }
  return kExitOk;
}

}  // namespace moeflux::cli
