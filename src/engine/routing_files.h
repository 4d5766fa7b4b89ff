// Routing recorded to a file, and routing taken from one: `--trace` and `--replay`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/routing_hook.h"
#include "model/spec.h"
#include "store/trace.h"

namespace moeflux::engine {

// Takes the choices of a model's routers from a trace of another model, so that random weights meet real locality.
//
// The token at position p meets step p of the trace (from the start again after its end). Layer l takes its experts from
// layer l of the trace; a model with r times the experts takes them from r layers of the trace in turn, each in a range of
// ids of its own. Where the trace has fewer ranks than the model wants, further layers fill up. So every expert of the model
// is in play, and what repeats from token to token in the trace repeats in the model.
class RoutingReplay {
 public:
  // InvalidArgument: nothing in the trace.
  explicit RoutingReplay(store::RoutingTrace trace);

  // Fills `ids` (top_k of them, distinct, below n_experts >= top_k) for the layer-th layer with experts.
  void choose(std::int64_t position, std::int64_t layer, std::int64_t n_experts, std::span<std::int32_t> ids) const;

 private:
  store::RoutingTrace trace_;
};

// The hook of one session. Not thread-safe, like the session.
class RoutingFiles final : public model::RoutingHook {
 public:
  // An empty path: not wanted. Throws as RoutingTrace::read and TraceWriter.
  RoutingFiles(const std::filesystem::path& trace, const std::filesystem::path& replay, std::string_view model_name, const model::ModelSpec& spec);

  void begin_pass(std::int64_t pos0, std::int64_t n_tokens) override;
  bool routed(LayerIdx layer, std::int64_t n_experts, std::int64_t top_k, std::span<std::int32_t> ids) override;
  Kind kind() const noexcept override { return replay_ ? Kind::Foretells : Kind::Looks; }
  void end_pass(bool decode) override;
  // The trace appears under its name. Throws Io.
  void finish();

 private:
  std::vector<std::int64_t> moe_index_;  // of each layer among those with experts
  std::optional<store::TraceWriter> writer_;
  std::optional<RoutingReplay> replay_;
  std::int64_t pos0_ = 0, n_tokens_ = 0;
  std::vector<ExpertIdx> row_;
};

}  // namespace moeflux::engine
