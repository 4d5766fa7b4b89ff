#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {

int verb_version(Arguments arguments) {
  bool json = false;
  CLI::App app("Prints the version.", "moeflux version");
  app.add_flag("--json", json, "One JSON object");
  app.footer("Examples:\n  moeflux version\n  moeflux --version\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  if (json) {
    write_json({{"version", version()}});
  } else {
    write_out(fmt::format("moeflux {}\n", version()));
  }
  return kExitOk;
}

}  // namespace moeflux::cli
