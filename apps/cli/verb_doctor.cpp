#include <fmt/format.h>
#include <moeflux/probe.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "cli/common.h"
#include "cli/fail.h"
#include "cli/json_out.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

using Json = nlohmann::ordered_json;

// What was found, or why nothing could be.
template <class T>
struct Finding {
  std::optional<T> value;
  std::string error;

  template <class F>
  void find(F&& f) {
    try {
      value = f();
    } catch (const Error& e) {
      error = e.what();
    }
  }
};

struct Diagnosis {
  MachineReport machine;
  Finding<MemoryBandwidth> bandwidth;
  bool has_path = false, has_model = false;
  Finding<DiskReport> disk;
  Finding<ModelInfo> model;
  GpuReport gpus;
};

Diagnosis diagnose(const std::string& path) {
  Diagnosis d;
  StatusLine line;
  std::error_code ignored;
  d.has_path = !path.empty();
  if (d.has_path && !std::filesystem::exists(path, ignored))
    fail(ErrorCode::InvalidArgument, "{}: there is no such folder or file", path);
  d.has_model = d.has_path && std::filesystem::exists(std::filesystem::path(path) / "config.json", ignored);
  d.machine = probe_machine();
  d.gpus = probe_gpus();
  if (d.has_model) d.model.find([&] { return inspect_model(path); });
  if (d.has_path) {
    const ProgressSink progress = [&line](std::string_view what, std::uint64_t done, std::uint64_t total) {
      if (line.due()) line.show(fmt::format("disk: {}, {} of {}", what, done, total));
    };
    d.disk.find([&] { return probe_disk(path, progress); });
  }
  line.show("memory: reading");
  d.bandwidth.find([] { return probe_memory_bandwidth(); });
  line.clear();
  return d;
}

std::string bytes(std::uint64_t n) { return bytes_text(static_cast<double>(n)); }

std::string cpu_text(const MachineReport& m) {
  return fmt::format("{}, {} {}{}, {} {} unless told otherwise", m.cpu_name.empty() ? "unknown" : m.cpu_name,
                     m.n_cpus, m.n_cpus == 1 ? "CPU" : "CPUs",
                     m.cpu_quota ? fmt::format(" with a quota of {:.1f}", *m.cpu_quota) : "", m.n_threads,
                     m.n_threads == 1 ? "thread" : "threads");
}

std::string kernels_text(const MachineReport& m) {
  std::string others;
  for (std::size_t i = 1; i < m.isas.size(); ++i)
    others += fmt::format("{}{}", i == 1 ? "" : ", ", m.isas[i]);
  return others.empty() ? m.isas.at(0) : fmt::format("{} (this CPU also runs {})", m.isas.at(0), others);
}

std::string memory_text(const MachineReport& m) {
  std::string text = fmt::format("{}, {} available", bytes(m.ram_bytes), bytes(m.available_bytes));
  if (m.group_limit_bytes) {
    text += fmt::format("; control group: {}, {} available", bytes(*m.group_limit_bytes),
                        bytes(m.group_available_bytes.value_or(0)));
  } else {
    text += "; no limit by a control group";
  }
  return text;
}

std::string huge_pages_text(const MachineReport& m) {
  if (m.huge_pages.empty()) return "unknown";
  return fmt::format("{} ({} KiB)", m.huge_pages, m.huge_page_bytes / 1024);
}

std::string uring_text(const MachineReport& m) {
  if (m.uring) return fmt::format("available (Linux {}): experts are read by it", m.kernel);
  return fmt::format("not available, experts are read by a pool of threads: {}", m.uring_note);
}

std::string disk_text(const DiskReport& disk) {
  std::string rates;
  for (const DiskRate& rate : disk.rates)
    rates += fmt::format("{}{}/s at depth {}", rates.empty() ? "" : ", ", bytes_text(rate.bytes_per_second),
                         rate.depth);
  const std::string source = disk.temporary
                                 ? "a temporary file of " + bytes(disk.file_bytes)
                                 : fmt::format("{} {} of {}", disk.n_files,
                                               disk.n_files == 1 ? "file" : "files", bytes(disk.file_bytes));
  return fmt::format("{} ({} by {} from {}){}", rates,
                     disk.direct ? "direct reads" : "THROUGH THE PAGE CACHE", disk.reader, source,
                     disk.note.empty() ? "" : "; " + disk.note);
}

