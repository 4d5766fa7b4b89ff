#include "engine/routing_files.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "core/error.h"

namespace moeflux::engine {
namespace {

std::int64_t most_experts(const model::ModelSpec& spec) {
  std::int64_t most = 0;
  for (const model::LayerSpec& l : spec.layers)
    if (const auto* moe = std::get_if<model::MoeSpec>(&l.ffn)) most = std::max(most, moe->n_experts);
  return most;
}

}  // namespace

RoutingReplay::RoutingReplay(store::RoutingTrace trace) : trace_(std::move(trace)) {
  if (trace_.n_steps() == 0 || trace_.n_requests() == 0) fail(ErrorCode::InvalidArgument, "the trace has no steps to replay");
}

void RoutingReplay::choose(std::int64_t position, std::int64_t layer, std::int64_t n_experts, std::span<std::int32_t> ids) const {
  const auto step = static_cast<std::size_t>(position) % trace_.n_steps();
  const auto n_trace_layers = static_cast<std::int64_t>(trace_.n_layers(step));
  const std::int64_t ranges = std::max<std::int64_t>(1, n_experts / trace_.n_experts());
  std::size_t n = 0;
  const auto add = [&](std::int64_t id) {
    const auto value = static_cast<std::int32_t>(id % n_experts);
    if (n < ids.size() && std::find(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n), value) == ids.begin() + static_cast<std::ptrdiff_t>(n))
      ids[n++] = value;
  };
  // Rounds over the layers of the trace, `ranges` of them at a time, rank by rank.
  const std::int64_t stride = std::max<std::int64_t>(1, n_trace_layers / ranges);
  for (std::int64_t round = 0; n < ids.size() && round * ranges < n_trace_layers; ++round) {
    for (std::size_t rank = 0, left = 1; left > 0 && n < ids.size(); ++rank) {
      left = 0;
      for (std::int64_t j = 0; j < ranges; ++j) {
        const auto chosen = trace_.experts(step, static_cast<std::size_t>((layer + j * stride + round) % n_trace_layers));
        if (rank >= chosen.size()) continue;
        ++left;
        add(j * trace_.n_experts() + raw(chosen[rank]));
      }
    }
  }
  for (std::int64_t id = 0; n < ids.size(); ++id) add(id);  // a step without layers, or with too few experts
}

RoutingFiles::RoutingFiles(const std::filesystem::path& trace, const std::filesystem::path& replay, std::string_view model_name, const model::ModelSpec& spec) {
  std::int64_t n_layers = 0;
  for (const model::LayerSpec& l : spec.layers) {
    moe_index_.push_back(n_layers);
    n_layers += std::holds_alternative<model::MoeSpec>(l.ffn) ? 1 : 0;
  }
  if (!replay.empty()) replay_.emplace(store::RoutingTrace::read(replay));
  if (!trace.empty()) writer_.emplace(trace, model_name, n_layers, most_experts(spec));
}

void RoutingFiles::begin_pass(std::int64_t pos0, std::int64_t n_tokens) {
  pos0_ = pos0;
  n_tokens_ = n_tokens;
  if (writer_) writer_->begin_pass();
}

bool RoutingFiles::routed(LayerIdx layer, std::int64_t n_experts, std::int64_t top_k, std::span<std::int32_t> ids) {
  const auto k = static_cast<std::size_t>(top_k);
  if (replay_)
    for (std::int64_t t = 0; t < n_tokens_; ++t)
      replay_->choose(pos0_ + t, moe_index_[static_cast<std::size_t>(raw(layer))], n_experts, ids.subspan(static_cast<std::size_t>(t) * k, k));
  if (writer_) {
    row_.clear();
    for (std::int32_t id : ids) row_.push_back(ExpertIdx(id));
    writer_->routed(row_, static_cast<std::size_t>(n_tokens_));
  }
  return replay_.has_value();
}

void RoutingFiles::end_pass(bool decode) {
  if (writer_) writer_->end_pass(decode ? store::TracePhase::Decode : store::TracePhase::Prefill);
}

void RoutingFiles::finish() {
  if (writer_) writer_->finish();
}

}  // namespace moeflux::engine
