// What tests ask a TieredStore: whether its books are in order.
#include <algorithm>

#include <fmt/format.h>

#include "store/tiered_store.h"

namespace moeflux::store {

std::size_t TieredStore::busy_slots() {
  const std::lock_guard lock(mutex_);
  drain();
  reads_.settle();
  std::size_t n = staging_.size() - free_staging_.size();
  for (const DeviceSlot& s : device_) n += s.busy() ? 1 : 0;
  for (const HostSlot& h : host_) n += h.busy() ? 1 : 0;
  return n;
}

TieredStore::Tier TieredStore::tier_of(LayerIdx layer, ExpertIdx expert) const {
  const std::lock_guard lock(mutex_);
  const ExpertKey key{layer, expert};
  return policy_.contains(key, kDeviceTier) ? Tier::Device : policy_.contains(key, kHostTier) ? Tier::Host : Tier::Disk;
}

std::string TieredStore::find_fault() const {
  const std::lock_guard lock(mutex_);
  std::size_t n_device = 0, n_host = 0, n_free_device = 0, n_free_host = 0;
  for (std::size_t i = 0; i < device_.size(); ++i) {
    const DeviceSlot& s = device_[i];
    if (s.state == DeviceSlot::State::Free) {
      ++n_free_device;
      if (s.kept || s.busy()) return fmt::format("device slot {} is free and in use", i);
      continue;
    }
    if (s.state == DeviceSlot::State::Lent) {
      if (s.kept || s.pins > 0 || s.leaving) return fmt::format("device slot {} is lent and in use", i);
      continue;
    }
    if (device_of_[index(s.key)] != static_cast<std::int32_t>(i)) return fmt::format("device slot {}: its expert is elsewhere", i);
    if (!s.kept && !s.busy()) return fmt::format("device slot {} is lost", i);
    if (s.kept != policy_.contains(s.key, kDeviceTier)) return fmt::format("device slot {}: the policy does not agree", i);
    if (s.leaving && (s.kept || s.state != DeviceSlot::State::Ready)) return fmt::format("device slot {} leaves and stays", i);
    n_device += s.kept ? 1 : 0;
  }
  for (std::size_t i = 0; i < host_.size(); ++i) {
    const HostSlot& h = host_[i];
    if (h.state == HostSlot::State::Free) {
      ++n_free_host;
      if (h.kept || h.readers > 0) return fmt::format("host slot {} is free and in use", i);
      if (h.has_bytes && host_of_[index(h.key)] != static_cast<std::int32_t>(i)) return fmt::format("host slot {}: its bytes are elsewhere", i);
      continue;
    }
    if (host_of_[index(h.key)] != static_cast<std::int32_t>(i)) return fmt::format("host slot {}: its expert is elsewhere", i);
    if (!h.kept && h.readers == 0) return fmt::format("host slot {} is lost", i);
    if (h.kept != policy_.contains(h.key, kHostTier)) return fmt::format("host slot {}: the policy does not agree", i);
    if (h.state == HostSlot::State::Arriving) {
      const std::int32_t from = device_of_[index(h.key)];
      if (from < 0 || (!device_[static_cast<std::size_t>(from)].leaving && device_[static_cast<std::size_t>(from)].home != static_cast<std::int32_t>(i))) return fmt::format("host slot {} waits for nothing", i);
    }
    n_host += h.kept ? 1 : 0;
  }
  std::size_t n_absent = 0;
  for (std::size_t i = 0; i < table_.size(); ++i) {
    if (table_[i] != table_entry(static_cast<std::uint32_t>(i))) return fmt::format("the table is wrong about expert {}", i);
    n_absent += table_[i] == -1 ? 1 : 0;
  }
  if (n_absent != n_absent_ + (table_.size() - n_experts_)) return "experts that are nowhere were miscounted";
  if (n_device != policy_.size(kDeviceTier) || n_host != policy_.size(kHostTier)) return "the policy counts otherwise";
  if (n_device > n_kept_) return "too many are kept on the device";
  if (n_free_device != free_device_.size() || n_free_host != free_host_.size()) return "a free slot is in no list";
  const auto n_used = static_cast<std::size_t>(std::count_if(staging_.begin(), staging_.end(), [](std::int32_t s) { return s >= 0; }));
  if (n_used + free_staging_.size() != staging_.size()) return "a staging slot is in no list";
  for (std::size_t i = 0; i < staging_.size(); ++i)
    if (staging_[i] >= 0 && device_[static_cast<std::size_t>(staging_[i])].staging != static_cast<std::int32_t>(i)) return fmt::format("staging slot {} loads nothing", i);
  return "";
}

}  // namespace moeflux::store
