// An engine is a loaded model: weights, backend, tokenizer. Sessions run on it.
#pragma once

#include <moeflux/options.h>
#include <moeflux/plan.h>
#include <moeflux/session.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moeflux {

// What a model folder holds, from config.json and headers alone.
struct ModelInfo {
  std::string family;      // the registered family that reads it
  std::string model_type;  // as config.json has it
  std::filesystem::path path;
  std::int64_t n_layers = 0;
  std::vector<std::string> mixers;  // per layer: "attention", "latent attention", "delta-net"
  std::int64_t n_moe_layers = 0;
  std::int64_t hidden_dim = 0;
  std::int64_t vocab_size = 0;
  std::int64_t n_heads = 0, n_kv_heads = 0, head_dim = 0;  // of the attention layers
  std::int64_t n_experts = 0, top_k = 0, expert_dim = 0, shared_dim = 0;
  std::int64_t max_context = 0;
  std::uint64_t n_params = 0;         // weights, however they are stored
  std::uint64_t n_trunk_params = 0;   // of them all but the routed experts
  std::uint64_t n_active_params = 0;  // of them what one token is multiplied with: top-k experts, no embedding
  std::uint64_t trunk_bytes = 0;       // as loaded
  std::uint64_t trunk_bytes_per_token = 0;  // what decoding one token reads of it: one row of the embedding, all else
  std::uint64_t expert_bytes = 0;      // all experts, as loaded, without padding
  std::uint64_t bytes_per_expert = 0;  // the largest, likewise
  std::uint64_t active_expert_bytes_per_token = 0;  // without any cache
  std::uint64_t kv_bytes_per_token_f16 = 0;
  std::uint64_t state_bytes = 0;  // recurrent state of one sequence
  std::map<std::string, std::uint64_t> trunk_formats;   // format -> bytes
  std::map<std::string, std::uint64_t> expert_formats;
  std::string tokenizer;              // description; empty when there is none
  std::vector<std::string> missing;   // tensors the model needs and the folder lacks, files that are absent
  std::vector<std::string> warnings;  // unknown config keys, extra tensors, ..
};

// Throws as Engine::open does for a folder that cannot be understood; missing tensors are listed in the result.
ModelInfo inspect_model(const std::filesystem::path& model);

// The tokenizer of a folder alone, without its weights: for tokenizing and for tests.
class Tokenizer {
 public:
  // InvalidModel: tokenizer.json is broken; InvalidArgument: the folder or the file is missing.
  static Tokenizer open(const std::filesystem::path& model);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // Special tokens in the text stay plain text unless parse_special.
  std::vector<TokenId> encode(std::string_view text, bool parse_special = false) const;
  std::string decode(std::span<const TokenId> tokens, bool skip_special = false) const;
  std::string token_text(TokenId token) const;  // bytes of one token; may be part of a UTF-8 sequence
  std::size_t vocab_size() const;

 private:
  friend class Engine;
  struct Impl;
  explicit Tokenizer(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

// Thread-safe; any number of sessions may run on one engine, any number of engines in one process.
class Engine {
 public:
  // InvalidArgument: no such folder, bad options. InvalidModel, Unsupported: what the folder holds. Io, OutOfMemory.
  static std::unique_ptr<Engine> open(const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const ModelInfo& info() const noexcept;
  std::string backend_name() const;  // "cpu avx512, 2 threads"
  // "all 10240 experts in memory", "2560 of 10240 experts in memory, streamed by uring".
  const std::string& experts_description() const noexcept;
  // How the memory ceiling was divided.
  const MemorySplit& memory() const noexcept;
  Precision precision() const noexcept;

  // How fast this engine's number of threads reads experts where they lie, without computing: bytes per second. 0 where they are
  // not all in host memory. Takes some hundredths of a second and no memory.
  double probe_weights() const;

  std::unique_ptr<Session> create_session(const SessionOptions& options);

  // nullptr when the folder has no tokenizer.json: tokens in, tokens out.
  const Tokenizer* tokenizer() const noexcept;
  const std::vector<TokenId>& stop_tokens() const noexcept;
  // From generation_config.json where it says something.
  const SamplingParams& default_sampling() const noexcept;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// "0.1.0".
const char* version() noexcept;

}  // namespace moeflux
