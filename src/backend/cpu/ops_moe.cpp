// Route and Combine.
#include <algorithm>
#include <limits>

#include "backend/cpu/cpu_internal.h"
#include "core/scalar_math.h"

namespace moeflux::backend::cpu {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// Experts outside the best groups get a key of -inf.
void mask_groups(const Route& op, float* key, std::int64_t n_experts, float* value) noexcept {
  const std::int64_t size = n_experts / op.n_groups;
  for (std::int64_t g = 0; g < op.n_groups; ++g) {
    float best = kMinusInf, second = kMinusInf;
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (key[e] > best) {
        second = best;
        best = key[e];
      } else if (key[e] > second) {
        second = key[e];
      }
    }
    value[g] = op.score == RouterScore::Sigmoid && size > 1 ? best + second : best;
  }
  for (std::int64_t g = 0; g < op.n_groups; ++g) {
    std::int64_t better = 0;  // groups that come before g
    for (std::int64_t o = 0; o < op.n_groups; ++o) better += value[o] > value[g] || (value[o] == value[g] && o < g);
    if (better >= op.topk_groups)
      for (std::int64_t e = g * size; e < (g + 1) * size; ++e) key[e] = kMinusInf;
  }
}

// The k best keys, best first, ties to the lower index: one pass with insertion into a short list.
void choose(const float* key, std::int64_t n_experts, std::int32_t* ids, std::int64_t k) noexcept {
  std::int64_t n = 0;
  for (std::int64_t e = 0; e < n_experts; ++e) {
    if (n == k && !(key[e] > key[ids[k - 1]])) continue;
    std::int64_t at = n < k ? n++ : k - 1;
    for (; at > 0 && key[e] > key[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<std::int32_t>(e);
  }
}

void route_row(const KernelTable& k, const Route& op, std::int64_t t, float* score, float* key) noexcept {
  const std::int64_t n_experts = op.logits.dim(1), top_k = op.ids.dim(1);
  const float* logits = op.logits.row(t);
  std::int32_t* ids = op.ids.i32() + t * op.ids.stride(0);
  float* weights = op.weights.row(t);
  if (op.score == RouterScore::Softmax) {
    const float inv = 1.0f / k.exp_shifted(logits, score, n_experts);
    for (std::int64_t e = 0; e < n_experts; ++e) score[e] *= inv;
  } else if (op.score == RouterScore::Sigmoid) {
    k.sigmoid(logits, score, n_experts);
  } else {
    std::copy_n(logits, n_experts, score);
  }
  for (std::int64_t e = 0; e < n_experts; ++e) key[e] = op.select_bias.empty() ? score[e] : score[e] + op.select_bias.f32()[e];
  if (op.n_groups > 1) mask_groups(op, key, n_experts, key + n_experts);
  choose(key, n_experts, ids, top_k);

  float sum = 0.0f;
  for (std::int64_t r = 0; r < top_k; ++r) {
    weights[r] = op.score == RouterScore::SoftmaxOfChosen ? math::exp(score[ids[r]] - score[ids[0]]) : score[ids[r]];
    sum += weights[r];
  }
  const float divisor = op.score == RouterScore::SoftmaxOfChosen ? sum : sum + op.norm_eps;
  for (std::int64_t r = 0; r < top_k; ++r) {
    if (op.normalize || op.score == RouterScore::SoftmaxOfChosen) weights[r] = weights[r] / divisor;
    weights[r] = weights[r] * op.scaling;
  }
}

}  // namespace

void CpuBackend::execute(Stream& stream, const Route& op) {
  auto& s = static_cast<CpuStream&>(stream);
  const std::int64_t n_tokens = op.logits.dim(0), n_experts = op.logits.dim(1);
  for (Scratch& w : s.workers) w.get(static_cast<std::size_t>(2 * n_experts + op.n_groups) * 4);
  const auto row = [&](std::int64_t t, int worker) noexcept {
    auto* score = reinterpret_cast<float*>(s.workers[static_cast<std::size_t>(worker)].get(0));
    route_row(k_, op, t, score, score + n_experts);
  };
  if (n_tokens * n_experts <= kInlineElements)
    for (std::int64_t t = 0; t < n_tokens; ++t) row(t, 0);
  else
    pool_.run(n_tokens, row);
}

void CpuBackend::execute(Stream&, const Combine& op) {
  const std::int64_t n_tokens = op.h.dim(0), d = op.h.dim(1), n_ranks = op.weights.dim(1);
  const auto row = [&](std::int64_t t, int) noexcept {
    const bool gated = !op.shared_gate.empty();
    k_.combine(op.rows.f32() + t * op.rows.stride(0), op.rows.stride(1), op.weights.row(t), n_ranks,
               op.shared.empty() ? nullptr : op.shared.row(t), gated ? math::sigmoid(*op.shared_gate.row(t)) : 1.0f, gated,
               op.h.row(t), d);
  };
  if (n_tokens * d * n_ranks <= kInlineElements)
    for (std::int64_t t = 0; t < n_tokens; ++t) row(t, 0);
  else
    pool_.run(n_tokens, row);
}

}  // namespace moeflux::backend::cpu