std::string gpu_text(const GpuReport& gpus) {
  std::string text;
  for (const GpuDevice& gpu : gpus.devices) {
    text += fmt::format("{}{}: {}", text.empty() ? "" : fmt::format("\n{:13}", ""), gpu.index, gpu.name.empty() ? "not usable" : gpu.name);
    if (!gpu.capability.empty()) text += fmt::format(", capability {}", gpu.capability);
    if (gpu.total_bytes > 0) text += fmt::format(", {} ({} free)", bytes(gpu.total_bytes), bytes(gpu.free_bytes));
    if (gpu.memory_bytes_per_second > 0)
      text += fmt::format("; memory {}/s, pinned memory to the device {}/s and back {}/s", bytes_text(gpu.memory_bytes_per_second),
                          bytes_text(gpu.to_device_bytes_per_second), bytes_text(gpu.to_host_bytes_per_second));
    if (!gpu.note.empty()) text += "; " + gpu.note;
  }
  if (text.empty()) return "none: " + gpus.note;
  return text + fmt::format(" (driver for CUDA {}, this build has {})", gpus.driver, gpus.runtime);
}

// What the model would take, and the speed that memory and disk allow at most.
std::string model_text(const Diagnosis& d, const ModelInfo& info) {
  const std::uint64_t all = info.trunk_bytes + info.expert_bytes;
  std::string text = fmt::format("{}, {} of trunk and {} of experts: ", info.family, bytes(info.trunk_bytes),
                                 bytes(info.expert_bytes));
  text += all < d.machine.usable_bytes
              ? fmt::format("fits into {}", bytes(d.machine.usable_bytes))
              : fmt::format("more than the {} there are; run with --ram", bytes(d.machine.usable_bytes));
  const auto active = static_cast<double>(info.active_expert_bytes_per_token);
  const double token = active + static_cast<double>(info.trunk_bytes_per_token);
  const double from_memory = d.bandwidth.value && token > 0 ? d.bandwidth.value->bytes_per_second / token : 0;
  if (from_memory > 0) text += fmt::format("; at most {:.1f} tok/s from memory", from_memory);
  if (from_memory > 0 && d.disk.value && active > 0)
    text += fmt::format(", {:.1f} when every expert comes from disk",
                        std::min(from_memory, d.disk.value->best() / active));
  return text;
}

std::string table(const Diagnosis& d) {
  std::string text;
  const auto row = [&text](std::string_view name, const std::string& value) {
    text += fmt::format("{:<12} {}\n", name, value);
  };
  row("cpu", cpu_text(d.machine));
  row("kernels", kernels_text(d.machine));
  row("memory", memory_text(d.machine));
  row("huge pages", huge_pages_text(d.machine));
  row("bandwidth", d.bandwidth.value ? fmt::format("{}/s read by {} threads",
                                                   bytes_text(d.bandwidth.value->bytes_per_second),
                                                   d.bandwidth.value->n_threads)
                                     : "not measured: " + d.bandwidth.error);
  row("io_uring", uring_text(d.machine));
  row("disk", !d.has_path    ? "not measured: give a folder"
              : d.disk.value ? disk_text(*d.disk.value)
                             : "not measured: " + d.disk.error);
  row("gpu", gpu_text(d.gpus));
  if (d.has_model) row("model", d.model.value ? model_text(d, *d.model.value) : d.model.error);
  return text;
}

Json or_null(bool there, Json value) { return there ? std::move(value) : Json(); }

Json disk_json(const DiskReport& disk) {
  Json rates = Json::array();
  for (const DiskRate& rate : disk.rates)
    rates.push_back({{"depth", rate.depth}, {"bytes_per_second", rate.bytes_per_second}});
  return {{"path", disk.path.string()},
          {"reader", disk.reader},
          {"direct", disk.direct},
          {"note", disk.note},
          {"read_size", disk.read_size},
          {"n_files", disk.n_files},
          {"file_bytes", disk.file_bytes},
          {"temporary", disk.temporary},
          {"rates", rates}};
}

