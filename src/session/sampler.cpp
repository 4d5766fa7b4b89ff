#include "session/sampler.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/scalar_math.h"

namespace moeflux::session {
namespace {

bool is_allowed(const std::vector<bool>& allowed, std::size_t id) { return allowed.empty() || (id < allowed.size() && allowed[id]); }

void require(bool ok, const char* name, double value) {
  if (!ok) fail(ErrorCode::InvalidArgument, "{} cannot be {}", name, value);
}

}  // namespace

TokenId argmax(std::span<const float> logits, const std::vector<bool>& allowed) {
  std::int32_t best = -1;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!is_allowed(allowed, i) || std::isnan(logits[i])) continue;
    if (best < 0 || logits[i] > logits[static_cast<std::size_t>(best)]) best = static_cast<std::int32_t>(i);
  }
  if (best < 0) fail(ErrorCode::Internal, "none of {} logits is a number", logits.size());
  return TokenId(best);
}

Sampler::Sampler(const SamplingParams& params, std::vector<bool> allowed)
    : params_(params), allowed_(std::move(allowed)), random_(params.seed) {
  require(params_.temperature >= 0.0 && std::isfinite(params_.temperature), "temperature", params_.temperature);
  require(params_.top_p > 0.0, "top-p", params_.top_p);
  require(params_.min_p < 1.0 && !std::isnan(params_.min_p), "min-p", params_.min_p);
  require(params_.repeat_penalty > 0.0 && std::isfinite(params_.repeat_penalty), "repeat penalty", params_.repeat_penalty);
  require(std::isfinite(params_.frequency_penalty), "frequency penalty", params_.frequency_penalty);
  require(std::isfinite(params_.presence_penalty), "presence penalty", params_.presence_penalty);
}

void Sampler::apply_penalties(std::span<const TokenId> history) {
  const bool none = params_.repeat_penalty == 1.0 && params_.frequency_penalty == 0.0 && params_.presence_penalty == 0.0;
  if (none || params_.repeat_last_n == 0) return;
  const std::size_t n = params_.repeat_last_n < 0 ? history.size() : std::min(history.size(), static_cast<std::size_t>(params_.repeat_last_n));
  counts_.resize(logits_.size(), 0);
  seen_.clear();
  for (TokenId t : history.last(n)) {
    const auto id = static_cast<std::size_t>(raw(t));
    if (id >= logits_.size()) continue;
    if (counts_[id]++ == 0) seen_.push_back(raw(t));
  }
  for (std::int32_t id : seen_) {
    const auto i = static_cast<std::size_t>(id);
    double x = static_cast<double>(logits_[i]);
    x = x > 0.0 ? x / params_.repeat_penalty : x * params_.repeat_penalty;
    x -= static_cast<double>(counts_[i]) * params_.frequency_penalty + params_.presence_penalty;
    logits_[i] = static_cast<float>(x);
    counts_[i] = 0;
  }
}

// The k best in descending order, found without sorting the vocabulary.
void Sampler::keep_top_k() {
  candidates_.clear();
  for (std::size_t i = 0; i < logits_.size(); ++i)
    if (is_allowed(allowed_, i) && !std::isnan(logits_[i])) candidates_.push_back({static_cast<std::int32_t>(i), logits_[i], 0.0});
  if (candidates_.empty()) fail(ErrorCode::Internal, "none of {} logits is a number", logits_.size());
  const auto better = [](const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); };
  const std::size_t k = params_.top_k <= 0 ? candidates_.size() : std::min(candidates_.size(), static_cast<std::size_t>(params_.top_k));
  if (k < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(k - 1), candidates_.end(), better);
    candidates_.resize(k);
  }
  std::sort(candidates_.begin(), candidates_.end(), better);
}

void Sampler::keep_top_p_and_min_p() {
  const float top = candidates_.front().logit;
  double sum = 0.0;
  for (Candidate& c : candidates_) sum += c.p = static_cast<double>(math::exp(c.logit - top));
  std::size_t n = candidates_.size();
  if (params_.top_p < 1.0) {
    double mass = 0.0;
    for (n = 0; n < candidates_.size() && mass < params_.top_p * sum;) mass += candidates_[n++].p;
  }
  if (params_.min_p > 0.0)  // relative to the best, whose p is 1
    for (; n > 1 && candidates_[n - 1].p < params_.min_p;) --n;
  candidates_.resize(std::max<std::size_t>(n, 1));
}

TokenId Sampler::draw() {
  const float top = candidates_.front().logit;
  const auto inverse = static_cast<float>(1.0 / params_.temperature);
  double sum = 0.0;
  for (Candidate& c : candidates_) sum += c.p = static_cast<double>(math::exp((c.logit - top) * inverse));
  const double u = static_cast<double>(random_() >> 11) * 0x1p-53 * sum;  // 53 bits: the same double everywhere
  double mass = 0.0;
  for (const Candidate& c : candidates_) {
    mass += c.p;
    if (u < mass) return TokenId(c.id);
  }
  return TokenId(candidates_.back().id);
}

TokenId Sampler::sample(std::span<const float> logits, std::span<const TokenId> history) {
  logits_.assign(logits.begin(), logits.end());
  apply_penalties(history);
  if (params_.temperature == 0.0) return argmax(logits_, allowed_);
  keep_top_k();
  keep_top_p_and_min_p();
  return draw();
}

}  // namespace moeflux::session
