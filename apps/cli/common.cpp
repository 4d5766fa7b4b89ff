#include "cli/common.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

#include "cli/fail.h"
#include "cli/terminal.h"

namespace moeflux::cli {
namespace {

constexpr int kMaxThreads = 1024;

// What an engine says while it loads and later. Shared by two sinks that may be called from different
// threads.
class Reporter {
 public:
  explicit Reporter(bool verbose) : verbose_(verbose) {}

  void log(LogLevel level, std::string_view text) {
    if (level == LogLevel::Debug || (level == LogLevel::Info && !verbose_)) return;
    const std::lock_guard lock(mutex_);
    line_.clear();
    note(fmt::format("{}{}",
                     level == LogLevel::Warning ? "warning: "
                     : level == LogLevel::Error ? "error: "
                                                : "",
                     text));
  }

  void progress(std::string_view what, std::uint64_t done, std::uint64_t total) {
    const std::lock_guard lock(mutex_);
    if (done >= total) {
      line_.clear();
    } else if (line_.due()) {
      const double share = static_cast<double>(done) / static_cast<double>(total);
      constexpr std::size_t kWidth = 30;
      const auto filled = static_cast<std::size_t>(share * kWidth);
      line_.show(fmt::format("{} [{}{}] {:3.0f} %", what, std::string(filled, '#'),
                             std::string(kWidth - filled, '.'), share * 100));
    }
  }

  void loaded() {
    const std::lock_guard lock(mutex_);
    line_.clear();
  }

 private:
  const bool verbose_;
  std::mutex mutex_;
  // A bar that flashes by is noise.
  StatusLine line_{std::chrono::milliseconds(300)};
};

std::string rate_text(double rate) { return rate > 0 ? fmt::format("{:.1f} tok/s", rate) : "- tok/s"; }

}  // namespace

CLI::Validator at_least(std::int64_t low) {
  return CLI::Validator(
      [low](std::string& text) -> std::string {
        std::int64_t value = 0;
        if (!CLI::detail::lexical_cast(text, value) || value < low)
          return fmt::format("{} is no integer of at least {}", text, low);
        return {};
      },
      "");
}

void add_model_argument(CLI::App& app, std::string& model) {
  app.add_option("MODEL", model, "Folder with config.json and safetensors")->required()->type_name("");
}

void add_engine_options(CLI::App& app, ModelOptions& options) {
  app.add_option("-t,--threads", options.n_threads, "Threads; 0: one per usable core")
      ->check(CLI::Range(0, kMaxThreads))
      ->capture_default_str();
  app.add_option("--precision", options.precision,
                 "exact: f32 activations; fast: 8-bit activations per group")
      ->check(CLI::IsMember({"exact", "fast"}))
      ->capture_default_str();
  app.add_option("--kv", options.kv, "Element type of the key/value cache")
      ->check(CLI::IsMember({"f32", "f16"}))
      ->capture_default_str();
  app.add_option("--isa", options.isa,
                 "Force a CPU kernel set: amx, avx512vbmi, avx512vnni, avx512, avx2vnni, avx2, neon, scalar; never changes a result");
  app.add_option("--chunk", options.chunk_size, "Prompt tokens computed together; never changes a result")
      ->check(at_least(0));
  app.add_option("--ram", options.ram,
                 "Memory ceiling of the whole process, for example 8GB; experts that do not fit are streamed")
      ->type_name("SIZE");
  app.add_option("--io", options.io, "How experts are read; never changes a result")
      ->check(CLI::IsMember({"auto", "uring", "pread"}))
      ->capture_default_str();
  app.add_option("--prefetch", options.prefetch,
                 "Read experts ahead by what the next router foretells; auto: while it pays; never changes a result")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  app.add_option("--backend", options.backend, "Where to compute; auto: a CUDA device that holds at least the trunk, else the CPU")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--gpu", options.gpu, "The CUDA device")->check(CLI::Range(0, 255))->capture_default_str();
  app.add_option("--vram", options.vram, "Ceiling of device memory, for example 24GB; default: what is free. Experts that do not fit are in main memory and on disk")->type_name("SIZE");
  app.add_option("--cpu-experts", options.cpu_experts,
                 "With a device: the processor computes experts in main memory, too; auto: as many as pay, on: all; never changes a result")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  app.add_flag("-v,--verbose", options.verbose, "Notes as well as warnings on standard error");
}

void add_trace_option(CLI::App& app, ModelOptions& options) {
  app.add_option("--trace", options.trace, "Record which experts were chosen, for `moeflux simulate` and `plan`")
      ->type_name("FILE");
}

void add_ctx_option(CLI::App& app, ModelOptions& options) {
  app.add_option("-c,--ctx-size", options.ctx_size, "Positions; 0: the model's limit, at most 4096")
      ->check(at_least(0))
      ->capture_default_str();
}

bool parse(CLI::App& app, Arguments arguments) {
  app.get_formatter()->column_width(34);
  std::reverse(arguments.begin(), arguments.end());  // the order CLI11 takes them from
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    write_out(app.help());
    return false;
  } catch (const CLI::ParseError& error) {
    fail(ErrorCode::InvalidArgument, "{}\nSee {} --help.", error.what(), app.get_name());
  }
  return true;
}

