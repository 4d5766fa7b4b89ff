// How experts move between the tiers of a TieredStore. All of it happens under the store's lock.
#include <algorithm>
#include <cstring>
#include <utility>

#include "store/tiered_store.h"

namespace moeflux::store {
namespace {

using DeviceState = DeviceSlot::State;
using HostState = HostSlot::State;

// A prompt's expert pushes another out of the device only when it is worth this much more: both would be copied, and a prompt
// touches nearly every expert once. What the prompt really favours still comes in, and the tokens after it will want that.
constexpr double kScanMargin = 2.0;

}  // namespace

// Whether an expert that is about to be loaded shall live on the device; if so there is a place for it.
bool TieredStore::make_room(ExpertKey key, bool at_rest) {
  if (policy_.size(kDeviceTier) < n_kept_) return true;
  if (!may_evict(at_rest)) return false;
  const auto victim = policy_.choose_victim([&](ExpertKey k) { return device_[static_cast<std::size_t>(device_of_[index(k)])].busy(); }, kDeviceTier);
  if (!victim) return false;
  const double margin = scanning_[static_cast<std::size_t>(raw(key.layer))] != 0 ? kScanMargin : 1.0;
  if (policy_.value(key) <= policy_.value(*victim) * margin) return false;
  evict(*victim);
  return true;
}

// The slot is nobody's; on demand it is pinned once. Not kept: the expert passes through, and lives on where it is.
void TieredStore::load(std::uint32_t slot, ExpertKey key, bool keep, io::ReadPriority priority) {
  DeviceSlot& s = device_[slot];
  s = DeviceSlot{};
  s.state = DeviceState::Loading;
  s.kept = keep;
  s.hinted = priority == io::ReadPriority::Hint;
  s.pins = s.hinted ? 0 : 1;
  s.key = key;
  s.loaded_at = visits_;
  device_of_[index(key)] = static_cast<std::int32_t>(slot);
  const std::int32_t host = host_of_[index(key)];
  if (keep) policy_.insert(key, kDeviceTier);
  if (host < 0) return load_from_disk(slot, priority);
  HostSlot& h = host_[static_cast<std::size_t>(host)];
  if (h.state == HostState::Free) {  // free, and its bytes are still those of the expert
    free_host_.remove(host_, static_cast<std::uint32_t>(host));
    h.state = HostState::Ready;
    update_table(key);
  }
  h.kept = h.kept && !keep;
  load_from_host(slot, static_cast<std::uint32_t>(host));
}

void TieredStore::load_from_host(std::uint32_t slot, std::uint32_t host) {
  DeviceSlot& s = device_[slot];
  s.host = static_cast<std::int32_t>(host);
  ++host_[host].readers;
  const CopyPart part{device_memory(slot), host_memory(host), record_bytes(s.key)};
  stats_.bytes_to_device += part.bytes;
  if (!copier_->start(CopyDirection::ToDevice, slot, {&part, 1})) arrived(slot, false);
}

void TieredStore::load_from_disk(std::uint32_t slot, io::ReadPriority priority) {
  if (free_staging_.empty()) return waiting_.push_back(slot);
  const std::uint32_t staging = free_staging_.back();
  free_staging_.pop_back();
  staging_[staging] = static_cast<std::int32_t>(slot);
  device_[slot].staging = static_cast<std::int32_t>(staging);
  reads_.begin(staging, device_[slot].key.layer, device_[slot].key.expert);
  reads_.queue(staging, priority);
}

void TieredStore::start_waiting_reads() {
  bool any = false;
  while (!waiting_.empty() && !free_staging_.empty()) {
    const std::uint32_t slot = waiting_.front();
    waiting_.erase(waiting_.begin());
    if (device_[slot].pins == 0 && !device_[slot].kept) {  // nobody wants it any more
      device_[slot].state = DeviceState::Ready;
      release(slot);
      continue;
    }
    load_from_disk(slot, io::ReadPriority::Demand);
    any = true;
  }
  if (any) reads_.submit();
}

// A place in main memory for an expert that leaves the device or came from disk: free, or that of an expert worth less. The slot
// is in no list and holds nothing.
bool TieredStore::take_host_slot(ExpertKey key, std::uint32_t& host) {
  if (!may_reuse_host()) return false;
  if (!free_host_.empty()) {
    host = free_host_.pop(host_);
  } else {
    const auto victim = policy_.choose_victim([&](ExpertKey k) { return host_[static_cast<std::size_t>(host_of_[index(k)])].busy(); }, kHostTier);
    if (!victim || policy_.value(*victim) >= policy_.value(key)) return false;
    host = static_cast<std::uint32_t>(host_of_[index(*victim)]);
    policy_.erase(*victim);
  }
  HostSlot& h = host_[host];
  const HostSlot before = std::exchange(h, HostSlot{});
  if (before.has_bytes) {
    host_of_[index(before.key)] = -1;
    if (on_freed_) on_freed_(host_memory(host), slot_bytes_);
    update_table(before.key);
  }
  return true;
}

// An expert leaves the device. Its slot is free at once where nothing has to be copied.
void TieredStore::evict(ExpertKey victim) {
  const auto slot = static_cast<std::uint32_t>(device_of_[index(victim)]);
  DeviceSlot& s = device_[slot];
  if (s.hinted) ++stats_.hints_wasted;
  s.kept = s.hinted = false;
  update_table(victim);
  if (const std::int32_t again = host_of_[index(victim)]; again >= 0) {  // its bytes are still in main memory
    HostSlot& h = host_[static_cast<std::size_t>(again)];
    if (h.state == HostState::Free) free_host_.remove(host_, static_cast<std::uint32_t>(again));
    h.state = HostState::Ready;
    h.kept = true;
    policy_.insert(victim, kHostTier);
    update_table(victim);
    return release(slot);
  }
  std::uint32_t host = 0;
  if (!take_host_slot(victim, host)) {
    policy_.erase(victim);
    return release(slot);
  }
  settle_in_host(victim, host);
  leave(slot, host);
}

void TieredStore::copy_done(const CopyCompletion& c) {
  const auto slot = static_cast<std::uint32_t>(c.tag);
  if (c.direction == CopyDirection::ToDevice)
    arrived(slot, c.ok);
  else
    left(slot, c.ok);
  changed_.notify_all();
}

// A copy to the device has ended.
void TieredStore::arrived(std::uint32_t slot, bool ok) {
  DeviceSlot& s = device_[slot];
  if (s.host >= 0) {
    const auto host = static_cast<std::uint32_t>(s.host);
    s.host = -1;
    HostSlot& h = host_[host];
    --h.readers;
    if (!ok && !h.kept) {  // it lives in main memory after all
      h.kept = true;
      s.kept = false;
      policy_.insert(h.key, kHostTier);
    }
    if (!h.kept && h.readers == 0) free_host(host, true);
  }
  if (s.staging >= 0) {
    const auto staging = static_cast<std::uint32_t>(s.staging);
    s.staging = -1;
    free_staging(staging);
  }
  const std::int32_t home = std::exchange(s.home, -1);
  if (ok) {
    s.state = DeviceState::Ready;
    update_table(s.key);
    if (home >= 0) return leave(slot, static_cast<std::uint32_t>(home));
  } else {
    s.copy_failed = true;
    not_loaded(slot);
    if (home >= 0) homeless(static_cast<std::uint32_t>(home));
  }
  release(slot);
}

// The bytes did not come: the expert is on disk alone.
void TieredStore::homeless(std::uint32_t host) {
  HostSlot& h = host_[host];
  h.kept = false;
  policy_.erase(h.key);
  free_host(host, false);
}

// A copy to main memory has ended. Where it failed the expert is on disk alone.
void TieredStore::left(std::uint32_t slot, bool ok) {
  DeviceSlot& s = device_[slot];
  const auto host = static_cast<std::uint32_t>(s.host);
  s.leaving = false;
  s.host = -1;
  HostSlot& h = host_[host];
  h.state = HostState::Ready;
  h.has_bytes = ok;
  if (!ok) homeless(host);
  update_table(s.key);
  release(slot);
}

// Whoever has pinned it learns why; else it is as if nobody had asked.
void TieredStore::not_loaded(std::uint32_t slot) {
  DeviceSlot& s = device_[slot];
  s.state = DeviceState::Failed;
  if (!s.kept) return;
  s.kept = false;
  policy_.erase(s.key);
}

// Frees a device slot if nothing holds it.
void TieredStore::release(std::uint32_t slot) {
  DeviceSlot& s = device_[slot];
  if (s.kept || s.busy() || s.state == DeviceState::Free) return;
  device_of_[index(s.key)] = -1;
  free_device(slot);
}

void TieredStore::free_device(std::uint32_t slot) {
  device_[slot] = DeviceSlot{};
  if (on_freed_) on_freed_(device_memory(slot), slot_bytes_);
  free_device_.push_back(slot);
  changed_.notify_all();
}

void TieredStore::free_host(std::uint32_t host, bool keeps_bytes) {
  HostSlot& h = host_[host];
  h.state = HostState::Free;
  h.has_bytes = keeps_bytes;
  if (!keeps_bytes) {
    host_of_[index(h.key)] = -1;
    if (on_freed_) on_freed_(host_memory(host), slot_bytes_);
  }
  free_host_.push(host_, host);
  update_table(h.key);
}

void TieredStore::free_staging(std::uint32_t staging) {
  staging_[staging] = -1;
  if (on_freed_) on_freed_(reads_.memory(staging), layout_.slot_bytes());
  free_staging_.push_back(staging);
  start_waiting_reads();
}

std::span<const CopyPart> TieredStore::record_parts(ExpertKey key, std::uint32_t staging, std::byte* to) {
  const auto pieces = catalog_.layer(key.layer).expert(key.expert);
  parts_.clear();
  for (std::size_t p = 0; p < pieces.size(); ++p)
    parts_.push_back({to + pieces[p].record_offset, layout_.piece(catalog_, key.layer, key.expert, p, reads_.memory(staging)), pieces[p].record_bytes()});
  return parts_;
}

// What only passes through the device has a home in main memory when there is room for it or it is worth more than something
// there. Its bytes go there from the device: somebody waits for it, and copying it here would take a third of the time of its read.
void TieredStore::find_home(std::uint32_t slot) {
  const ExpertKey key = device_[slot].key;
  std::uint32_t host = 0;
  if (take_host_slot(key, host)) {
    settle_in_host(key, host);
    device_[slot].home = static_cast<std::int32_t>(host);
  }
}

// The expert lives in this slot of main memory from now on; its bytes are on their way.
void TieredStore::settle_in_host(ExpertKey key, std::uint32_t host) {
  HostSlot& h = host_[host];
  h.state = HostState::Arriving;
  h.kept = true;
  h.key = key;
  host_of_[index(key)] = static_cast<std::int32_t>(host);
  policy_.insert(key, kHostTier);
}

// The expert's bytes go from the device to where it lives in main memory.
void TieredStore::leave(std::uint32_t slot, std::uint32_t host) {
  DeviceSlot& s = device_[slot];
  s.leaving = true;
  s.host = static_cast<std::int32_t>(host);
  const CopyPart part{host_memory(host), device_memory(slot), record_bytes(s.key)};
  stats_.bytes_to_host += part.bytes;
  if (!copier_->start(CopyDirection::ToHost, slot, {&part, 1})) left(slot, false);
}

// Where main memory has more slots than there are experts elsewhere, one that goes to live on the device leaves its bytes in a free
// slot on the way: should it have to leave the device, nothing has to be copied, and a device that reads main memory finds it there at once.
void TieredStore::leave_bytes_in_host(std::uint32_t slot, std::uint32_t staging) {
  const ExpertKey key = device_[slot].key;
  if (!device_reads_host_ || host_of_[index(key)] >= 0 || free_host_.size() <= n_absent_ || host_[free_host_.first()].has_bytes || !may_reuse_host()) return;
  const std::uint32_t host = free_host_.pop(host_);
  for (const CopyPart& p : record_parts(key, staging, host_memory(host))) std::memcpy(p.to, p.from, p.bytes);
  HostSlot& h = host_[host];
  h = HostSlot{};
  h.key = key;
  host_of_[index(key)] = static_cast<std::int32_t>(host);
  free_host(host, true);
}

// An expert has been read, or not: on to the device, once more, or failed.
void TieredStore::read_done(std::uint32_t staging, bool good) {
  const auto slot = static_cast<std::uint32_t>(staging_[staging]);
  DeviceSlot& s = device_[slot];
  if (good) {
    s.kept ? leave_bytes_in_host(slot, staging) : find_home(slot);
    const auto parts = record_parts(s.key, staging, device_memory(slot));
    for (const CopyPart& p : parts) stats_.bytes_to_device += p.bytes;
    if (!copier_->start(CopyDirection::ToDevice, slot, parts)) arrived(slot, false);
    return;
  }
  if (reads_.may_retry(staging) && s.pins > 0) {
    reads_.queue(staging, io::ReadPriority::Demand);
    reads_.submit();
    return;
  }
  s.failure = reads_.failure(staging);
  s.staging = -1;
  not_loaded(slot);
  release(slot);
  free_staging(staging);
  changed_.notify_all();
}

}  // namespace moeflux::store
