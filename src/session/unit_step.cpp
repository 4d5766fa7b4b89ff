#include "session/unit_step.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <variant>

#include "core/error.h"
#include "model/model.h"

namespace moeflux::session {
namespace {

constexpr int kTries = 2;  // to record a step
constexpr std::size_t kMostLent = 8;  // slots of a layer for what the device reads from main memory
// Checks under way at once behind a miss: the host is a layer ahead. Where most layers miss that is in vain.
constexpr std::size_t kAhead = 2, kNotAhead = 1;

std::size_t widest_layer(const model::ModelSpec& spec) {
  std::int64_t most = 1;
  for (const model::LayerSpec& l : spec.layers)
    if (const auto* moe = std::get_if<model::MoeSpec>(&l.ffn)) most = std::max(most, moe->n_experts);
  return static_cast<std::size_t>(most);
}

// While it lives no expert in the table loses its slot to others.
class TableUse {
 public:
  explicit TableUse(store::ExpertStore& experts) : experts_(experts) { experts_.begin_use(); }
  ~TableUse() { experts_.end_use(); }
  TableUse(const TableUse&) = delete;
  TableUse& operator=(const TableUse&) = delete;

 private:
  store::ExpertStore& experts_;
};

}  // namespace

bool UnitStep::possible(const model::ModelSpec& spec, store::ExpertStore& experts, backend::Backend& backend, const model::RoutingHook* routing) {
  backend::UnitRunner* const units = backend.units();
  if (units == nullptr || (routing != nullptr && routing->kind() == model::RoutingHook::Kind::Replaces)) return false;
  std::size_t n_checks = 0;
  for (std::size_t l = 0; l < spec.layers.size(); ++l) {
    const auto* moe = std::get_if<model::MoeSpec>(&spec.layers[l].ffn);
    if (moe == nullptr) continue;
    ++n_checks;
    const store::SlotExperts slots = experts.slot_layer(LayerIdx(static_cast<std::int32_t>(l)));
    if (slots.first.gate.empty() || slots.first.gate.format != slots.first.up.format || static_cast<std::size_t>(moe->top_k) > units->max_top_k()) return false;
  }
  return n_checks > 0 && n_checks <= units->max_checks();
}

UnitStep::UnitStep(const model::ModelSpec& spec, store::ExpertStore& experts, backend::Backend& backend, backend::Stream& stream, model::RoutingHook* routing,
                   backend::Backend* processor, CpuExperts cpu_experts)
    : experts_(experts), backend_(backend), units_(*backend.units()), stream_(stream), routing_(routing) {
  plan_.n_lent = kMostLent;
  plan_.row = static_cast<std::int64_t>(widest_layer(spec)) + plan_.n_lent + backend::SlotCheck::kShares;
  plan_.fills_lent.assign(spec.layers.size(), 1);
  plan_.takes_share.assign(spec.layers.size(), 1);
  plan_.shares = processor != nullptr;
  if (processor != nullptr) share_ = std::make_unique<ExpertShare>(*processor, backend, cpu_experts);
  far_.reserve(spec.layers.size() * widest_layer(spec));
  filling_.reserve(spec.layers.size());
  lent_.reserve(spec.layers.size() * kMostLent);
  filled_.reserve(lent_.capacity());
  const std::size_t bytes = spec.layers.size() * static_cast<std::size_t>(plan_.row) * 4;
  table_ = backend.allocator().allocate(bytes, 64);
  table_host_ = backend.pinned_allocator().allocate(bytes, 64);
  std::fill_n(table_host_.as<std::int32_t>(), bytes / 4, -1);
  plan_.slot_of = table_.as<const std::int32_t>();
  foretold_ = routing != nullptr && routing->kind() == model::RoutingHook::Kind::Foretells;
  if (foretold_) {
    plan_.forced_row = static_cast<std::int64_t>(units_.max_top_k());
    forced_ = backend.allocator().allocate(spec.layers.size() * units_.max_top_k() * 4, 64);
    forced_host_ = backend.pinned_allocator().allocate(forced_.bytes(), 64);
    plan_.forced = forced_.as<const std::int32_t>();
  }
}

// Where the table has the slots that are lent for a layer, kMostLent of them.
std::int32_t* UnitStep::lent_of(const model::MoeSite& site) const noexcept {
  return table_host_.as<std::int32_t>() + raw(site.layer) * plan_.row + site.spec->n_experts;
}

void UnitStep::clear_lent() noexcept {
  for (const model::MoeSite& site : plan_.sites) std::fill_n(lent_of(site), kMostLent, -1);
}

// Slots for what the device will read from main memory: as many a layer as there are, those left over for other layers every time.
void UnitStep::lend() {
  clear_lent();
  filling_.clear();
  for (const model::MoeSite& site : plan_.sites)
    if (plan_.fills_lent[static_cast<std::size_t>(raw(site.layer))] != 0) filling_.push_back(&site);
  lent_.resize(filling_.size() * kMostLent);
  lent_.resize(experts_.lend_slots(lent_));
  filled_.clear();
  if (std::exchange(table_lends_, !lent_.empty()) && lent_.empty()) table_version_ = 0;
  const std::size_t first = n_lendings_++;
  for (std::size_t i = 0; i < lent_.size(); ++i) lent_of(*filling_[(first + i) % filling_.size()])[i / filling_.size()] = lent_[i];
}

// Measures on experts that lie in main memory now, where that is due. The table is the store's, slots are lent, the stream is at rest.
void UnitStep::prepare_shares() {
  if (!share_->wants_to_measure() || lent_.empty()) return;
  const model::MoeSite& first = plan_.sites.front();
  const store::SlotExperts slots = experts_.slot_layer(first.layer);
  far_.clear();
  for (const model::MoeSite& site : plan_.sites) {
    const quant::MatrixView gate = experts_.slot_layer(site.layer).first.gate;
    if (gate.format != slots.first.gate.format || gate.rows != slots.first.gate.rows) continue;
    const std::int32_t* row = table_host_.as<std::int32_t>() + raw(site.layer) * plan_.row;
    std::copy_if(row, row + site.spec->n_experts, std::back_inserter(far_), [](std::int32_t entry) { return entry < -1; });
  }
  share_->prepare(first, slots, far_, lent_.front(), context_->precision);
}

// Into the table; the device does by the same numbers.
void UnitStep::write_shares() {
  constexpr ShareCounts kNone{};
  for (const model::MoeSite& site : plan_.sites) {
    const ShareCounts& counts = plan_.takes_share[static_cast<std::size_t>(raw(site.layer))] != 0 ? share_->counts() : kNone;
    if (std::equal(counts.begin(), counts.end(), shares_of(site))) continue;
    std::copy(counts.begin(), counts.end(), shares_of(site));
    table_version_ = 0;
  }
}

// The last ones in rank order of those in main memory (backend::SlotCheck::shares), which the device leaves to the processor.
void UnitStep::compute_share(std::size_t check, const backend::UnitPost& post) {
  n_taken_ = 0;
  const model::MoeSite& site = plan_.sites[check];
  const std::int32_t* row = table_host_.as<std::int32_t>() + raw(site.layer) * plan_.row;
  far_.clear();
  for (std::int32_t id : post.ids)
    if (row[id] < -1) far_.push_back(row[id]);
  n_taken_ = static_cast<std::size_t>(shares_of(site)[std::min(far_.size(), static_cast<std::size_t>(backend::SlotCheck::kShares - 1))]);
  if (n_taken_ == 0) return;
  const store::SlotExperts slots = experts_.slot_layer(site.layer);
  share_->compute(site, slots, std::span(far_).last(n_taken_), units_.take_share(stream_, check), context_->precision);
  units_.give_share(stream_, check);
  n_computed_ += n_taken_;
}

// The stream is at rest.
void UnitStep::take_back(bool good) noexcept {
  if (lent_.empty()) return;
  experts_.take_back(lent_, good ? std::span<const store::FilledSlot>(filled_) : std::span<const store::FilledSlot>());
  lent_.clear();
}

// The table as the store has it now. The stream is at rest, or does nothing since a miss.
void UnitStep::upload_table() {
  const std::uint64_t version = read_table(table_version_);
  if (std::exchange(table_version_, version) == version && !table_lends_) return;
  units_.upload(stream_, table_.data(), table_host_.data(), table_.bytes());
}

// Unless the store's is of that version still; its version.
std::uint64_t UnitStep::read_table(std::uint64_t version) {
  return experts_.read_slots(version, {table_host_.as<std::int32_t>(), table_host_.bytes() / 4}, static_cast<std::size_t>(plan_.row));
}

// And the slots of a lease, which the store's table does not have where experts only pass through. They are good as long as it lives: the
// table is read anew before the layer comes again.
void UnitStep::upload_table_with(const model::MoeSite& site, store::ExpertLease& lease) {
  table_version_ = 0;
  read_table(table_version_);
  const store::SlotExperts slots = experts_.slot_layer(site.layer);
  const std::span<const ExpertIdx> wanted(context_->moe.wanted);
  std::int32_t* const row = table_host_.as<std::int32_t>() + raw(site.layer) * plan_.row;
  for (std::size_t i = 0; i < lease.size(); ++i)
    row[raw(wanted[i])] = static_cast<std::int32_t>((lease.wait(i).gate.data - slots.first.gate.data) / static_cast<std::ptrdiff_t>(slots.stride));
  units_.upload(stream_, table_.data(), table_host_.data(), table_.bytes());
}

// What routers are to choose, for all layers.
void UnitStep::upload_forced() {
  if (!foretold_) return;
  for (std::size_t i = 0; i < plan_.sites.size(); ++i) {
    const model::MoeSite& site = plan_.sites[i];
    const auto k = static_cast<std::size_t>(site.spec->top_k);
    routing_->routed(site.layer, site.spec->n_experts, site.spec->top_k,
                     {forced_host_.as<std::int32_t>() + i * static_cast<std::size_t>(plan_.forced_row), k});
  }
  units_.upload(stream_, forced_.data(), forced_host_.data(), plan_.sites.size() * static_cast<std::size_t>(plan_.forced_row) * 4);
}

void UnitStep::run_ops(model::Context& c, const std::function<void(model::Context&)>& ops, bool recording) {
  plan_.recording = recording;
  if (recording) plan_.sites.clear();
  model::Context with_plan = c;
  with_plan.units = failed_ ? nullptr : &plan_;
  try {
    ops(with_plan);
  } catch (...) {
    if (!failed_) units_.end(stream_, false);
    throw;
  }
}

// False: this backend could not; after the second time it is not asked again.
bool UnitStep::record(model::Context& c, const std::function<void(model::Context&)>& ops) {
  bool good = false;
  try {
    run_ops(c, ops, true);
    good = units_.end(stream_, true);
  } catch (const Error& e) {
    if (e.code() == ErrorCode::Cancelled) throw;  // anything else is met again, and told, by computing as it comes
  }
  if (!good && ++n_failures_ == kTries) failed_ = true;
  return good;
}

void UnitStep::run(model::Context& c, std::span<const std::int32_t> tokens, std::int64_t pos0, const std::function<void(model::Context&)>& ops,
                   const std::function<void()>& before_check) {
  using Mode = backend::UnitRunner::Mode;
  std::optional<TableUse> use(experts_);
  const bool whole = experts_.table_is_whole();  // and stays so while it is used
  const Mode mode = failed_ ? Mode::Eager : units_.begin(stream_, tokens, pos0, whole);
  const bool ready = mode == Mode::Replay || (mode == Mode::Record && record(c, ops));
  if (!ready) {  // nothing has been computed yet
    use.reset();
    run_ops(c, ops, false);
    if (mode == Mode::Eager && !failed_) units_.end(stream_, true);
    backend_.synchronize(stream_);
    return;
  }
  context_ = &c;
  before_check_ = &before_check;
  try {
    whole ? replay_whole() : replay();
  } catch (...) {
    context_ = nullptr;
    if (share_) units_.forgive(stream_);  // the device may be waiting
    try {
      backend_.synchronize(stream_);  // the lease may go only when nothing uses it
    } catch (const Error&) {
      // A device that is lost uses nothing; the first error is the one to tell.
    }
    held_ = {};
    take_back(false);
    throw;
  }
  take_back(true);
  context_ = nullptr;
}

// Every expert is where the device finds it: the host only learns what was chosen.
void UnitStep::replay_whole() {
  all_launched_ = false;
  lend();
  if (share_) {
    if (read_table(table_version_) != table_version_) table_version_ = 0;
    prepare_shares();
    write_shares();
  }
  upload_table();
  upload_forced();
  n_missed_ = 0;
  ++n_whole_;
  const ExpertShare::Ready ready(share_.get());
  launch(0, 0);
  for (std::size_t check = 0; check < plan_.sites.size(); ++check) {
    const backend::UnitPost post = wait(check);
    if (post.missed) fail(ErrorCode::Internal, "layer {}: an expert is not where the table had it", raw(plan_.sites[check].layer));
    if (share_) compute_share(check, post);
    passed(check, post);
  }
  backend_.synchronize(stream_);
  if (!share_) return;
  units_.settle_shares(stream_);
  share_->step_done();
}

void UnitStep::replay() {
  n_taken_ = 0;
  if (table_lends_) {
    clear_lent();
    table_version_ = 0;
    table_lends_ = false;
  }
  upload_table();
  upload_forced();
  const std::size_t n_checks = plan_.sites.size();
  const std::size_t missed_before = std::exchange(n_missed_, 0);
  n_whole_ += missed_before == 0 ? 1 : 0;
  all_launched_ = missed_before == 0 && units_.launch_all(stream_);
  const std::size_t ahead = 2 * missed_before > n_checks ? kNotAhead : kAhead;
  UnitRing ring(n_checks, missed_before == 0 ? n_checks + 1 : ahead, ahead);
  ring.run(*this, *this);
  n_discarded_ += ring.n_discarded();
  backend_.synchronize(stream_);
  held_ = {};
}

void UnitStep::launch(std::size_t first, std::size_t last) {
  if (!all_launched_) units_.launch(stream_, first, last);
}
backend::UnitPost UnitStep::wait(std::size_t check) {
  if (*before_check_) (*before_check_)();
  return units_.wait(stream_, check);
}
void UnitStep::resume() { units_.resume(stream_); }

void UnitStep::passed(std::size_t check, const backend::UnitPost& post) {
  held_ = {};
  const model::MoeSite& site = plan_.sites[check];
  chosen_.clear();
  for (std::int32_t id : post.ids) chosen_.push_back(ExpertIdx(id));
  std::sort(chosen_.begin(), chosen_.end());
  experts_.used(site.layer, chosen_, n_taken_);
  context_->counters.requests += chosen_.size();
  context_->counters.hits += chosen_.size();
  if (!lent_.empty()) note_filled(site, post.ids);
  if (routing_ == nullptr || foretold_) return;
  ids_.assign(post.ids.begin(), post.ids.end());
  routing_->routed(site.layer, site.spec->n_experts, site.spec->top_k, ids_);
}

// What the device does with the choice (Backend::run_routed), once more.
void UnitStep::note_filled(const model::MoeSite& site, std::span<const std::int32_t> ids) {
  if (plan_.fills_lent[static_cast<std::size_t>(raw(site.layer))] == 0) return;
  const std::int32_t *row = table_host_.as<std::int32_t>() + raw(site.layer) * plan_.row, *lent = lent_of(site);
  const auto n_far = static_cast<std::size_t>(std::count_if(ids.begin(), ids.end(), [&](std::int32_t id) { return row[id] < 0; }));
  std::size_t n_read = 0;
  for (std::int32_t id : ids) {
    if (row[id] >= 0) continue;
    if (n_read == std::min(n_far - n_taken_, kMostLent)) break;
    if (lent[n_read] >= 0) filled_.push_back({lent[n_read], site.layer, ExpertIdx(id)});
    ++n_read;
  }
}

void UnitStep::missed(std::size_t check, const backend::UnitPost& post) {
  held_ = {};
  all_launched_ = false;  // the rest does nothing
  ++n_missed_;
  const model::MoeSite& site = plan_.sites[check];
  if (routing_ != nullptr && !foretold_) {
    ids_.assign(post.ids.begin(), post.ids.end());
    routing_->routed(site.layer, site.spec->n_experts, site.spec->top_k, ids_);
  }
  held_ = model::bring_experts(*context_, site, post.ids);
  upload_table_with(site, held_);
}

}  // namespace moeflux::session
