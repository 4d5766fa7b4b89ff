#include <filesystem>
#include <string>
#include <system_error>

#include "cli/fail.h"
#include "cli/generation.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

std::filesystem::path find_demo_model() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path command = fs::read_symlink("/proc/self/exe", error);
  const fs::path installed = command.parent_path() / MOEFLUX_DEMO_FROM_BIN;
  const fs::path source = MOEFLUX_DEMO_IN_SOURCE;
  for (const fs::path& folder : {installed, source})
    if (fs::is_regular_file(folder / "config.json", error)) return folder.lexically_normal();
  fail(ErrorCode::InvalidArgument, "the demo model is neither in {} nor in {}",
       installed.lexically_normal().string(), source.string());
}

}  // namespace

int verb_demo(Arguments arguments) {
  ModelOptions model;
  GenerationOptions generation;
  generation.max_tokens = 160;
  bool no_echo = false;
  std::string prompt = "HAMLET To be, or not to be";
  CLI::App app("Runs the bundled toy model.", "moeflux demo");
  app.add_option("PROMPT", prompt, "A speaker in capitals and the first words")
      ->type_name("")
      ->capture_default_str();
  add_generation_options(app, generation);
  app.add_flag("--no-echo", no_echo, "Do not print the prompt before the text");
  add_ctx_option(app, model);
  add_engine_options(app, model);
  add_trace_option(app, model);
  app.footer(
      "The demo model was trained for two minutes on Shakespeare. It shows that the machinery works,\n"
      "not what a language model can say.\n\n"
      "Examples:\n"
      "  moeflux demo\n"
      "  moeflux demo -n 50 --temp 0\n"
      "  moeflux demo \"LADY MACBETH Out, damned\"\n");
  if (!parse(app, std::move(arguments))) return kExitOk;

  generation.echo = !no_echo;
  model.model = find_demo_model().string();
  note("this is a toy model: it shows the machinery, not intelligence");
  return run_generation(model, generation, prompt);
}

}  // namespace moeflux::cli
