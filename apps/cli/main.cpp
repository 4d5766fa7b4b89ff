// The command moeflux: picks the verb and turns failures into messages and exit codes.
#include <fmt/format.h>
#include <moeflux/error.h>

#include <array>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

#include "cli/fail.h"
#include "cli/suggest.h"
#include "cli/terminal.h"
#include "cli/verbs.h"

namespace moeflux::cli {
namespace {

struct Verb {
  std::string_view name;
  std::string_view usage;
  std::string_view summary;
  int (*run)(Arguments);
};

constexpr std::array kVerbs = {
    Verb{"run", "run MODEL [PROMPT]", "generate text", verb_run},
    Verb{"demo", "demo", "run the bundled toy model", verb_demo},
    Verb{"logits", "logits MODEL ..", "write the logits of every position to a file", verb_logits},
    Verb{"perplexity", "perplexity MODEL -f TEXT", "measure how well a model predicts a text",
         verb_perplexity},
    Verb{"tokenize", "tokenize MODEL [TEXT]", "text to token ids and back", verb_tokenize},
    Verb{"inspect", "inspect MODEL", "say what a model folder holds", verb_inspect},
    Verb{"bench", "bench MODEL", "measure speed and what limits it", verb_bench},
    Verb{"plan", "plan MODEL", "what a model will take of this machine, and how fast it can be", verb_plan},
    Verb{"doctor", "doctor [MODEL|DIR]", "say what this machine offers and lacks", verb_doctor},
    Verb{"simulate", "simulate TRACE", "hit rates of an expert cache on a recorded run", verb_simulate},
    Verb{"pack", "pack MODEL --out DIR", "rewrite a model for faster streaming", verb_pack},
    Verb{"verify", "verify PACK", "check every byte of a pack", verb_verify},
    Verb{"synth", "synth --shape NAME --out DIR", "write a random model of a real shape", verb_synth},
    Verb{"version", "version", "print the version", verb_version},
};

std::string help() {
  std::string text =
      "moeflux runs Mixture-of-Experts language models.\n\nUsage: moeflux VERB [OPTIONS]\n\nVerbs:\n";
  for (const Verb& verb : kVerbs) text += fmt::format("  {:<28} {}\n", verb.usage, verb.summary);
  return text +
         "\nMODEL is a folder with config.json and safetensors, or a pack. `moeflux VERB --help` has the options.\n\n"
         "Examples:\n"
         "  moeflux demo\n"
         "  moeflux run models/demo \"HAMLET To be, or not to be\" -n 100 --seed 42\n"
         "  moeflux inspect models/demo\n";
}

[[noreturn]] void unknown_verb(const std::string& word) {
  std::array<std::string_view, kVerbs.size()> names;
  for (std::size_t i = 0; i < kVerbs.size(); ++i) names[i] = kVerbs[i].name;
  const std::string_view near = nearest(word, names);
  std::string hint = "See moeflux --help.";
  std::error_code ignored;
  if (!near.empty()) {
    hint = fmt::format("Did you mean `moeflux {}`?", near);
  } else if (std::filesystem::is_directory(word, ignored)) {
    hint = fmt::format("Did you mean `moeflux run {}`?", word);
  }
  fail(ErrorCode::InvalidArgument, "unknown {} {}\n{}", word.starts_with('-') ? "option" : "verb", word,
       hint);
}

int dispatch(Arguments arguments) {
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h" || arguments[0] == "help") {
    write_out(help());
    return kExitOk;
  }
  std::string name = arguments[0];
  arguments.erase(arguments.begin());
  if (name == "--version") name = "version";
  for (const Verb& verb : kVerbs)
    if (verb.name == name) return verb.run(std::move(arguments));
  unknown_verb(name);
}

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::InvalidArgument:
    case ErrorCode::InvalidModel:
    case ErrorCode::Unsupported:
      return kExitUserError;
    case ErrorCode::Cancelled:
      return kExitInterrupted;
    case ErrorCode::Io:
    case ErrorCode::OutOfMemory:
    case ErrorCode::Internal:
      break;
  }
  return kExitFailure;
}

int run_command(Arguments arguments) {
  try {
    return dispatch(std::move(arguments));
  } catch (const BrokenPipe&) {
    return kExitOk;  // whoever read our output has seen enough
  } catch (const Error& error) {
    if (error.code() == ErrorCode::Cancelled) {
      note("stopped");
    } else {
      note(fmt::format("error: {}", error.what()));
    }
    return exit_code(error.code());
  } catch (const std::bad_alloc&) {
    write_err("moeflux: error: out of memory\n");
  } catch (const std::exception& error) {
    note(fmt::format("error: {}", error.what()));
  }
  return kExitFailure;
}

}  // namespace
}  // namespace moeflux::cli

int main(int argc, char** argv) {
  moeflux::cli::prepare_standard_streams();
  return moeflux::cli::run_command(moeflux::cli::Arguments(argv + (argc > 0 ? 1 : 0), argv + argc));
}
