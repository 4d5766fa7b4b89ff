#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "cli/byte_bar.h"
#include "cli/common.h"
#include "cli/fail.h"
#include "cli/interrupt.h"
#include "cli/json_out.h"
#include "cli/synth/model_writer.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

struct SynthVerb {
  std::string shape, out;
  synth::SynthOptions options;
  double shard_gib = 4;
  bool headers_only = false, list = false, json = false;
};

int list_shapes(const synth::Catalog& catalog, bool json) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::string text =
      fmt::format("{:<24} {:>6} {:>7} {:>9}  {}\n", "shape", "layers", "experts", "size", "also");
  for (const synth::Shape& shape : catalog.shapes()) {
    const synth::Plan plan = synth::make_plan(catalog, shape, {});
    text +=
        fmt::format("{:<24} {:>6} {:>7} {:>9}  {}\n", shape.name, plan.n_layers, plan.n_experts,
                    bytes_text(static_cast<double>(plan.tensor_bytes)), fmt::join(shape.short_names, ", "));
    rows.push_back({{"name", shape.name},
                    {"short", shape.short_names},
                    {"n_layers", plan.n_layers},
                    {"n_experts", plan.n_experts},
                    {"few_layers", synth::few_layers(shape)},
                    {"tensor_bytes", plan.tensor_bytes}});
  }
  if (json) {
    write_json({{"shapes", rows}});
  } else {
    write_out(text);
  }
  return kExitOk;
}

void check_space(const io::NewFolder& folder, std::uint64_t needed, const SynthVerb& verb,
                 std::size_t n_tensors) {
  const std::uint64_t available = folder.free_bytes();
  note(fmt::format("{}: {} tensors, needs {}, {} are free", verb.out, n_tensors,
                   bytes_text(static_cast<double>(needed)), bytes_text(static_cast<double>(available))));
  if (needed > available)
    fail(ErrorCode::Io, "{}: not enough room: {} needed, {} free", verb.out, needed, available);
}

void report(const SynthVerb& verb, const synth::Shape& shape, const synth::Plan& plan, std::size_t n_files,
            double seconds) {
  const auto bytes = static_cast<double>(plan.tensor_bytes);
  const double rate = verb.headers_only ? 0 : bytes / seconds;
  if (verb.json) {
    write_json({{"out", verb.out},
                {"shape", shape.name},
                {"n_layers", plan.n_layers},
                {"n_experts", plan.n_experts},
                {"seed", verb.options.seed},
                {"skew", verb.options.skew},
                {"headers_only", verb.headers_only},
                {"n_files", n_files},
                {"n_tensors", plan.tensors.size()},
                {"tensor_bytes", plan.tensor_bytes},
                {"seconds", seconds},
                {"bytes_per_second", rate}});
    return;
  }
  write_out(fmt::format("{}: {}, {} layers, {} experts, {}{} in {} {}, {:.1f} s{}\n", verb.out, shape.name,
                        plan.n_layers, plan.n_experts, verb.headers_only ? "headers alone of " : "",
                        bytes_text(bytes), n_files, n_files == 1 ? "file" : "files", seconds,
                        verb.headers_only ? "" : fmt::format(", {}/s", bytes_text(rate))));
}

int write_synthetic(const synth::Catalog& catalog, const SynthVerb& verb) {
  const synth::Shape& shape = catalog.find(verb.shape);
  const synth::Plan plan = synth::make_plan(catalog, shape, verb.options);
  const auto shards = synth::cut_shards(plan, static_cast<std::uint64_t>(verb.shard_gib * (1 << 30)));
  const std::uint64_t bytes = synth::total_bytes(shards);

  const InterruptFlag interrupt;
  io::NewFolder folder(verb.out);
  ByteBar bar;
  if (verb.headers_only) {
    synth::write_headers(folder, plan, shards);
  } else {
    check_space(folder, bytes, verb, plan.tensors.size());
    synth::write_model(folder, plan, shards, [&](std::uint64_t done) {
      if (interrupt.raised()) fail(ErrorCode::Cancelled, "stopped");
      bar.show(done, bytes);
    });
  }
  if (interrupt.raised()) fail(ErrorCode::Cancelled, "stopped");
  folder.commit();
  bar.clear();

  report(verb, shape, plan, shards.size(), bar.seconds());
  return kExitOk;
}

}  // namespace

int verb_synth(Arguments arguments) {
  SynthVerb verb;
  CLI::App app("Writes a model of random weights in the shape of a published one.", "moeflux synth");
  app.add_option("--shape", verb.shape, "Name of the shape, see --list")->type_name("NAME");
  app.add_option("-o,--out", verb.out, "The folder to make; must not exist")->type_name("DIR");
  app.add_option("--layers", verb.options.n_layers, "Only the first N layers; 0: all")
      ->check(at_least(0))
      ->type_name("N");
  app.add_option("--experts", verb.options.n_experts, "Only N experts per layer; 0: all")
      ->check(at_least(0))
      ->type_name("N");
  app.add_option("--dense", verb.options.n_dense, "Only N layers without experts at the start, where the shape has such")
      ->check(at_least(0))
      ->type_name("N");
  app.add_option("--seed", verb.options.seed, "The same seed gives the same bytes")->capture_default_str();
  app.add_option("--skew", verb.options.skew,
                 "Popularity of experts: 0: uniform; at 2 neighbouring tokens share about 20 % of theirs")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  app.add_option("--shard-size", verb.shard_gib, "Largest file in GiB, unless one tensor is larger")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str()
      ->type_name("GIB");
  app.add_flag("--headers-only", verb.headers_only,
               "No weights: files with headers and full sizes that take no room, for `inspect`");
  app.add_flag("--list", verb.list, "The shapes there are");
  app.add_flag("--json", verb.json, "One JSON object");
  app.footer(
      "4-bit weights in the MLX layout, a tokenizer of single bytes. Such a model says nothing sensible, but "
      "it takes\n"
      "the memory, reads the bytes and costs the arithmetic of the real one.\n\n"
      "Examples:\n"
      "  moeflux synth --list\n"
      "  moeflux synth --shape 35b-a3b --layers 4 --out small\n"
      "  moeflux synth --shape 35b-a3b --skew 2 --seed 7 --out local\n"
      "  moeflux synth --shape 397b-a17b --headers-only --out big\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  const synth::Catalog catalog;
  if (verb.list) return list_shapes(catalog, verb.json);
  if (verb.shape.empty()) fail(ErrorCode::InvalidArgument, "--shape is required\nSee moeflux synth --help.");
  if (verb.out.empty()) fail(ErrorCode::InvalidArgument, "--out is required\nSee moeflux synth --help.");
  return write_synthetic(catalog, verb);
}

}  // namespace moeflux::cli
