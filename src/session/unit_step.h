// Decoding a token in units while experts are in tiers: the session's tables on the device, and what a miss needs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backend/units.h"
#include "core/buffer.h"
#include "model/blocks/unit_plan.h"
#include "model/context.h"
#include "model/spec.h"
#include "session/expert_share.h"
#include "session/unit_ring.h"
#include "store/expert_store.h"

namespace moeflux::session {

// Of one session, used by its thread. Nothing is shared with other sessions but the store.
class UnitStep final : UnitRing::Host, UnitRing::Device {
 public:
  // Whether a session of these can compute its tokens in units.
  static bool possible(const model::ModelSpec& spec, store::ExpertStore& experts, backend::Backend& backend, const model::RoutingHook* routing);

  // `processor` computes its share of the experts in main memory (expert_share.h); null: the device computes all.
  UnitStep(const model::ModelSpec& spec, store::ExpertStore& experts, backend::Backend& backend, backend::Stream& stream, model::RoutingHook* routing,
           backend::Backend* processor = nullptr, CpuExperts cpu_experts = CpuExperts::Auto);

  // One token at pos0. `ops` runs the model's ops (forward and head) in the context it is given. `before_check` may throw: cancelled.
  // Returns when all is computed. An error leaves the stream at rest.
  void run(model::Context& c, std::span<const std::int32_t> tokens, std::int64_t pos0, const std::function<void(model::Context&)>& ops,
           const std::function<void()>& before_check);

  // Steps that were launched at once because nothing could be missed or the one before had missed nothing; units that were launched in
  // vain.
  std::uint64_t n_whole() const noexcept { return n_whole_; }
  std::uint64_t n_discarded() const noexcept { return n_discarded_; }
  bool recording_failed() const noexcept { return failed_; }
  std::uint64_t n_computed() const noexcept { return n_computed_; }  // experts, by the processor

 private:
  void run_ops(model::Context& c, const std::function<void(model::Context&)>& ops, bool recording);
  bool record(model::Context& c, const std::function<void(model::Context&)>& ops);
  void replay();
  void replay_whole();
  void upload_table();
  std::uint64_t read_table(std::uint64_t version);
  void upload_table_with(const model::MoeSite& site, store::ExpertLease& lease);
  void upload_forced();
  void clear_lent() noexcept;
  void lend();
  void take_back(bool good) noexcept;
  void note_filled(const model::MoeSite& site, std::span<const std::int32_t> ids);
  std::int32_t* lent_of(const model::MoeSite& site) const noexcept;
  std::int32_t* shares_of(const model::MoeSite& site) const noexcept { return lent_of(site) + plan_.n_lent; }
  void prepare_shares();
  void write_shares();
  void compute_share(std::size_t check, const backend::UnitPost& post);

  void launch(std::size_t first, std::size_t last) override;
  backend::UnitPost wait(std::size_t check) override;
  void resume() override;
  void passed(std::size_t check, const backend::UnitPost& post) override;
  void missed(std::size_t check, const backend::UnitPost& post) override;

  store::ExpertStore& experts_;
  backend::Backend& backend_;
  backend::UnitRunner& units_;
  backend::Stream& stream_;
  model::RoutingHook* routing_;
  bool foretold_ = false;
  model::UnitPlan plan_;
  Buffer table_, table_host_, forced_, forced_host_;
  std::uint64_t table_version_ = 0;  // 0: to be read in any case
  bool table_lends_ = false;         // it has slots for what the device reads from main memory
  std::vector<const model::MoeSite*> filling_;  // layers that may be lent slots
  std::vector<std::int32_t> lent_;          // slots of this step
  std::vector<store::FilledSlot> filled_;   // of them, by what the device has read
  std::size_t n_lendings_ = 0;
  std::unique_ptr<ExpertShare> share_;      // the processor's; may be null
  std::vector<std::int32_t> far_;           // a choice's experts in main memory, as the table has them
  std::size_t n_taken_ = 0;                 // of the check under way, by the processor
  std::uint64_t n_computed_ = 0;
  std::vector<ExpertIdx> chosen_;
  std::vector<std::int32_t> ids_;
  store::ExpertLease held_;            // of the last miss, until the stream has passed it
  model::Context* context_ = nullptr;  // of the step under way
  const std::function<void()>* before_check_ = nullptr;
  std::size_t n_missed_ = 1;  // checks of the last step; the first one starts as if there had been some
  bool all_launched_ = false;  // what the ring launches is under way already
  bool failed_ = false;
  int n_failures_ = 0;
  std::uint64_t n_whole_ = 0, n_discarded_ = 0;
};

}  // namespace moeflux::session
