#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/common.h"
#include "cli/fail.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/json_out.h"
#include "cli/safetensors_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

struct LogitsOptions {
  ModelOptions model;
  std::optional<std::string> tokens, tokens_file;
  std::string out;
  bool hidden = false;
  bool decode = false;
  bool json = false;
};

std::vector<TokenId> read_tokens(const LogitsOptions& options) {
  if (options.tokens) return parse_token_ids(*options.tokens, "--tokens");
  if (options.tokens_file)
    return parse_token_ids(read_text_file(*options.tokens_file, "tokens file"), *options.tokens_file);
  fail(ErrorCode::InvalidArgument, "no tokens: give --tokens 1,2,3 or --tokens-file FILE");
}

// "logits", then hidden.0 (the embedding) to hidden.L (after the final norm).
std::vector<MatrixShape> shapes(const ModelInfo& info, std::int64_t n_tokens, bool hidden) {
  std::vector<MatrixShape> list = {{"logits", n_tokens, info.vocab_size}};
  for (std::int64_t i = 0; hidden && i <= info.n_layers; ++i)
    list.push_back({fmt::format("hidden.{}", i), n_tokens, info.hidden_dim});
  return list;
}

void compute(Session& session, const std::vector<TokenId>& tokens, const LogitsOptions& options,
             SafetensorsWriter& writer) {
  EvaluateOptions evaluate;
  evaluate.one_at_a_time = options.decode;
  evaluate.on_logits = [&](std::int64_t position, std::span<const float> logits) {
    writer.write_row(0, position, logits);
  };
  if (options.hidden) {
    evaluate.on_hidden = [&](std::int64_t layer, std::int64_t position, std::span<const float> hidden) {
      writer.write_row(static_cast<std::size_t>(layer) + 1, position, hidden);
    };
  }
  session.evaluate(tokens, evaluate);
}

int write_logits(LogitsOptions options) {
  const std::vector<TokenId> tokens = read_tokens(options);
  const auto n_tokens = static_cast<std::int64_t>(tokens.size());
  if (options.model.ctx_size == 0) options.model.ctx_size = n_tokens;
  const std::unique_ptr<Engine> engine = open_engine(options.model);
  const std::unique_ptr<Session> session = open_session(*engine, options.model);
  const ModelInfo& info = engine->info();
  SafetensorsWriter writer(options.out, shapes(info, n_tokens, options.hidden));
  {
    const InterruptGuard guard(*session);
    note(mode_line(*engine, *session, options.model));
    compute(*session, tokens, options, writer);
  }
  writer.commit();

  const SessionStats& stats = session->stats();
  note(closing_line(stats));
  if (options.json) {
    write_json({{"out", options.out},
                {"file_bytes", writer.file_bytes()},
                {"n_tokens", n_tokens},
                {"vocab_size", info.vocab_size},
                {"hidden_dim", info.hidden_dim},
                {"n_hidden", options.hidden ? info.n_layers + 1 : 0},
                {"decode", options.decode},
                {"precision", options.model.precision},
                {"logits_hash", hash_text(stats.logits_hash)},
                {"stats", stats_json(stats)}});
  } else {
    write_out(fmt::format(
        "{}: logits [{}, {}]{}, {}, last logits {}\n", options.out, n_tokens, info.vocab_size,
        options.hidden ? fmt::format(", hidden.0..{} [{}, {}]", info.n_layers, n_tokens, info.hidden_dim)
                       : "",
        bytes_text(static_cast<double>(writer.file_bytes())), hash_text(stats.logits_hash)));
  }
  return kExitOk;
}

}  // namespace

int verb_logits(Arguments arguments) {
  LogitsOptions options;
  CLI::App app("Writes the logits of every position to a file.", "moeflux logits");
  add_model_argument(app, options.model.model);
  CLI::Option* tokens = app.add_option("--tokens", options.tokens, "Token ids: 1,2,3")->type_name("IDS");
  app.add_option("--tokens-file", options.tokens_file,
                 "File with token ids, separated by commas or white space")
      ->type_name("FILE")
      ->excludes(tokens);
  app.add_option("-o,--out", options.out, "The safetensors file to write (replaced when it exists)")
      ->type_name("FILE")
      ->required();
  app.add_flag("--hidden", options.hidden, "Also the residual stream after the embedding and each layer");
  app.add_flag("--decode", options.decode, "One token at a time instead of prefill: the same bytes");
  add_ctx_option(app, options.model);
  add_engine_options(app, options.model);
  app.add_flag("--json", options.json, "One JSON object with what was written");
  app.footer(
      "Tensors, all f32: logits [T, V]; with --hidden also hidden.0 (after the embedding) to hidden.L (after "
      "the\n"
      "last layer and the final norm), each [T, D]. This is how to compare with another implementation.\n\n"
      "Examples:\n"
      "  moeflux logits models/demo --tokens 39,437,78 --out logits.safetensors\n"
      "  moeflux logits models/demo --tokens-file ids.txt --out all.safetensors --hidden --precision "
      "exact\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  return write_logits(std::move(options));
}

}  // namespace moeflux::cli
