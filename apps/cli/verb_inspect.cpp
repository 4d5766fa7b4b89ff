#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/common.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

using Formats = std::map<std::string, std::uint64_t>;

std::string exact_bytes(std::uint64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

// "396.30 B", "1.24 M".
std::string count_text(std::uint64_t n) {
  const auto value = static_cast<double>(n);
  return value < 1e8 ? fmt::format("{:.2f} M", value / 1e6) : fmt::format("{:.2f} B", value / 1e9);
}

std::string formats_text(const Formats& formats) {
  std::vector<std::pair<std::string, std::uint64_t>> sorted(formats.begin(), formats.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  for (const auto& [name, bytes] : sorted)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, exact_bytes(bytes));
  return text.empty() ? "none" : text;
}

// "6 delta-net, 2 attention".
std::string mixers_text(const std::vector<std::string>& mixers) {
  std::vector<std::pair<std::string, int>> counts;
  for (const std::string& mixer : mixers) {
    const auto found =
        std::find_if(counts.begin(), counts.end(), [&](const auto& c) { return c.first == mixer; });
    if (found == counts.end()) {
      counts.emplace_back(mixer, 1);
    } else {
      ++found->second;
    }
  }
  std::string text;
  for (const auto& [name, n] : counts) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", n, name);
  return text;
}

// "missing 12 tensors: a, b, c, .."
std::string list_text(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", names[i]);
  return names.size() > kShown ? text + ", .." : text;
}

std::string table(const ModelInfo& info) {
  std::string text;
  const auto row = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("{:<12} {}\n", name, value);
  };
  row("model", info.path.string());
  row("family", info.model_type == info.family
                    ? info.family
                    : fmt::format("{} (model_type {})", info.family, info.model_type));
  row("layers",
      fmt::format("{} ({}), {} with experts", info.n_layers, mixers_text(info.mixers), info.n_moe_layers));
  row("shape", fmt::format("hidden {}, vocabulary {}, context {}", info.hidden_dim, info.vocab_size,
                           info.max_context));
  row("attention",
      fmt::format("{} heads, {} key/value heads of {}", info.n_heads, info.n_kv_heads, info.head_dim));
  row("experts", fmt::format("{} per layer, {} used, width {}{}", info.n_experts, info.top_k, info.expert_dim,
                             info.shared_dim > 0 ? fmt::format(", shared expert {}", info.shared_dim) : ""));
  row("parameters", fmt::format("{}, {} of them used per token, {} in the trunk", count_text(info.n_params),
                                count_text(info.n_active_params), count_text(info.n_trunk_params)));
  row("trunk", fmt::format("{} ({})", exact_bytes(info.trunk_bytes), formats_text(info.trunk_formats)));
  row("all experts",
      fmt::format("{} ({})", exact_bytes(info.expert_bytes), formats_text(info.expert_formats)));
  row("one expert", exact_bytes(info.bytes_per_expert));
  row("per token",
      fmt::format("{} of experts, {} of key/value cache (f16)",
                  exact_bytes(info.active_expert_bytes_per_token), exact_bytes(info.kv_bytes_per_token_f16)));
  if (info.state_bytes > 0) row("state", fmt::format("{} per sequence", exact_bytes(info.state_bytes)));
  row("tokenizer", info.tokenizer.empty() ? "none" : info.tokenizer);
  row("missing", info.missing.empty()
                     ? "nothing"
                     : fmt::format("missing {} {}: {}", info.missing.size(),
                                   info.missing.size() == 1 ? "tensor or file" : "tensors or files",
                                   list_text(info.missing)));
  for (const std::string& warning : info.warnings) row("warning", warning);
  return text;
}

nlohmann::ordered_json info_json(const ModelInfo& info) {
  return {{"family", info.family},
          {"model_type", info.model_type},
          {"path", info.path.string()},
          {"n_layers", info.n_layers},
          {"mixers", info.mixers},
          {"n_moe_layers", info.n_moe_layers},
          {"hidden_dim", info.hidden_dim},
          {"vocab_size", info.vocab_size},
          {"n_heads", info.n_heads},
          {"n_kv_heads", info.n_kv_heads},
          {"head_dim", info.head_dim},
          {"n_experts", info.n_experts},
          {"top_k", info.top_k},
          {"expert_dim", info.expert_dim},
          {"shared_dim", info.shared_dim},
          {"max_context", info.max_context},
          {"n_params", info.n_params},
          {"n_trunk_params", info.n_trunk_params},
          {"n_active_params", info.n_active_params},
          {"trunk_bytes", info.trunk_bytes},
          {"trunk_bytes_per_token", info.trunk_bytes_per_token},
          {"expert_bytes", info.expert_bytes},
          {"bytes_per_expert", info.bytes_per_expert},
          {"active_expert_bytes_per_token", info.active_expert_bytes_per_token},
          {"kv_bytes_per_token_f16", info.kv_bytes_per_token_f16},
          {"state_bytes", info.state_bytes},
          {"trunk_formats", info.trunk_formats},
          {"expert_formats", info.expert_formats},
          {"tokenizer",
           info.tokenizer.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(info.tokenizer)},
          {"missing", info.missing},
          {"warnings", info.warnings}};
}

}  // namespace

int verb_inspect(Arguments arguments) {
  std::string model;
  bool json = false;
  CLI::App app("Says what a model folder holds.", "moeflux inspect");
  add_model_argument(app, model);
  app.add_flag("--json", json, "One JSON object; bytes as integers");
  app.footer(
      "Reads config.json and headers, not the weights. Missing tensors are listed and are no failure "
      "here.\n\n"
      "Examples:\n"
      "  moeflux inspect models/demo\n"
      "  moeflux inspect models/demo --json\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  const ModelInfo info = inspect_model(model);
  if (json) {
    write_json(info_json(info));
  } else {
    write_out(table(info));
  }
  return kExitOk;
}

}  // namespace moeflux::cli
