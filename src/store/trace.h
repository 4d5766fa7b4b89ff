// Recorded routing: which experts each layer chose for each token. The format is described in docs/format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <moeflux/types.h>

#include "io/output_file.h"

namespace moeflux::store {

enum class TracePhase : std::uint8_t { Prefill, Decode };

// A trace in memory.
class RoutingTrace {
 public:
  // Throws Io, or InvalidModel naming file and line: no header, a line that is no step, an expert beyond
  // n_experts or twice in one layer, over 2^20 experts in all, over 2 GiB.
  static RoutingTrace read(const std::filesystem::path& path);

  const std::string& model() const noexcept { return model_; }
  std::int64_t n_experts() const noexcept { return n_experts_; }
  // Of the header, or else of the first step. A step may have fewer or more (a prefill may skip the last
  // layer).
  std::int64_t n_layers() const noexcept { return n_layers_; }
  // The most layers of any step.
  std::size_t max_layers() const noexcept { return max_layers_; }

  std::size_t n_steps() const noexcept { return steps_.size(); }
  TracePhase phase(std::size_t step) const noexcept { return steps_[step].phase; }
  std::size_t n_layers(std::size_t step) const noexcept { return steps_[step].n_layers; }
  // In the order of the file.
  std::span<const ExpertIdx> experts(std::size_t step, std::size_t layer) const noexcept {
    const std::size_t at = steps_[step].first_layer + layer;
    return {experts_.data() + ends_[at], ends_[at + 1] - ends_[at]};
  }
  std::size_t n_requests() const noexcept { return experts_.size(); }

 private:
  struct Step {
    std::size_t first_layer = 0, n_layers = 0;
    TracePhase phase = TracePhase::Decode;
  };
  void read_header(std::string_view line, const std::string& origin);
  void read_step(std::string_view line, const std::string& origin, std::vector<std::uint8_t>& seen);

  std::string model_;
  std::int64_t n_experts_ = 0, n_layers_ = 0;
  std::size_t max_layers_ = 0;
  std::vector<Step> steps_;
  std::vector<std::size_t> ends_ = {0};  // of each layer of each step, in experts_
  std::vector<ExpertIdx> experts_;
};

// Records while a model runs. The file appears at finish(). Not thread-safe.
class TraceWriter {
 public:
  // n_layers counts layers with experts. Throws Io.
  TraceWriter(const std::filesystem::path& path, std::string_view model, std::int64_t n_layers,
              std::int64_t n_experts);

  // Forgets what a pass that was broken off has left.
  void begin_pass() noexcept {
    layers_.clear();
    experts_.clear();
  }
  // The choice of one layer for the tokens of a pass, [n_tokens, top_k] in rank order; layers in their order.
  // All layers of a pass see the same number of tokens, except that the last ones may see fewer: the last
  // tokens then.
  void routed(std::span<const ExpertIdx> experts, std::size_t n_tokens);
  // The pass is over: one line for each of its tokens. Throws Io.
  void end_pass(TracePhase phase);
  // Throws Io.
  void finish();

 private:
  struct Layer {
    std::size_t first = 0, n_tokens = 0, top_k = 0;
  };
  void write(std::string_view text);

  io::OutputFile file_;
  std::vector<Layer> layers_;  // of the pass
  std::vector<ExpertIdx> experts_;
  std::string line_;
};

}  // namespace moeflux::store
