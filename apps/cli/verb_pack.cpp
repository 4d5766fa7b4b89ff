#include <fmt/format.h>
#include <moeflux/pack.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "cli/byte_bar.h"
#include "cli/common.h"
#include "cli/fail.h"
#include "cli/interrupt.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

std::string bytes_of(std::uint64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

void announce(const std::string& out, const PackPlan& plan) {
  note(fmt::format("{}: {} experts in {}, trunk {}{}; needs {}, {} are free", out, plan.n_records,
                   bytes_of(plan.expert_bytes), bytes_of(plan.trunk_bytes),
                   plan.n_left_out == 0 ? "" : fmt::format(" ({} tensors that the model does not read stay behind)", plan.n_left_out),
                   bytes_of(plan.total_bytes()), bytes_of(plan.free_bytes)));
}

IoKind io_kind(const std::string& text) {
  return text == "uring" ? IoKind::Uring : text == "pread" ? IoKind::Pread : IoKind::Auto;
}

void add_io_option(CLI::App& app, std::string& io) {
  app.add_option("--io", io, "How files are read")->check(CLI::IsMember({"auto", "uring", "pread"}))->capture_default_str();
}

}  // namespace

int verb_pack(Arguments arguments) {
  std::string model, out, io = "auto";
  bool json = false;
  CLI::App app("Rewrites a model so that every expert is one aligned, checksummed read.", "moeflux pack");
  add_model_argument(app, model);
  app.add_option("-o,--out", out, "The folder to make; must not exist")->required()->type_name("DIR");
  add_io_option(app, io);
  app.add_flag("--json", json, "One JSON object");
  app.footer(
      "A pack is a folder that every verb takes for MODEL. It holds the model's weights in their stored bits, its\n"
      "configuration and its tokenizer, and does not need the original. Packing is a speed-up for models that\n"
      "are streamed (--ram), never a requirement; results are the same bytes.\n\n"
      "Examples:\n"
      "  moeflux pack MODEL --out MODEL.pack\n"
      "  moeflux verify MODEL.pack\n"
      "  moeflux run MODEL.pack \"Why is the sky blue?\" --ram 8GB\n");
  if (!parse(app, std::move(arguments))) return kExitOk;

  const InterruptFlag interrupt;
  ByteBar bar;
  PackOptions options;
  options.model = model;
  options.out = out;
  options.io = io_kind(io);
  options.log = [&](LogLevel level, std::string_view text) {
    bar.clear();
    note(fmt::format("{}{}", level == LogLevel::Warning ? "warning: " : "", text));
  };
  options.on_plan = [&](const PackPlan& plan) { announce(out, plan); };
  options.progress = [&](std::string_view, std::uint64_t done, std::uint64_t total) {
    if (interrupt.raised()) fail(ErrorCode::Cancelled, "stopped");
    bar.show(done, total);
  };
  const PackResult result = pack_model(options);
  bar.clear();
  const double seconds = bar.seconds(), rate = static_cast<double>(result.plan.total_bytes()) / seconds;
  if (json) {
    write_json({{"out", out},
                {"model_id", result.model_id},
                {"n_records", result.plan.n_records},
                {"n_trunk_tensors", result.plan.n_tensors},
                {"n_left_out", result.plan.n_left_out},
                {"expert_bytes", result.plan.expert_bytes},
                {"trunk_bytes", result.plan.trunk_bytes},
                {"seconds", seconds},
                {"bytes_per_second", rate}});
  } else {
    write_out(fmt::format("{}: {} experts, {}, {:.1f} s, {}/s\n", out, result.plan.n_records,
                          bytes_of(result.plan.expert_bytes + result.plan.trunk_bytes), seconds, bytes_text(rate)));
  }
  return kExitOk;
}

int verb_verify(Arguments arguments) {
  std::string pack, io = "auto";
  bool json = false;
  CLI::App app("Reads every byte of a pack and compares it with its checksum.", "moeflux verify");
  app.add_option("PACK", pack, "Folder that `moeflux pack` made")->required()->type_name("");
  add_io_option(app, io);
  app.add_flag("--json", json, "One JSON object");
  app.footer(
      "Names every damaged record, tensor and file. Exit code 1 when there is one.\n\n"
      "Examples:\n"
      "  moeflux verify MODEL.pack\n");
  if (!parse(app, std::move(arguments))) return kExitOk;

  const InterruptFlag interrupt;
  ByteBar bar;
  nlohmann::ordered_json faults = nlohmann::ordered_json::array();
  VerifyOptions options;
  options.pack = pack;
  options.io = io_kind(io);
  options.on_fault = [&](std::string_view text) {
    bar.clear();
    if (json) {
      faults.push_back(text);
    } else {
      write_out(fmt::format("{}\n", text));
    }
  };
  options.progress = [&](std::string_view, std::uint64_t done, std::uint64_t total) {
    if (interrupt.raised()) fail(ErrorCode::Cancelled, "stopped");
    bar.show(done, total);
  };
  const VerifyResult result = verify_pack(options);
  bar.clear();
  const double seconds = bar.seconds(), rate = static_cast<double>(result.bytes) / seconds;
  if (json) {
    write_json({{"pack", pack},
                {"intact", result.n_faults == 0},
                {"n_records", result.n_records},
                {"n_faults", result.n_faults},
                {"faults", faults},
                {"bytes", result.bytes},
                {"seconds", seconds},
                {"bytes_per_second", rate}});
  } else {
    write_out(fmt::format("{}: {}, {} experts, {} read, {:.1f} s, {}/s\n", pack,
                          result.n_faults == 0 ? "intact" : fmt::format("DAMAGED in {} places", result.n_faults),
                          result.n_records, bytes_of(result.bytes), seconds, bytes_text(rate)));
  }
  return result.n_faults == 0 ? kExitOk : kExitFailure;
}

}  // namespace moeflux::cli
