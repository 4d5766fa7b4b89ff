#include "store/simulate.h"

#include <moeflux/simulate.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include "core/error.h"
#include "store/policy.h"

namespace moeflux::store {
namespace {

// All requests of a trace in order, as one number per expert.
std::vector<std::uint32_t> request_sequence(const RoutingTrace& trace) {
  std::vector<std::uint32_t> keys;
  keys.reserve(trace.n_requests());
  for (std::size_t step = 0; step < trace.n_steps(); ++step)
    for (std::size_t layer = 0; layer < trace.n_layers(step); ++layer)
      for (const ExpertIdx e : trace.experts(step, layer))
        keys.push_back(static_cast<std::uint32_t>(layer * static_cast<std::size_t>(trace.n_experts()) +
                                                  static_cast<std::size_t>(raw(e))));
  return keys;
}

std::size_t n_keys(const RoutingTrace& trace) {
  return trace.max_layers() * static_cast<std::size_t>(trace.n_experts());
}

}  // namespace

std::uint64_t count_hits_ours(const RoutingTrace& trace, std::uint64_t n_slots) {
  const std::vector<std::int64_t> n_experts(trace.max_layers(), trace.n_experts());
  CachePolicy policy(n_experts);
  std::uint64_t hits = 0;
  std::vector<ExpertIdx> missing;
  for (std::size_t step = 0; step < trace.n_steps(); ++step) {
    for (std::size_t l = 0; l < trace.n_layers(step); ++l) {
      const std::span<const ExpertIdx> wanted = trace.experts(step, l);
      const LayerIdx layer{static_cast<std::int32_t>(l)};
      policy.on_visit(layer, wanted);
      missing.clear();
      for (const ExpertIdx e : wanted) {
        if (policy.contains({layer, e}))
          ++hits;
        else
          missing.push_back(e);
      }
      const auto pinned = [&](ExpertKey key) {
        return key.layer == layer && std::find(wanted.begin(), wanted.end(), key.expert) != wanted.end();
      };
      for (const ExpertIdx e : missing) {
        if (policy.size() >= n_slots) {
          const std::optional<ExpertKey> victim = policy.choose_victim(pinned);
          if (!victim) break;  // fewer slots than one layer wants
          policy.erase(*victim);
        }
        policy.insert({layer, e});
      }
    }
  }
  return hits;
}

std::uint64_t count_hits_lru(const RoutingTrace& trace, std::uint64_t n_slots) {
  // A ring of the cached experts through `older` and `newer`; the last place is the anchor.
  const auto anchor = static_cast<std::uint32_t>(n_keys(trace));
  std::vector<std::uint32_t> older(anchor + 1, anchor), newer(anchor + 1, anchor);
  std::vector<std::uint8_t> cached(anchor, 0);
  const auto unlink = [&](std::uint32_t key) {
    newer[older[key]] = newer[key];
    older[newer[key]] = older[key];
  };
  std::uint64_t hits = 0, n_cached = 0;
  for (const std::uint32_t key : request_sequence(trace)) {
    if (cached[key] != 0) {
      ++hits;
      unlink(key);
    } else if (n_cached == n_slots) {
      const std::uint32_t oldest = newer[anchor];
      unlink(oldest);
      cached[oldest] = 0;
    } else {
      ++n_cached;
    }
    cached[key] = 1;
    older[key] = older[anchor];
    newer[key] = anchor;
    newer[older[anchor]] = key;
    older[anchor] = key;
  }
  return hits;
}

std::uint64_t count_hits_belady(const RoutingTrace& trace, std::uint64_t n_slots) {
  constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  const std::vector<std::uint32_t> keys = request_sequence(trace);
  std::vector<std::size_t> next_use(keys.size());
  std::vector<std::size_t> seen(n_keys(trace), kNever);
  for (std::size_t i = keys.size(); i-- > 0;) next_use[i] = std::exchange(seen[keys[i]], i);

  // By key: when it is wanted next; only the entry of the queue that agrees is valid.
  std::vector<std::size_t> wanted_at(n_keys(trace), kNever);
  std::vector<std::uint8_t> cached(n_keys(trace), 0);
  std::priority_queue<std::pair<std::size_t, std::uint32_t>> queue;
  std::uint64_t hits = 0, n_cached = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint32_t key = keys[i];
    if (cached[key] != 0) {
      ++hits;
    } else if (n_cached < n_slots) {
      ++n_cached;
    } else {
      while (cached[queue.top().second] == 0 || wanted_at[queue.top().second] != queue.top().first)
        queue.pop();
      cached[queue.top().second] = 0;
      queue.pop();
    }
    cached[key] = 1;
    wanted_at[key] = next_use[i];
    queue.emplace(next_use[i], key);
  }
  return hits;
}

}  // namespace moeflux::store

namespace moeflux {

Simulation simulate(const std::filesystem::path& path, std::span<const double> cache) {
  const store::RoutingTrace trace = store::RoutingTrace::read(path);
  Simulation result{.model = trace.model(),
                    .n_layers = trace.n_layers(),
                    .n_experts = trace.n_experts(),
                    .n_steps = trace.n_steps(),
                    .n_requests = trace.n_requests(),
                    .rows = {}};
  const auto n_all = static_cast<double>(trace.n_layers() * trace.n_experts());
  const auto rate = [&](std::uint64_t hits) {
    return trace.n_requests() == 0 ? 0.0
                                   : static_cast<double>(hits) / static_cast<double>(trace.n_requests());
  };
  for (const double share : cache) {
    if (!(share > 0 && share <= 1))
      fail(ErrorCode::InvalidArgument, "a cache of {} of all experts: not within 0 to 1", share);
    // A share such as 0.35 of 100 must not become 34.
    const auto n_slots = static_cast<std::uint64_t>(std::floor(share * n_all * (1 + 1e-12)));
    if (n_slots == 0)
      fail(ErrorCode::InvalidArgument, "a cache of {} of {} experts holds none", share, n_all);
    result.rows.push_back({.cache = share,
                           .n_slots = n_slots,
                           .ours = rate(store::count_hits_ours(trace, n_slots)),
                           .lru = rate(store::count_hits_lru(trace, n_slots)),
                           .belady = rate(store::count_hits_belady(trace, n_slots))});
  }
  return result;
}

}  // namespace moeflux
