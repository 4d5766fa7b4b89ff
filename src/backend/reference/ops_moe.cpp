// Routing, experts, combination.
#include <algorithm>
#include <cmath>

#include "backend/reference/reference_impl.h"

namespace moeflux::backend {
namespace {

std::vector<double> router_scores(const Route& op, const float* logits) {
  std::vector<double> scores(logits, logits + op.logits.dim(1));
  if (op.score == RouterScore::Sigmoid)
    for (double& s : scores) s = reference::sigmoid(s);
  if (op.score == RouterScore::Softmax) {
    const double top = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (double& s : scores) sum += s = std::exp(s - top);
    for (double& s : scores) s /= sum;
  }
  return scores;
}

// Indices of the n largest values among the allowed, best first; the lower index wins a tie.
std::vector<std::size_t> largest(const std::vector<double>& values, const std::vector<bool>& allowed,
                                 std::size_t n) {
  std::vector<bool> open = allowed;
  std::vector<std::size_t> chosen;
  while (chosen.size() < n) {
    std::size_t best = values.size();
    for (std::size_t i = 0; i < values.size(); ++i)
      if (open[i] && (best == values.size() || values[i] > values[best])) best = i;
    open[best] = false;
    chosen.push_back(best);
  }
  return chosen;
}

std::vector<bool> allowed_experts(const Route& op, const std::vector<double>& keys) {
  std::vector<bool> allowed(keys.size(), op.n_groups == 1);
  if (op.n_groups == 1) return allowed;
  const auto n_groups = static_cast<std::size_t>(op.n_groups);
  const std::size_t per_group = keys.size() / n_groups;
  std::vector<double> values;
  for (std::size_t g = 0; g < n_groups; ++g) {
    const auto begin = keys.begin() + static_cast<std::ptrdiff_t>(g * per_group);
    std::vector<double> group(begin, begin + static_cast<std::ptrdiff_t>(per_group));
    std::sort(group.rbegin(), group.rend());
    values.push_back(op.score == RouterScore::Sigmoid ? group[0] + group[1] : group[0]);
  }
  for (const std::size_t g :
       largest(values, std::vector<bool>(n_groups, true), static_cast<std::size_t>(op.topk_groups)))
    for (std::size_t i = 0; i < per_group; ++i) allowed[g * per_group + i] = true;
  return allowed;
}

std::vector<double> router_weights(const Route& op, const std::vector<double>& scores,
                                   const std::vector<std::size_t>& chosen) {
  std::vector<double> weights;
  for (const std::size_t e : chosen) weights.push_back(scores[e]);
  if (op.score == RouterScore::SoftmaxOfChosen) {
    const double top = weights[0];
    double sum = 0.0;
    for (double& w : weights) sum += w = std::exp(w - top);
    for (double& w : weights) w /= sum;
  }
  double divisor = 1.0;
  if (op.normalize) {
    divisor = static_cast<double>(op.norm_eps);
    for (const double w : weights) divisor += w;
  }
  for (double& w : weights) w = w / divisor * static_cast<double>(op.scaling);
  return weights;
}

}  // namespace

using reference::at;

void ReferenceBackend::execute(Stream&, const Route& op) {
  const auto k = static_cast<std::size_t>(op.ids.dim(1));
  for (std::int64_t t = 0; t < op.logits.dim(0); ++t) {
    const std::vector<double> scores = router_scores(op, op.logits.row(t));
    std::vector<double> keys = scores;
    for (std::size_t e = 0; e < keys.size() && !op.select_bias.empty(); ++e)
      keys[e] += static_cast<double>(at(op.select_bias, static_cast<std::int64_t>(e)));
    const std::vector<std::size_t> chosen = largest(keys, allowed_experts(op, keys), k);
    const std::vector<double> weights = router_weights(op, scores, chosen);
    for (std::size_t r = 0; r < k; ++r) {
      op.ids.i32()[t * op.ids.stride(0) + static_cast<std::int64_t>(r)] =
          static_cast<std::int32_t>(chosen[r]);
      at(op.weights, t, static_cast<std::int64_t>(r)) = static_cast<float>(weights[r]);
    }
  }
}

void ReferenceBackend::execute(Stream&, const ExpertFfn& op) {
  for (const ExpertWork& work : op.works)
    for (std::size_t i = 0; i < work.rows.size(); ++i) {
      const std::span<const float> x(op.x.row(work.rows[i]), static_cast<std::size_t>(op.x.dim(1)));
      std::vector<float> gate = reference::matvec(work.m.gate, work.m.gate_bias, x, op.precision);
      const std::vector<float> up = reference::matvec(work.m.up, work.m.up_bias, x, op.precision);
      for (std::size_t j = 0; j < gate.size(); ++j)
        gate[j] = static_cast<float>(reference::glu(op.glu, static_cast<double>(gate[j]),
                                                    static_cast<double>(up[j]), static_cast<double>(op.limit),
                                                    static_cast<double>(op.alpha)));
      const std::vector<float> y = reference::matvec(work.m.down, work.m.down_bias, gate, op.precision);
      std::copy(y.begin(), y.end(), op.y.row(work.slots[i]));
    }
}

void ReferenceBackend::execute(Stream&, const Combine& op) {
  for (std::int64_t t = 0; t < op.rows.dim(0); ++t)
    for (std::int64_t i = 0; i < op.rows.dim(2); ++i) {
      double sum = 0.0;
      for (std::int64_t r = 0; r < op.rows.dim(1); ++r)
        sum += static_cast<double>(at(op.weights, t, r)) * static_cast<double>(at(op.rows, t, r, i));
      if (!op.shared.empty()) {
        const double gate =
            op.shared_gate.empty() ? 1.0 : reference::sigmoid(static_cast<double>(at(op.shared_gate, t, 0)));
        sum += gate * static_cast<double>(at(op.shared, t, i));
      }
      at(op.h, t, i) = static_cast<float>(static_cast<double>(at(op.h, t, i)) + sum);
    }
}

}  // namespace moeflux::backend
