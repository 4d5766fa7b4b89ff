#include <optional>
#include <string>

#include "cli/generation.h"
#include "cli/input.h"

namespace moeflux::cli {
namespace {

// Editors and `echo` end a text with a newline that nobody means as part of the prompt.
void drop_last_newline(std::string& text) {
  if (text.ends_with('\n')) text.pop_back();
  if (text.ends_with('\r')) text.pop_back();
}

}  // namespace

int verb_run(Arguments arguments) {
  ModelOptions model;
  GenerationOptions generation;
  std::optional<std::string> prompt, file;
  CLI::App app("Generates text from a prompt.", "moeflux run");
  add_model_argument(app, model.model);
  CLI::Option* argument =
      app.add_option("-p,--prompt,PROMPT", prompt, "The prompt; without it and -f, standard input")->type_name("TEXT");
  app.add_option("-f,--file", file, "Read the prompt from a file")->type_name("FILE")->excludes(argument);
  add_generation_options(app, generation);
  app.add_flag("--echo", generation.echo, "Print the prompt before the text");
  add_ctx_option(app, model);
  add_engine_options(app, model);
  add_trace_option(app, model);
  app.footer(
      "The text goes to standard output, all else to standard error. Ctrl-C stops cleanly.\n\n"
      "Examples:\n"
      "  moeflux run models/demo \"HAMLET To be, or not to be\" -n 100\n"
      "  moeflux run models/demo -f prompt.txt --temp 0\n"
      "  echo \"KING RICHARD\" | moeflux run models/demo -s 42 --json\n");
  if (!parse(app, std::move(arguments))) return kExitOk;

  std::string text = read_text(prompt, file, "prompt");
  if (!prompt) drop_last_newline(text);
  return run_generation(model, generation, text);
}

}  // namespace moeflux::cli
