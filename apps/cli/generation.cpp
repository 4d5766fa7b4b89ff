#include "cli/generation.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <system_error>
#include <vector>

#include "cli/fail.h"
#include "cli/interrupt.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

// A number in [low, high]; "nan" and "inf" are numbers to CLI11, not to us.
CLI::Validator number_between(double low, double high, const std::string& name) {
  return CLI::Validator(
      [low, high, name](std::string& text) -> std::string {
        double value = 0;
        if (!CLI::detail::lexical_cast(text, value) || !std::isfinite(value) || value < low || value > high)
          return fmt::format("{} is no {}", text, name);
        return {};
      },
      "");
}

constexpr double kMaxDouble = std::numeric_limits<double>::max();

// -1 asks for a random one; it is printed, so that a run can be repeated.
std::uint64_t parse_seed(const std::string& text) {
  if (text == "-1") return std::random_device{}();
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc{} || end != text.data() + text.size())
    fail(ErrorCode::InvalidArgument, "--seed: {} is no integer from 0 to 2^64-1 (or -1 for a random one)",
         text);
  return seed;
}

SamplingParams sampling_of(const GenerationOptions& options, const SamplingParams& defaults) {
  SamplingParams sampling = defaults;
  sampling.temperature = options.temperature.value_or(defaults.temperature);
  sampling.top_k = options.top_k.value_or(defaults.top_k);
  sampling.top_p = options.top_p.value_or(defaults.top_p);
  sampling.min_p = options.min_p.value_or(defaults.min_p);
  sampling.repeat_penalty = options.repeat_penalty.value_or(defaults.repeat_penalty);
  sampling.frequency_penalty = options.frequency_penalty.value_or(defaults.frequency_penalty);
  sampling.presence_penalty = options.presence_penalty.value_or(defaults.presence_penalty);
  sampling.repeat_last_n = options.repeat_last_n.value_or(defaults.repeat_last_n);
  sampling.seed = parse_seed(options.seed);
  return sampling;
}

const char* reason_text(StopReason reason) {
  switch (reason) {
    case StopReason::MaxTokens:
      return "max_tokens";
    case StopReason::StopToken:
      return "stop_token";
    case StopReason::ContextFull:
      return "context_full";
    case StopReason::Cancelled:
      return "cancelled";
    case StopReason::Callback:
      return "callback";
  }
  return "unknown";
}

// Receives the generated tokens: streams or collects them.
class Output {
 public:
  explicit Output(bool collect) : collect_(collect) {}

  void put(std::string_view text) {
    if (text.empty()) return;
    ends_with_newline_ = text.back() == '\n';
    if (collect_) {
      text_ += text;
    } else {
      write_out(text);
    }
  }

  // An exception must not pass through the library's loop; rethrow_failure() has it.
  bool on_token(TokenId token, std::string_view text) noexcept {
    try {
      if (collect_) tokens_.push_back(token);
      put(text);
      return true;
    } catch (...) {
      failure_ = std::current_exception();
      return false;
    }
  }

  void rethrow_failure() const {
    if (failure_) std::rethrow_exception(failure_);
  }
  // The shell's prompt or the closing line starts on a line of its own.
  void finish() {
    if (!collect_ && !ends_with_newline_) write_out("\n");
  }

  const std::string& text() const { return text_; }
  std::vector<TokenId>& tokens() { return tokens_; }

 private:
  const bool collect_;
  bool ends_with_newline_ = true;
  std::string text_;
  std::vector<TokenId> tokens_;
  std::exception_ptr failure_;
};

}  // namespace

void add_generation_options(CLI::App& app, GenerationOptions& options) {
  app.add_option("-n,--n-predict", options.max_tokens, "Tokens to generate; -1: until the model stops")
      ->check(at_least(-1))
      ->capture_default_str();
  app.add_option("--temp", options.temperature, "Temperature; 0: always the likeliest token")
      ->check(number_between(0, kMaxDouble, "temperature (0 or more)"));
  app.add_option("--top-k", options.top_k, "Keep the K likeliest tokens; 0: all");
  app.add_option("--top-p", options.top_p, "Keep the likeliest tokens that sum up to P; 1: all")
      ->check(number_between(0, kMaxDouble, "probability"));
  app.add_option("--min-p", options.min_p,
                 "Keep tokens with at least P times the best one's probability; 0: all")
      ->check(number_between(0, 1, "probability (0 to 1)"));
  app.add_option("--repeat-penalty", options.repeat_penalty, "Penalty on recent tokens; 1: none")
      ->check(number_between(std::numeric_limits<double>::min(), kMaxDouble, "penalty (more than 0)"));
  app.add_option("--frequency-penalty", options.frequency_penalty,
                 "Penalty per occurrence of a recent token; 0: none")
      ->check(number_between(-kMaxDouble, kMaxDouble, "number"));
  app.add_option("--presence-penalty", options.presence_penalty, "Penalty on tokens that occurred; 0: none")
      ->check(number_between(-kMaxDouble, kMaxDouble, "number"));
  app.add_option("--repeat-last-n", options.repeat_last_n, "Tokens the penalties look at; 0: none, -1: all")
      ->check(at_least(-1));
  app.add_option("-s,--seed", options.seed, "Same seed, same text; -1: random")
      ->type_name("INT")
      ->capture_default_str();
  app.add_flag("--ignore-eos", options.ignore_stop, "Go on past stop tokens");
  app.add_flag("--special", options.special, "Read special tokens in the prompt, such as <|im_start|>");
  app.add_flag("--json", options.json, "One JSON object at the end instead of streamed text");
}

int run_generation(const ModelOptions& model, const GenerationOptions& options, const std::string& prompt) {
  if (prompt.empty()) fail(ErrorCode::InvalidArgument, "the prompt is empty");
  const std::unique_ptr<Engine> engine = open_engine(model);
  const std::vector<TokenId> tokens = need_tokenizer(*engine, "run").encode(prompt, options.special);
  if (tokens.empty()) fail(ErrorCode::InvalidArgument, "the prompt gives no tokens");
  const std::unique_ptr<Session> session = open_session(*engine, model);

  Output output(options.json);
  GenerateOptions generate;
  generate.max_tokens = options.max_tokens;
  generate.sampling = sampling_of(options, engine->default_sampling());
  generate.ignore_stop = options.ignore_stop;
  generate.on_token = [&](TokenId token, std::string_view text) { return output.on_token(token, text); };
  GenerateResult result;
  {
    const InterruptGuard guard(*session);
    note(fmt::format("{} | seed {}", mode_line(*engine, *session, model), generate.sampling.seed));
    note_memory(*engine);
    if (options.echo && !options.json) output.put(prompt);
    result = session->generate(tokens, generate);
  }
  output.rethrow_failure();
  output.finish();
  session->finish_trace();

  const SessionStats& stats = session->stats();
  note(fmt::format("{} | {}", closing_line(stats), reason_text(result.reason)));
  if (options.json) {
    // A stop token is not part of the text.
    std::vector<TokenId>& generated = output.tokens();
    generated.resize(std::min(generated.size(), static_cast<std::size_t>(result.n_tokens)));
    write_json({{"model", folder_name(model.model)},
                {"text", output.text()},
                {"tokens", ids_json(generated)},
                {"prompt_tokens", ids_json(tokens)},
                {"stop_reason", reason_text(result.reason)},
                {"seed", generate.sampling.seed},
                {"stats", stats_json(stats)}});
  }
  return result.reason == StopReason::Cancelled ? kExitInterrupted : kExitOk;
}

}  // namespace moeflux::cli
