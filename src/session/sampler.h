// Choosing the next token from logits. The steps and their order are those of SamplingParams in <moeflux/options.h>.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <moeflux/options.h>
#include <moeflux/types.h>

namespace moeflux::session {

// The best of the allowed ids; ties go to the lower one. `allowed` empty: all are. NaN logits lose against everything;
// throws Internal when nothing is left.
TokenId argmax(std::span<const float> logits, const std::vector<bool>& allowed);

// One generation's sampler: the same seed, logits and history give the same tokens on every machine.
class Sampler {
 public:
  // `allowed[id]` says which ids are tokens at all (a vocabulary may be padded); empty: all. InvalidArgument for parameters
  // that make no sense (negative temperature, NaN, ..).
  Sampler(const SamplingParams& params, std::vector<bool> allowed);

  // `history`: all tokens of the sequence so far, for the penalties.
  TokenId sample(std::span<const float> logits, std::span<const TokenId> history);

 private:
  struct Candidate {
    std::int32_t id;
    float logit;
    double p;
  };
  void apply_penalties(std::span<const TokenId> history);
  void keep_top_k();
  void keep_top_p_and_min_p();
  TokenId draw();

  SamplingParams params_;
  std::vector<bool> allowed_;
  std::mt19937_64 random_;
  std::vector<float> logits_;            // with penalties
  std::vector<Candidate> candidates_;    // kept between calls: no allocation after the first
  std::vector<std::int32_t> counts_;
  std::vector<std::int32_t> seen_;
};

}  // namespace moeflux::session