Json machine_json(const MachineReport& m) {
  return {{"kernel", m.kernel},
          {"cpu_name", m.cpu_name},
          {"isas", m.isas},
          {"isa", m.isas.at(0)},
          {"n_cpus", m.n_cpus},
          {"cpu_quota", or_null(m.cpu_quota.has_value(), m.cpu_quota.value_or(0))},
          {"n_threads", m.n_threads},
          {"ram_bytes", m.ram_bytes},
          {"available_bytes", m.available_bytes},
          {"group_limit_bytes", or_null(m.group_limit_bytes.has_value(), m.group_limit_bytes.value_or(0))},
          {"group_available_bytes",
           or_null(m.group_available_bytes.has_value(), m.group_available_bytes.value_or(0))},
          {"usable_bytes", m.usable_bytes},
          {"page_bytes", m.page_bytes},
          {"huge_page_bytes", m.huge_page_bytes},
          {"huge_pages", m.huge_pages},
          {"uring", m.uring},
          {"uring_note", m.uring_note}};
}

Json diagnosis_json(const Diagnosis& d) {
  Json object = machine_json(d.machine);
  object["memory_bytes_per_second"] =
      or_null(d.bandwidth.value.has_value(), d.bandwidth.value ? d.bandwidth.value->bytes_per_second : 0);
  object["disk"] = d.disk.value ? disk_json(*d.disk.value) : Json();
  object["disk_error"] = d.disk.error;
  Json gpus = Json::array();
  for (const GpuDevice& gpu : d.gpus.devices)
    gpus.push_back({{"name", gpu.name},
                    {"index", gpu.index},
                    {"capability", gpu.capability},
                    {"total_bytes", gpu.total_bytes},
                    {"free_bytes", gpu.free_bytes},
                    {"memory_bytes_per_second", gpu.memory_bytes_per_second},
                    {"to_device_bytes_per_second", gpu.to_device_bytes_per_second},
                    {"to_host_bytes_per_second", gpu.to_host_bytes_per_second},
                    {"note", gpu.note}});
  object["gpus"] = gpus;
  object["gpu_note"] = d.gpus.note;
  object["cuda_driver"] = d.gpus.driver;
  object["cuda_runtime"] = d.gpus.runtime;
  object["model"] = Json();
  if (d.model.value) {
    const ModelInfo& info = *d.model.value;
    object["model"] = {{"family", info.family},
                       {"trunk_bytes", info.trunk_bytes},
                       {"expert_bytes", info.expert_bytes},
                       {"fits", info.trunk_bytes + info.expert_bytes < d.machine.usable_bytes}};
  }
  object["model_error"] = d.model.error;
  return object;
}

}  // namespace

int verb_doctor(Arguments arguments) {
  std::string path;
  bool json = false;
  CLI::App app("Says what this machine offers and what it lacks.", "moeflux doctor");
  app.add_option("MODEL", path, "A model, or any folder whose disk is to be measured")->type_name("");
  app.add_flag("--json", json, "One JSON object; bytes as integers");
  app.footer(
      "Takes some seconds. Random reads of 2 MiB measure the disk, from the large files of the folder or, "
      "where "
      "there are\n"
      "none, from one of 256 MiB that is gone afterwards. With a model: whether it fits, and the speed that "
      "memory and\n"
      "disk allow at most.\n\n"
      "Examples:\n"
      "  moeflux doctor\n"
      "  moeflux doctor ~/models\n"
      "  moeflux doctor models/demo --json\n");
  if (!parse(app, std::move(arguments))) return kExitOk;
  const Diagnosis diagnosis = diagnose(path);
  if (json) {
    write_json(diagnosis_json(diagnosis));
  } else {
    write_out(table(diagnosis));
  }
  return kExitOk;
}

}  // namespace moeflux::cli
