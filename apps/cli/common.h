// What the verbs share: options, opening a model, the lines around a run.
#pragma once

#include <moeflux/engine.h>
#include <moeflux/options.h>
#include <moeflux/session.h>
#include <CLI/CLI.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "cli/verbs.h"

namespace moeflux::cli {

// The options of every verb that computes.
struct ModelOptions {
  std::string model;
  int n_threads = 0;
  std::string isa;
  std::string precision = "fast";
  std::int64_t ctx_size = 0;
  std::string kv = "f32";
  std::int64_t chunk_size = 0;
  std::string ram;  // a size, or empty
  std::string io = "auto";
  std::string prefetch = "auto";
  std::string trace, replay;  // files, or empty
  bool record_reads = false;
  std::string backend = "auto";
  int gpu = 0;
  std::string vram;  // a size, or empty
  std::string cpu_experts = "auto";
  bool verbose = false;
};

// Accepts integers from `low` on.
CLI::Validator at_least(std::int64_t low);

void add_model_argument(CLI::App& app, std::string& model);
// -t, --precision, --isa, --kv, --chunk, --ram, --io, --prefetch, --backend, --gpu, --vram, --cpu-experts, -v.
void add_engine_options(CLI::App& app, ModelOptions& options);
// --trace: for verbs that run a model on real input.
void add_trace_option(CLI::App& app, ModelOptions& options);
// -c; not for verbs whose context follows from their input.
void add_ctx_option(CLI::App& app, ModelOptions& options);

// "4.9GB", "512 MiB", "24G" (powers of ten; with an i powers of two), plain bytes. InvalidArgument for anything else.
std::uint64_t parse_size(std::string_view text, std::string_view option);

// Parses what follows the verb. False: help was asked for and printed. InvalidArgument: the arguments are
// wrong.
bool parse(CLI::App& app, Arguments arguments);

// The options without sinks.
EngineOptions engine_options(const ModelOptions& options);
// Opens with a progress bar on a terminal and warnings on standard error. Throws as Engine::open does.
std::unique_ptr<Engine> open_engine(const ModelOptions& options);
std::unique_ptr<Session> open_session(Engine& engine, const ModelOptions& options);
// Unsupported, naming the verb, when the folder has no tokenizer.json.
const Tokenizer& need_tokenizer(const Engine& engine, const char* verb);

// "demo (FAMILY, 8 layers) | cpu avx512, 2 threads | fast | kv f32 | ctx 4096".
std::string mode_line(const Engine& engine, const Session& session, const ModelOptions& options);
// How the memory ceiling is divided, on standard error; only where experts are streamed.
void note_memory(const Engine& engine);
// Tokens, rates, hit rate, bytes read per token, hash of the last logits.
std::string closing_line(const SessionStats& stats);

std::string folder_name(const std::string& path);  // "models/demo/" -> "demo"
std::string bytes_text(double bytes);              // "9.7 MB"
std::string hash_text(std::uint64_t hash);         // 16 hex digits

}  // namespace moeflux::cli
