// The public Session: the timeline, plus sampling and text.
#include <moeflux/session.h>

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "engine/engine_impl.h"
#include "session/sampler.h"
#include "text/detokenizer.h"

namespace moeflux {

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() = default;

void Session::prefill(std::span<const TokenId> tokens) { impl_->timeline.prefill(tokens); }
void Session::step(TokenId token) { impl_->timeline.step(token); }
std::span<const float> Session::logits() const noexcept { return impl_->timeline.logits(); }
void Session::evaluate(std::span<const TokenId> tokens, const EvaluateOptions& options) { impl_->timeline.evaluate(tokens, options); }
std::int64_t Session::position() const noexcept { return impl_->timeline.position(); }
std::int64_t Session::ctx_size() const noexcept { return impl_->timeline.ctx_size(); }
void Session::reset() { impl_->timeline.reset(); }
void Session::cancel() noexcept { impl_->timeline.cancel(); }
void Session::reset_cancel() noexcept { impl_->timeline.reset_cancel(); }
const SessionStats& Session::stats() const noexcept { return impl_->timeline.stats(); }

std::span<const LayerReads> Session::reads() const noexcept { return impl_->timeline.reads(); }
void Session::finish_trace() {
  if (impl_->routing) impl_->routing->finish();
}

GenerateResult Session::generate(std::span<const TokenId> prompt, const GenerateOptions& options) {
  session::Session& timeline = impl_->timeline;
  session::Sampler sampler(options.sampling, *impl_->allowed);
  std::optional<text::StreamDecoder> decoder;
  if (impl_->text != nullptr) decoder.emplace(*impl_->text, true);
  const std::vector<TokenId>& stops = impl_->engine->stop_tokens();

  GenerateResult result;
  try {
    if (!prompt.empty() || timeline.logits().empty()) timeline.prefill(prompt);
    for (;;) {
      if (options.max_tokens >= 0 && result.n_tokens >= options.max_tokens) {
        result.reason = StopReason::MaxTokens;
        break;
      }
      if (timeline.cancelled()) {
        result.reason = StopReason::Cancelled;
        break;
      }
      const TokenId token = sampler.sample(timeline.logits(), timeline.history());
      if (!options.ignore_stop && std::find(stops.begin(), stops.end(), token) != stops.end()) {
        result.reason = StopReason::StopToken;
        if (options.on_token) options.on_token(token, decoder ? decoder->finish() : std::string());
        return result;
      }
      ++result.n_tokens;
      const bool full = timeline.position() >= timeline.ctx_size();
      const bool last = full || result.n_tokens == options.max_tokens;
      std::string text = decoder ? decoder->push(token) : std::string();
      if (last && decoder) text += decoder->finish();
      if (options.on_token && !options.on_token(token, text)) {
        result.reason = StopReason::Callback;
        return result;
      }
      if (full) {
        result.reason = StopReason::ContextFull;
        return result;
      }
      if (!last) timeline.step(token);
    }
  } catch (const Error& e) {
    if (e.code() != ErrorCode::Cancelled) throw;
    result.reason = StopReason::Cancelled;
  }
  return result;
}

}  // namespace moeflux
