#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/common.h"
#include "cli/fail.h"
#include "cli/input.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

using Json = nlohmann::ordered_json;

struct TokenizeOptions {
  std::string model;
  std::optional<std::string> text, file, decode;
  bool ids = false;
  bool special = false;
  bool json = false;
};

Json token_json(const Tokenizer& tokenizer, TokenId token) {
  const std::string piece = tokenizer.token_text(token);
  Json object = {{"id", raw(token)}, {"text", piece}};
  if (!is_utf8(piece)) {  // part of a sequence: the text above says only that
    std::string hex;
    for (const char c : piece) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
    object["hex"] = hex;
  }
  return object;
}

void print_json(const Tokenizer& tokenizer, const std::vector<TokenId>& tokens, const std::string& text) {
  Json pieces = Json::array();
  for (const TokenId token : tokens) pieces.push_back(token_json(tokenizer, token));
  write_json({{"text", text}, {"n_tokens", tokens.size()}, {"ids", ids_json(tokens)}, {"tokens", pieces}});
}

int decode(const Tokenizer& tokenizer, const TokenizeOptions& options) {
  const std::vector<TokenId> tokens = parse_token_ids(*options.decode, "--decode");
  for (const TokenId token : tokens) {
    if (raw(token) < 0 || static_cast<std::size_t>(raw(token)) >= tokenizer.vocab_size())
      fail(ErrorCode::InvalidArgument, "--decode: token id {} is out of range: the tokenizer has {} ids",
           raw(token), tokenizer.vocab_size());
  }
  const std::string text = tokenizer.decode(tokens);
  if (options.json) {
    print_json(tokenizer, tokens, text);
  } else {
    // Exact bytes for programs, a line of its own for people.
    write_out(stdout_is_terminal() && !text.ends_with('\n') ? text + "\n" : text);
  }
  return kExitOk;
}

int encode(const Tokenizer& tokenizer, const TokenizeOptions& options) {
  const std::string text = read_text(options.text, options.file, "text");
  const std::vector<TokenId> tokens = tokenizer.encode(text, options.special);
  if (options.json) {
    print_json(tokenizer, tokens, text);
  } else if (options.ids) {
    write_out(join_ids(tokens) + "\n");
  } else {
    std::string lines;
    for (const TokenId token : tokens)
      lines += fmt::format("{:>7} {}\n", raw(token), quote_bytes(tokenizer.token_text(token)));
    write_out(lines);
  }
  return kExitOk;
}

}  // namespace

int verb_tokenize(Arguments arguments) {
  TokenizeOptions options;
  CLI::App app("Turns text into token ids, or ids into text.", "moeflux tokenize");
  add_model_argument(app, options.model);
  CLI::Option* text =
      app.add_option("TEXT", options.text, "The text; without it and -f, standard input")->type_name("");
  CLI::Option* file = app.add_option("-f,--file", options.file, "Read the text from a file")
                          ->type_name("FILE")
                          ->excludes(text);
  CLI::Option* ids = app.add_flag("--ids", options.ids, "Print the ids alone, separated by commas");
  app.add_option("--decode", options.decode, "Print the text of these ids (1,2,3)")
      ->type_name("IDS")
      ->excludes(text)
      ->excludes(file)
      ->excludes(ids);
  app.add_flag("--special", options.special, "Read special tokens in the text, such as <|im_start|>");
  app.add_flag("--json", options.json, "One JSON object: text, n_tokens, ids, tokens");
  app.footer(
      "Prints one token per line: the id and the text it stands for. Only the folder's tokenizer.json is "
      "read;\n"
      "the text is taken byte for byte, a newline at its end included.\n\n"
      "Examples:\n"
      "  moeflux tokenize models/demo \"To be, or not\"\n"
      "  moeflux tokenize models/demo -f play.txt --ids > play.ids\n"
      "  moeflux tokenize models/demo --decode 39,437,78\n");
  if (!parse(app, std::move(arguments))) return kExitOk;

  const Tokenizer tokenizer = Tokenizer::open(options.model);
  return options.decode ? decode(tokenizer, options) : encode(tokenizer, options);
}

}  // namespace moeflux::cli
