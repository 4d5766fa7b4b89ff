#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/common.h"
#include "cli/fail.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

struct Score {
  double nll = 0;  // mean of the window means
  std::int64_t n_windows = 0;
};

// -log softmax(logits)[target], in double.
double negative_log_likelihood(std::span<const float> logits, TokenId target) {
  const auto index = static_cast<std::size_t>(raw(target));
  if (index >= logits.size())
    fail(ErrorCode::InvalidModel, "the tokenizer gives token {}, the model has only {} logits", index,
         logits.size());
  double highest = -std::numeric_limits<double>::infinity();
  for (const float logit : logits) highest = std::max(highest, static_cast<double>(logit));
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - highest);
  return highest + std::log(sum) - static_cast<double>(logits[index]);
}

// Mean over the predictions inside one window: its tokens but the first.
double window_nll(Session& session, std::span<const TokenId> window) {
  double sum = 0;
  EvaluateOptions evaluate;
  evaluate.on_logits = [&](std::int64_t position, std::span<const float> logits) {
    sum += negative_log_likelihood(logits, window[static_cast<std::size_t>(position) + 1]);
  };
  const std::span<const TokenId> inputs = window.first(window.size() - 1);
  session.reset();
  session.evaluate(inputs, evaluate);
  return sum / static_cast<double>(inputs.size());
}

class Progress {
 public:
  explicit Progress(std::int64_t total) : total_(total) {}

  void show(const Score& score) {
    if (!line_.due()) return;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const double left =
        seconds / static_cast<double>(score.n_windows) * static_cast<double>(total_ - score.n_windows);
    const auto whole = static_cast<std::int64_t>(left + 0.5);
    line_.show(fmt::format("window {}/{}, perplexity so far {:.4f}, {}:{:02} left", score.n_windows, total_,
                           std::exp(score.nll), whole / 60, whole % 60));
  }

 private:
  const std::int64_t total_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  StatusLine line_;
};

// Consecutive windows of ctx + 1 tokens that share one token with the next; the short tail is left out.
Score score_windows(Session& session, std::span<const TokenId> tokens, std::size_t ctx) {
  const std::size_t n_windows = (tokens.size() - 1) / ctx;
  Progress progress(static_cast<std::int64_t>(n_windows));
  Score score;
  double sum = 0;
  for (std::size_t i = 0; i < n_windows; ++i) {
    sum += window_nll(session, tokens.subspan(i * ctx, ctx + 1));
    ++score.n_windows;
    score.nll = sum / static_cast<double>(score.n_windows);
    progress.show(score);
  }
  return score;
}

int measure(const ModelOptions& model, const std::string& text, bool json) {
  const std::unique_ptr<Engine> engine = open_engine(model);
  const std::vector<TokenId> tokens = need_tokenizer(*engine, "perplexity").encode(text);
  const auto ctx = static_cast<std::size_t>(model.ctx_size);
  if (tokens.size() <= ctx)
    fail(ErrorCode::InvalidArgument,
         "the text has {} tokens, one window takes {}: give more text or a smaller --ctx", tokens.size(),
         ctx + 1);
  const std::unique_ptr<Session> session = open_session(*engine, model);
  Score score;
  {
    const InterruptGuard guard(*session);
    note(mode_line(*engine, *session, model));
    note_memory(*engine);
    score = score_windows(*session, tokens, ctx);
  }
  session->finish_trace();
  note(closing_line(session->stats()));
  if (json) {
    write_json({{"perplexity", std::exp(score.nll)},
                {"nll", score.nll},
                {"tokens", tokens.size()},
                {"windows", score.n_windows},
                {"ctx", model.ctx_size},
                {"predictions", score.n_windows * model.ctx_size},
                {"precision", model.precision},
                {"stats", stats_json(session->stats())}});
  } else {
    write_out(fmt::format("perplexity {:.5f} (nll {:.6f}, {} tokens, {} windows of {})\n",
                          std::exp(score.nll), score.nll, tokens.size(), score.n_windows, model.ctx_size));
  }
  return kExitOk;
}

}  // namespace

int verb_perplexity(Arguments arguments) {
  ModelOptions model;
  model.ctx_size = 1024;
  std::optional<std::string> file;
  bool json = false;
  CLI::App app("Measures how well a model predicts a text.", "moeflux perplexity");
  add_model_argument(app, model.model);
  app.add_option("-f,--file", file, "The text; without it, standard input")->type_name("FILE");
  // The bound keeps ctx + 1 and sizes derived from it far from overflow.
  app.add_option("-c,--ctx,--ctx-size", model.ctx_size, "Predictions per window")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 32))
      ->capture_default_str();
  add_engine_options(app, model);
  add_trace_option(app, model);
  app.add_flag("--json", json, "One JSON object: perplexity, nll, tokens, windows, ..");
  app.footer(
      "The whole text is tokenized and cut into consecutive windows of CTX+1 tokens with a stride of CTX; "
      "the\n"
      "context is empty at the start of each, the short tail is left out. Perplexity is exp(mean of the "
      "window\n"
      "means of the negative log-likelihoods).\n\n"
      "Examples:\n"
      "  moeflux perplexity models/demo -f text.txt\n"
      "  moeflux perplexity models/demo -f text.txt --ctx 256 --precision exact --json\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  return measure(model, read_text(std::nullopt, file, "text"), json);
}

}  // namespace moeflux::cli