std::uint64_t parse_size(std::string_view text, std::string_view option) {
  const std::string copy(text);
  std::size_t used = 0;
  double value = -1.0;
  try {
    value = std::stod(copy, &used);
  } catch (const std::exception&) {
  }
  std::string unit;
  for (char c : copy.substr(used))
    if (c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (!unit.empty() && unit.back() == 'b') unit.pop_back();
  const bool binary = unit.size() == 2 && unit.back() == 'i';
  const std::size_t power = unit.empty() ? 0 : std::string_view("kmgt").find(unit[0]) + 1;
  if (!(value > 0.0) || (!unit.empty() && power == 0) || (unit.size() > 1 && !binary))
    fail(ErrorCode::InvalidArgument, "{} {} is no size; write for example 8GB, 24GiB or 512M", option, text);
  for (std::size_t i = 0; i < power; ++i) value *= binary ? 1024.0 : 1000.0;
  if (value > 1e18) fail(ErrorCode::InvalidArgument, "{} {} is more than any machine has", option, text);
  return static_cast<std::uint64_t>(value);
}

namespace {

SessionOptions session_options(const ModelOptions& options) {
  SessionOptions out;
  out.ctx_size = options.ctx_size;
  out.kv = options.kv == "f16" ? KvType::F16 : KvType::F32;
  out.chunk_size = options.chunk_size;
  out.trace = options.trace;
  out.replay = options.replay;
  out.record_reads = options.record_reads;
  return out;
}

}  // namespace

EngineOptions engine_options(const ModelOptions& options) {
  EngineOptions out;
  out.model = options.model;
  out.n_threads = options.n_threads;
  out.isa = options.isa;
  out.precision = options.precision == "exact" ? Precision::Exact : Precision::Fast;
  if (!options.ram.empty()) out.ram_bytes = parse_size(options.ram, "--ram");
  out.planned = session_options(options);
  out.io = options.io == "uring" ? IoKind::Uring : options.io == "pread" ? IoKind::Pread : IoKind::Auto;
  out.backend = options.backend == "cpu" ? BackendKind::Cpu : options.backend == "cuda" ? BackendKind::Cuda : BackendKind::Auto;
  out.gpu = options.gpu;
  if (!options.vram.empty()) out.vram_bytes = parse_size(options.vram, "--vram");
  out.cpu_experts = options.cpu_experts == "on" ? CpuExperts::On : options.cpu_experts == "off" ? CpuExperts::Off : CpuExperts::Auto;
  out.prefetch = options.prefetch == "on" ? Prefetch::On : options.prefetch == "off" ? Prefetch::Off : Prefetch::Auto;
  return out;
}

std::unique_ptr<Engine> open_engine(const ModelOptions& options) {
  const auto reporter = std::make_shared<Reporter>(options.verbose);
  EngineOptions with_sinks = engine_options(options);
  with_sinks.log = [reporter](LogLevel level, std::string_view text) { reporter->log(level, text); };
  with_sinks.progress = [reporter](std::string_view what, std::uint64_t done, std::uint64_t total) {
    reporter->progress(what, done, total);
  };
  std::unique_ptr<Engine> engine = Engine::open(with_sinks);
  reporter->loaded();
  return engine;
}

std::unique_ptr<Session> open_session(Engine& engine, const ModelOptions& options) {
  return engine.create_session(session_options(options));
}

const Tokenizer& need_tokenizer(const Engine& engine, const char* verb) {
  const Tokenizer* tokenizer = engine.tokenizer();
  if (tokenizer == nullptr)
    fail(ErrorCode::Unsupported,
         "{}: no tokenizer.json, so `{}` cannot read text; `moeflux logits` takes token ids",
         engine.info().path.string(), verb);
  return *tokenizer;
}

std::string mode_line(const Engine& engine, const Session& session, const ModelOptions& options) {
  const ModelInfo& info = engine.info();
  return fmt::format("{} ({}, {} layers) | {} | {} | kv {} | ctx {} | {}", folder_name(options.model), info.family,
                     info.n_layers, engine.backend_name(),
                     engine.precision() == Precision::Exact ? "exact" : "fast", options.kv,
                     session.ctx_size(), engine.experts_description());
}

void note_memory(const Engine& engine) {
  const MemorySplit& m = engine.memory();
  if (m.all_in_memory) return;
  const auto text = [](std::uint64_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  if (const DeviceSplit& d = m.device; d.vram_bytes > 0)
    return note(fmt::format("device memory {}: trunk {}, session {} (chunks of {}), {} slots for experts {}, other {} | memory {}: {} slots {}, other {}",
                            text(d.vram_bytes), text(d.trunk_bytes), text(d.session_bytes), m.chunk_size, d.n_slots, text(d.n_slots * d.slot_bytes),
                            text(d.other_bytes), text(m.ram_bytes), m.n_slots, text(m.expert_bytes), text(m.other_bytes)));
  note(fmt::format("memory {}: trunk {}, session {} (chunks of {}), {} experts {}, other {}", text(m.ram_bytes), text(m.trunk_bytes),
                   text(m.session_bytes()), m.chunk_size, m.n_slots, text(m.expert_bytes), text(m.other_bytes)));
}

std::string closing_line(const SessionStats& stats) {
  return fmt::format(
      "prefill {} tokens, {} | decode {} tokens, {} | hit rate {:.1f} % | {} read per token | logits {}",
      stats.prefill_tokens, rate_text(stats.prefill_rate()), stats.decode_tokens,
      rate_text(stats.decode_rate()), stats.hit_rate() * 100, bytes_text(stats.bytes_read_per_token()),
      hash_text(stats.logits_hash));
}

std::string folder_name(const std::string& path) {
  std::error_code error;
  std::filesystem::path folder = std::filesystem::weakly_canonical(path, error);
  if (error) folder = path;
  if (!folder.has_filename()) folder = folder.parent_path();
  return folder.has_filename() ? folder.filename().string() : path;
}

std::string bytes_text(double bytes) {
  constexpr std::array kUnits = {"kB", "MB", "GB", "TB"};
  if (bytes < 1000) return fmt::format("{:.0f} B", bytes);
  std::size_t unit = 0;
  bytes /= 1000;
  // 999.95 would be rounded to 1000.0 of the smaller unit.
  while (bytes >= 999.95 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  return fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string hash_text(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

}  // namespace moeflux::cli
