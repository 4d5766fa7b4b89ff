// Text from a prompt: what `run` and `demo` have in common.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/common.h"

namespace moeflux::cli {

// Values that were not given come from the model's generation_config.json.
struct GenerationOptions {
  std::int64_t max_tokens = -1;
  std::optional<double> temperature;
  std::optional<std::int64_t> top_k;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repeat_penalty;
  std::optional<double> frequency_penalty;
  std::optional<double> presence_penalty;
  std::optional<std::int64_t> repeat_last_n;
  std::string seed = "-1";
  bool ignore_stop = false;
  bool special = false;
  bool echo = false;
  bool json = false;
};

void add_generation_options(CLI::App& app, GenerationOptions& options);

// Opens the model, streams the text to standard output (or writes one JSON object at the end) between the
// mode line and the closing line on standard error. Returns the exit code.
int run_generation(const ModelOptions& model, const GenerationOptions& options, const std::string& prompt);

}  // namespace moeflux::cli
