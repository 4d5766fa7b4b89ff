// One sequence: its cache, its recurrent state, its position.
#pragma once

#include <moeflux/options.h>
#include <moeflux/stats.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace moeflux {

enum class StopReason { MaxTokens, StopToken, ContextFull, Cancelled, Callback };

struct GenerateOptions {
  std::int64_t max_tokens = -1;  // < 0: until a stop token or the context's end
  SamplingParams sampling;
  bool ignore_stop = false;  // go on past stop tokens
  // Called for every token with the text that became complete (whole UTF-8 sequences; may be empty). The token that
  // ends generation comes with the rest of the text; a stop token itself has no text. Return false to stop.
  std::function<bool(TokenId token, std::string_view text)> on_token;
};

struct GenerateResult {
  std::int64_t n_tokens = 0;  // generated, the stop token not counted
  StopReason reason = StopReason::MaxTokens;
};

// Called with the logits of one position, in order; the span is valid during the call.
using LogitsSink = std::function<void(std::int64_t position, std::span<const float> logits)>;
// Called with the residual stream at one position: layer 0 is the embedding, n after layer n, the last one after the
// final norm. Positions come in chunks, layer by layer.
using HiddenSink = std::function<void(std::int64_t layer, std::int64_t position, std::span<const float> hidden)>;

struct EvaluateOptions {
  bool one_at_a_time = false;  // decode instead of prefill: the same bytes
  LogitsSink on_logits;        // every position, when set
  HiddenSink on_hidden;
};

// What one layer of one decoded token took from memory and from disk.
struct LayerReads {
  std::int32_t layer = 0;
  std::uint32_t n_hits = 0;                // experts that were in memory
  std::vector<std::int32_t> missed;        // those that had to be read
};

// Made by Engine::create_session; the engine must outlive it. One thread at a time, except cancel().
//
// After an error in the middle of a computation the session is at the position before it; where recurrent state was
// already touched it refuses further steps until reset().
class Session {
 public:
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Appends tokens and computes the logits of the last one. InvalidArgument: no tokens, an id outside the vocabulary,
  // more tokens than the context holds (nothing is changed then).
  void prefill(std::span<const TokenId> tokens);
  // Appends one token and computes its logits.
  void step(TokenId token);
  // Of the last position; empty before the first. Valid until the next call.
  std::span<const float> logits() const noexcept;

  // Like prefill, with the logits or hidden states of every position handed out.
  void evaluate(std::span<const TokenId> tokens, const EvaluateOptions& options);

  // Prefills the prompt (may be empty when logits() are there) and generates. The last generated token is chosen but not
  // computed: to go on from it, begin the next prompt with it.
  GenerateResult generate(std::span<const TokenId> prompt, const GenerateOptions& options);

  std::int64_t position() const noexcept;  // tokens so far
  std::int64_t ctx_size() const noexcept;
  void reset();  // back to position 0; statistics are kept

  // Stops the running call soon: generate() returns with Cancelled, other calls throw Cancelled. Callable from any
  // thread and from a signal handler. Stays set until reset_cancel().
  void cancel() noexcept;
  void reset_cancel() noexcept;

  const SessionStats& stats() const noexcept;

  // With SessionOptions::trace: the file appears under its name. Throws Io. Nothing to do otherwise.
  void finish_trace();
  // With SessionOptions::record_reads: every layer with experts of every decoded token since the last reset(), in order.
  std::span<const LayerReads> reads() const noexcept;

 private:
  friend class Engine;
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeflux
