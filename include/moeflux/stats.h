// What a session counted.
#pragma once

#include <cstdint>

namespace moeflux {

struct SessionStats {
  std::int64_t prefill_tokens = 0;
  std::uint64_t prefill_ns = 0;
  std::int64_t decode_tokens = 0;
  std::uint64_t decode_ns = 0;
  // Routed experts: how many were asked for (once per layer and chunk), how many of them were in memory.
  std::uint64_t expert_requests = 0;
  std::uint64_t expert_hits = 0;
  std::uint64_t bytes_read = 0;  // from disk for this session's experts
  std::uint64_t stall_ns = 0;    // time spent waiting for experts
  // Where experts are in tiers (by all sessions): of those asked for, where they were, and what was copied over the link.
  std::uint64_t device_hits = 0, host_hits = 0, disk_misses = 0;
  std::uint64_t bytes_to_device = 0, bytes_to_host = 0;
  std::uint64_t cpu_experts = 0;  // of this session's experts in main memory: computed there by the processor
  // Prefetch: experts foretold for a next layer and chosen there; experts read on a hint (by all sessions), asked for
  // later, and evicted before anybody asked; decode steps with and without it, and their medians in the last trial.
  std::uint64_t predicted = 0, predicted_right = 0;
  std::uint64_t hints_issued = 0, hints_used = 0, hints_wasted = 0;
  std::uint64_t prefetch_steps_on = 0, prefetch_steps_off = 0;
  std::uint64_t prefetch_on_ns = 0, prefetch_off_ns = 0;  // 0: not tried
  std::uint64_t logits_hash = 0;  // of the bytes of the last logits; 0 before there are any

  double prefill_rate() const noexcept { return rate(prefill_tokens, prefill_ns); }
  double decode_rate() const noexcept { return rate(decode_tokens, decode_ns); }
  double hit_rate() const noexcept {
    return expert_requests == 0 ? 1.0 : static_cast<double>(expert_hits) / static_cast<double>(expert_requests);
  }
  double prefetch_recall() const noexcept { return ratio(predicted_right, predicted); }
  double prefetch_precision() const noexcept { return ratio(hints_used, hints_issued); }
  double bytes_read_per_token() const noexcept {
    const std::int64_t n = prefill_tokens + decode_tokens;
    return n == 0 ? 0.0 : static_cast<double>(bytes_read) / static_cast<double>(n);
  }

 private:
  static double ratio(std::uint64_t part, std::uint64_t whole) noexcept {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  }
  static double rate(std::int64_t tokens, std::uint64_t ns) noexcept {
    return ns == 0 ? 0.0 : static_cast<double>(tokens) * 1e9 / static_cast<double>(ns);
  }
};

}  // namespace moeflux
