#include "session/expert_share.h"

#include <algorithm>
#include <chrono>

#include "core/clock.h"

namespace moeflux::session {
namespace {

constexpr std::size_t kMost = backend::UnitRunner::kMostShared;
constexpr std::int32_t kRow = 0;  // the only token's
constexpr std::array<std::int32_t, kMost> kSlots{0, 1, 2, 3, 4, 5, 6, 7};
static_assert(kSlots.back() + 1 == kMost);

// From a choice on the device to the processor's first instruction, and from its last to the device's next: words over the link.
constexpr double kSignals = 5.0;
// Of a layer's experts in main memory, what begins and ends with them whoever many they are.
constexpr double kLinkFirst = 6.0;
// What the device reads it may keep; what the processor computes stays in main memory, and costs the link this much of an expert's time later.
constexpr double kLater = 0.25;
constexpr int kRounds = 16, kWarmUp = 4;
constexpr std::size_t kMeasured = 4;         // experts at once; more take so much longer each as the last one
constexpr std::size_t kAgain = 4096;         // steps between measurements
constexpr std::size_t kLook = 64;            // steps between looks at slower_

double microseconds_since(std::uint64_t start) { return static_cast<double>(now_ns() - start) * 1e-3; }

quant::MatrixView moved(quant::MatrixView m, std::int64_t by) {
  m.data += by;
  if (m.scales != nullptr) m.scales += by;
  if (m.biases != nullptr) m.biases += by;
  return m;
}
TensorView moved(TensorView v, std::int64_t by) {
  if (!v.empty()) v.data = static_cast<std::byte*>(v.data) + by;
  return v;
}

std::int64_t place_of(const store::SlotExperts& slots, std::int32_t entry) noexcept {
  return slots.host_offset + static_cast<std::int64_t>(slots.stride) * (-2 - entry);
}

CopyPart copy_of(const store::SlotExperts& slots, std::int32_t entry, std::int32_t lent) noexcept {
  return {slots.memory + slots.stride * static_cast<std::uint64_t>(lent), slots.memory + place_of(slots, entry), slots.stride};
}

double median(std::vector<double>& v) {
  const auto middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

}  // namespace

double cost_of_share(const ShareTimes& t, std::size_t n, std::size_t c) noexcept {
  const double link = c == n ? 0.0 : t.link_first + static_cast<double>(n - c) * t.link_each;
  const double processor = c == 0 ? 0.0 : t.processor[c] + kSignals;
  return std::max(link, processor) + static_cast<double>(c) * kLater * t.link_each;
}

ShareCounts choose_shares(const ShareTimes& t) {
  ShareCounts out{};
  for (std::size_t n = 1; n < out.size(); ++n)
    for (std::size_t c = 1; c <= std::min(n, kMost); ++c)
      if (cost_of_share(t, n, c) < cost_of_share(t, n, static_cast<std::size_t>(out[n]))) out[n] = static_cast<std::int32_t>(c);
  return out;
}

ExpertShare::ExpertShare(backend::Backend& processor, backend::Backend& device, CpuExperts mode)
    : processor_(processor), stream_(processor.create_stream()), copier_(device.make_async_copier()), mode_(mode) {
  works_.reserve(kMost);
  if (mode_ == CpuExperts::On)
    for (std::size_t n = 0; n < counts_.size(); ++n) counts_[n] = static_cast<std::int32_t>(std::min(n, kMost));
}

void ExpertShare::compute(const model::MoeSite& site, const store::SlotExperts& slots, std::span<const std::int32_t> entries, const backend::HostShare& share,
                          Precision precision) {
  const store::ExpertView& f = slots.first;
  works_.clear();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::int64_t by = place_of(slots, entries[i]);
    works_.push_back({{moved(f.gate, by), moved(f.up, by), moved(f.down, by), moved(f.gate_bias, by), moved(f.up_bias, by), moved(f.down_bias, by)},
                      std::span(&kRow, 1),
                      std::span(kSlots).subspan(i, 1)});
  }
  const auto width = static_cast<std::int64_t>(share.x.size());
  backend::ExpertFfn op;
  op.x = view_f32(const_cast<float*>(share.x.data()), {1, width});
  op.works = works_;
  op.y = view_f32(share.rows, {static_cast<std::int64_t>(entries.size()), width});
  op.glu = site.spec->glu, op.limit = site.spec->glu_limit, op.alpha = site.spec->glu_alpha;
  op.precision = precision;
  const std::uint64_t start = now_ns();
  processor_.run(*stream_, op);
  if (entries.size() > kMeasured || times_.processor[entries.size()] <= 0) return;
  constexpr double kWeight = 1.0 / 64;
  slower_ += kWeight * (std::min(microseconds_since(start) / times_.processor[entries.size()], 4.0) - slower_);
}

void ExpertShare::prepare(const model::MoeSite& site, const store::SlotExperts& slots, std::span<const std::int32_t> far, std::int32_t lent, Precision precision) {
  if (!wants_to_measure() || far.size() < 2 * kMeasured || lent < 0) return;
  n_idle_ = kAgain;
  const auto width = static_cast<std::size_t>(slots.first.gate.cols);
  x_.assign(width, 1.0f);
  rows_.resize(kMost * width);
  times_ = {};
  std::array<std::int32_t, kMeasured> some{};
  std::vector<double> taken;
  std::size_t at = 0;
  for (std::size_t n = 1; n <= kMeasured; ++n) {
    taken.clear();
    for (int round = 0; round < kRounds; ++round) {
      for (std::size_t i = 0; i < n; ++i) some[i] = far[at++ % far.size()];
      const std::uint64_t start = now_ns();
      compute(site, slots, std::span(some).first(n), {x_, rows_.data()}, precision);
      if (round >= kWarmUp) taken.push_back(microseconds_since(start));
    }
    times_.processor[n] = median(taken);
  }
  const double each = std::max((times_.processor[kMeasured] - times_.processor[1]) / static_cast<double>(kMeasured - 1), 0.0);
  for (std::size_t n = kMeasured + 1; n <= kMost; ++n) times_.processor[n] = times_.processor[n - 1] + each;

  taken.clear();
  for (int round = 0; round < kRounds; ++round) {
    std::array<CopyPart, kMeasured> parts;
    for (CopyPart& p : parts) p = copy_of(slots, far[at++ % far.size()], lent);
    const std::uint64_t start = now_ns();
    if (!copier_->start(CopyDirection::ToDevice, 0, parts)) break;
    CopyCompletion done;
    while (copier_->outstanding() > 0) copier_->wait({&done, 1}, std::chrono::seconds(1));  // a lost device ends its copies, too
    if (round >= kWarmUp && done.ok) taken.push_back(microseconds_since(start));
  }
  times_.link_first = kLinkFirst;
  times_.link_each = taken.empty() ? 0.0 : median(taken) / static_cast<double>(kMeasured);
  slower_ = 1.0;
  choose();
}

void ExpertShare::choose() noexcept {
  ShareTimes now = times_;
  for (double& t : now.processor) t *= slower_;
  counts_ = choose_shares(now);
}

void ExpertShare::step_done() noexcept {
  if (mode_ != CpuExperts::Auto || n_idle_ == 0) return;
  --n_idle_;
  if (++n_steps_ % kLook == 0) choose();
}

}  // namespace moeflux::session
