// The processor's share of a token's experts while the rest is a device's: of those in main memory, which the device would read over its link
// one after another, the processor computes some where they lie. Results are the same bytes whoever computes them, so only time decides how many.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <moeflux/options.h>

#include "backend/backend.h"
#include "backend/units.h"
#include "core/async_copier.h"
#include "model/blocks/unit_plan.h"
#include "store/expert_store.h"

namespace moeflux::session {

// What a layer's experts in main memory take, microseconds.
struct ShareTimes {
  double link_first = 0, link_each = 0;                                   // read by the device: what the first costs besides; each
  std::array<double, backend::UnitRunner::kMostShared + 1> processor{};  // of so many; [0] is 0
};
// What it costs to give the processor c of n: until both are done, and what the link has to do later because the device has read fewer.
double cost_of_share(const ShareTimes& times, std::size_t n, std::size_t c) noexcept;
// Entry n: how many of n experts in main memory the processor computes, so that it costs least; of equals the fewest.
using ShareCounts = std::array<std::int32_t, backend::SlotCheck::kShares>;
ShareCounts choose_shares(const ShareTimes& times);

// Of one session, used by its thread.
class ExpertShare {
 public:
  // Both backends outlive it. `processor` computes on host memory and gives the device's bytes.
  ExpertShare(backend::Backend& processor, backend::Backend& device, CpuExperts mode);

  // How many of how many; changes between steps.
  const ShareCounts& counts() const noexcept { return counts_; }
  // Before a step, the device at rest: measures what has not been measured, and again where the processor has become slower or faster. `far` are
  // slots in main memory that hold experts of the shape of `slots`; `lent` a slot of the device that may be overwritten.
  void prepare(const model::MoeSite& site, const store::SlotExperts& slots, std::span<const std::int32_t> far, std::int32_t lent, Precision precision);
  // Whether prepare() would measure, and so wants slots.
  bool wants_to_measure() const noexcept { return mode_ == CpuExperts::Auto && copier_ != nullptr && n_idle_ == 0; }
  // After a step with counts() in use.
  void step_done() noexcept;

  // Experts in these slots of main memory (table entries -2 - s).
  void compute(const model::MoeSite& site, const store::SlotExperts& slots, std::span<const std::int32_t> entries, const backend::HostShare& share, Precision precision);

  // While it lives the processor's threads stay awake where they have a share.
  class Ready {
   public:
    explicit Ready(ExpertShare* share) noexcept : processor_(share == nullptr || share->counts_ == ShareCounts{} ? nullptr : &share->processor_) {
      if (processor_ != nullptr) processor_->expect(true);
    }
    ~Ready() {
      if (processor_ != nullptr) processor_->expect(false);
    }
    Ready(const Ready&) = delete;
    Ready& operator=(const Ready&) = delete;

   private:
    backend::Backend* processor_;
  };

 private:
  void choose() noexcept;

  backend::Backend& processor_;
  std::unique_ptr<backend::Stream> stream_;
  std::unique_ptr<AsyncCopier> copier_;
  CpuExperts mode_;
  ShareCounts counts_{};
  ShareTimes times_;
  double slower_ = 1.0;      // than measured, lately
  std::size_t n_idle_ = 0;   // steps until the next measurement
  std::size_t n_steps_ = 0;
  std::vector<backend::ExpertWork> works_;
  std::vector<float> x_, rows_;  // of measurements
};

}  // namespace moeflux::session
