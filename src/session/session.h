// The timeline of one sequence: tokens in, logits out. Knows tokens, never text.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <moeflux/options.h>
#include <moeflux/session.h>
#include <moeflux/stats.h>

#include "backend/backend.h"
#include "model/model.h"
#include "session/prefetch_governor.h"
#include "session/sequence_state.h"
#include "session/unit_step.h"
#include "store/expert_store.h"

namespace moeflux::session {

// What the engine lends a session; all of it outlives the session.
struct Parts {
  const model::Model& model;
  store::ExpertStore& experts;
  backend::Backend& backend;
  Precision precision = Precision::Fast;
  Prefetch prefetch = Prefetch::Off;
  std::int64_t default_chunk = 0;         // for sessions that do not say; 0: 512
  model::RoutingHook* routing = nullptr;  // of this session; may be null
  backend::Backend* processor = nullptr;  // computes on host memory beside `backend`, a device; may be null
  CpuExperts cpu_experts = CpuExperts::Auto;
};

// The context and chunk that options mean for a model: InvalidArgument for sizes that make no sense or are over its limit.
struct SessionSizes {
  std::int64_t ctx = 0, chunk = 0;
};
SessionSizes session_sizes(const SessionOptions& options, std::int64_t max_context, std::int64_t default_chunk = 0);

// One thread at a time, except cancel(). Positions are reserved by a call and committed when it succeeded: an error leaves
// the session where it was, or, where recurrent state was already touched, refusing further steps until reset().
class Session {
 public:
  // InvalidArgument as session_sizes.
  Session(const Parts& parts, const SessionOptions& options);

  void prefill(std::span<const TokenId> tokens) { evaluate(tokens, {}); }
  void step(TokenId token) { evaluate({&token, 1}, {}); }
  void evaluate(std::span<const TokenId> tokens, const EvaluateOptions& options);

  std::span<const float> logits() const noexcept { return {logits_, has_logits_ ? n_logits() : 0}; }
  std::span<const TokenId> history() const noexcept { return history_; }
  std::int64_t position() const noexcept { return static_cast<std::int64_t>(history_.size()); }
  std::int64_t ctx_size() const noexcept { return ctx_; }
  void reset();

  void cancel() noexcept { cancelled_.store(true, std::memory_order_relaxed); }
  void reset_cancel() noexcept { cancelled_.store(false, std::memory_order_relaxed); }
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }

  const SessionStats& stats() const noexcept;
  std::span<const LayerReads> reads() const noexcept { return reads_; }

 private:
  Session(const Parts& parts, const SessionOptions& options, SessionSizes sizes);
  std::size_t n_logits() const noexcept { return static_cast<std::size_t>(parts_.model.spec().vocab_size); }
  void check_tokens(std::span<const TokenId> tokens) const;
  void run_ops(model::Context& c, bool last, const EvaluateOptions& options, const model::ForwardHooks& hooks);
  void run_chunk(std::span<const TokenId> tokens, bool last, bool decode, const EvaluateOptions& options);
  void hand_out_logits(model::Context& c, const TensorView& hidden, std::int64_t pos0, const LogitsSink& sink);
  float* logits_row() const noexcept;
  void take_logits();
  void fetch_logits(std::int64_t row);
  bool routed_on_device() const;
  void count(std::int64_t n_tokens, bool decode, std::uint64_t start_ns);
  void count_prefetch();

  Parts parts_;
  std::int64_t ctx_ = 0;
  std::int64_t chunk_ = 0;
  std::unique_ptr<backend::Stream> stream_;
  SequenceState state_;
  model::Arena arena_;
  model::MoeScratch moe_;
  model::ExpertCounters counters_;
  PrefetchGovernor governor_;
  bool record_reads_ = false;
  std::vector<LayerReads> reads_;
  Buffer logits_device_;
  Buffer logits_host_;               // host memory that copies fast; empty where the host reads the device's in place
  const float* logits_ = nullptr;    // the last row that was fetched
  bool repeatable_ = false;  // a step of one token is the same ops every time
  std::unique_ptr<UnitStep> units_;  // where experts are in tiers and the backend records units; may be null
  bool has_logits_ = false;
  bool broken_ = false;
  std::vector<TokenId> history_;
  std::vector<std::int32_t> chunk_tokens_;
  std::atomic<bool> cancelled_{false};
  mutable SessionStats stats_;
  mutable bool hash_stale_ = false;  // logits_hash is made when somebody asks
};

}  // namespace moeflux::session
