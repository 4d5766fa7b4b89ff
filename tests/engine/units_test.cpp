// Steps in units: the host's ring against a device that only counts, and whole models on a device that the CPU plays.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>

#include "session/unit_ring.h"
#include "store/tiered_store.h"
#include "support/expect_error.h"
#include "support/loaded_model.h"
#include "support/manual_copier.h"
#include "support/unit_device.h"

namespace moeflux::test {
namespace {

using session::UnitRing;

// Runs units late and in order; says what was computed. Unit 2j is check j, 2j + 1 its experts.
class CountingDevice final : public UnitRing::Device, public UnitRing::Host {
 public:
  CountingDevice(std::size_t n_checks, std::set<std::size_t> misses, std::uint32_t seed) : misses_(std::move(misses)), posted_(n_checks, false), random_(seed) {}

  void launch(std::size_t first, std::size_t last) override {
    EXPECT_TRUE((first == 0 && last == 0) || (first + 1 == last && first % 2 == 1)) << first << " to " << last;
    for (std::size_t unit = first; unit <= last; ++unit) queue_.push_back(static_cast<int>(unit));
    most_ahead = std::max(most_ahead, (last + 1) / 2 - n_told);
    while (!queue_.empty() && random_() % 2 == 0) one();
  }
  backend::UnitPost wait(std::size_t check) override {
    EXPECT_EQ(check, n_told);
    while (!posted_[check]) {
      if (queue_.empty()) throw std::runtime_error("nothing comes");
      one();
    }
    return {marked_at_ == check, {}};
  }
  void resume() override { queue_.push_back(-1); }
  void passed(std::size_t check, const backend::UnitPost&) override { told(check, false); }
  void missed(std::size_t check, const backend::UnitPost&) override {
    told(check, true);
    while (!queue_.empty()) one();
    EXPECT_FALSE(marked_);
  }
  void finish() {
    while (!queue_.empty()) one();
  }

  std::vector<std::size_t> computed;
  std::size_t most_ahead = 0, n_told = 0, cancel_at = SIZE_MAX;

 private:
  void told(std::size_t check, bool missed) {
    if (check == cancel_at) throw std::runtime_error("cancelled");
    EXPECT_EQ(check, n_told++);
    EXPECT_EQ(missed, misses_.contains(check));
  }
  void one() {
    const int unit = queue_.front();
    queue_.pop_front();
    if (unit < 0) {
      marked_ = false;
      return;
    }
    if (marked_) return;
    computed.push_back(static_cast<std::size_t>(unit));
    const std::size_t check = static_cast<std::size_t>(unit) / 2;
    if (unit % 2 == 1 || check >= posted_.size()) return;
    posted_[check] = true;
    if (misses_.contains(check)) marked_ = true, marked_at_ = check;
  }

  std::set<std::size_t> misses_;
  std::vector<bool> posted_;
  std::deque<int> queue_;
  bool marked_ = false;
  std::size_t marked_at_ = SIZE_MAX;
  std::mt19937 random_;
};

// Whatever is missed and however late the device is: every unit computes once, in order.
TEST(UnitRing, EveryUnitOnceAndInOrder) {
  for (std::uint32_t seed = 0; seed < 3000; ++seed) {
    std::mt19937 random(seed);
    const std::size_t n = 1 + random() % 12, window = 1 + random() % (n + 1), after_miss = 1 + random() % window;
    std::set<std::size_t> misses;
    for (std::size_t i = 0; i < n; ++i)
      if (random() % 4 == 0) misses.insert(i);
    CountingDevice d(n, misses, seed);
    UnitRing ring(n, window, after_miss);
    EXPECT_EQ(ring.run(d, d), misses.empty());
    d.finish();
    ASSERT_EQ(d.computed.size(), 2 * n + 1) << "seed " << seed;
    for (std::size_t i = 0; i < d.computed.size(); ++i) ASSERT_EQ(d.computed[i], i) << "seed " << seed;
    EXPECT_EQ(d.n_told, n);
    EXPECT_LT(d.most_ahead, window) << "seed " << seed;
    if (misses.empty()) {
      EXPECT_EQ(ring.n_discarded(), 0u);
    }
  }
}

// Broken off half way: nothing is computed twice or out of order, and a new step on the same ring is whole.
TEST(UnitRing, Cancelled) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const std::size_t n = 2 + random() % 8;
    std::set<std::size_t> misses{random() % n};
    UnitRing ring(n, 2, 1);
    CountingDevice d(n, misses, seed);
    d.cancel_at = random() % n;
    EXPECT_THROW(ring.run(d, d), std::runtime_error);
    d.finish();
    for (std::size_t i = 0; i < d.computed.size(); ++i) ASSERT_EQ(d.computed[i], i) << "seed " << seed;
    CountingDevice again(n, {}, seed);
    EXPECT_TRUE(ring.run(again, again));
    again.finish();
    EXPECT_EQ(again.computed.size(), 2 * n + 1);
  }
}

void poison(std::byte* slot, std::size_t bytes) { std::memset(slot, 0xCD, bytes); }

// A model on the played device, with experts in tiers.
struct OnDevice {
  OnDevice(const Loaded& m, std::size_t n_device, std::size_t n_spare, std::size_t n_host, std::uint32_t seed = 1, bool prompt = false, bool reads_host = false) : loaded(m), device(*m.backend, seed), random(seed) {
    store::TieredOptions o;
    o.n_device = n_device;
    o.n_spare = n_spare;
    o.n_host = n_host;
    o.n_staging = 2;
    o.device_reads_host = reads_host;
    o.make_reader = [&m](const io::MemoryRegions& r) { return io::make_reader(m.files, r, {}); };
    o.on_freed = poison;
    std::unique_ptr<AsyncCopier> copier = std::make_unique<PromptCopier>();
    if (!prompt) copier = std::make_unique<ManualCopier>([this](std::size_t n) { return random() % n; });
    store = std::make_unique<store::TieredStore>(m.binding.experts, m.names(), o, memory, pinned, std::move(copier));
  }
  std::unique_ptr<session::Session> session(model::RoutingHook* routing = nullptr, bool with_processor = false) {
    session::Parts parts{loaded.model, *store, device, loaded.precision};
    parts.routing = routing;
    if (with_processor) parts.processor = loaded.backend.get(), parts.cpu_experts = CpuExperts::On;
    return std::make_unique<session::Session>(parts, SessionOptions{.ctx_size = 256});
  }

  const Loaded& loaded;
  UnitDevice device;
  std::mt19937 random;
  KnownAllocator memory, pinned;
  std::unique_ptr<store::TieredStore> store;
};

std::vector<float> step_by_step(session::Session& s, std::span<const TokenId> tokens, std::size_t prefill) {
  std::vector<float> out;
  const auto keep = [&] { out.insert(out.end(), s.logits().begin(), s.logits().end()); };
  s.prefill(tokens.first(prefill));
  keep();
  for (const TokenId t : tokens.subspan(prefill)) {
    s.step(t);
    keep();
  }
  return out;
}

// From the position of the last prompt token on.
std::vector<float> wanted(const Loaded& m, std::span<const TokenId> tokens, std::size_t prefill) {
  const auto all = m.resident(tokens);
  const std::size_t vocab = all.size() / tokens.size();
  return {all.begin() + static_cast<std::ptrdiff_t>((prefill - 1) * vocab), all.end()};
}

class Units : public testing::TestWithParam<std::string> {};

TEST_P(Units, SameBytesForAnyPlacement) {
  const Loaded m(fixtures() / GetParam());
  auto tokens = golden_tokens(GetParam());
  tokens.resize(std::min<std::size_t>(tokens.size(), 40));
  const auto want = wanted(m, tokens, 5);
  const std::size_t all = m.n_experts(), top_k = m.top_k();
  std::size_t n_at_once = 0;
  std::uint32_t seed = 0;  // even and odd: devices that launch a step's units at once, and such that do not
  for (const std::size_t n_device : {top_k, top_k + 2, all / 4 + top_k, all / 2 + top_k, all + top_k})
    for (const auto& [n_host, reads_host] : {std::pair{std::size_t{0}, false}, {std::size_t{0}, false}, {all, false}, {all / 3, true}, {all / 3, true}, {all, true}}) {
      OnDevice on(m, n_device, top_k, n_host, ++seed, false, reads_host);
      if (reads_host && n_host == all) on.store->fill({});
      const auto session = on.session();
      for (int pass = 0; pass < 2; ++pass) {
        session->reset();
        ASSERT_EQ(step_by_step(*session, tokens, 5), want)
            << n_device << " on the device, " << n_host << " in main memory, read there: " << reads_host << ", pass " << pass;
      }
      EXPECT_EQ(on.store->find_fault(), "");
      EXPECT_LE(on.device.n_eager_steps, 2u) << "of steps in units, and of whole ones";
      EXPECT_GE(on.device.n_recorded, 1u);
      EXPECT_GT(on.device.n_replayed, 40u);
      if (n_device < all && !reads_host) {
        EXPECT_GT(on.device.n_skipped, 0u) << "the host ran ahead, in vain";
        EXPECT_EQ(on.device.n_whole, 0u);
      }
      if (reads_host && n_host == all) {  // everything is where the device reaches it
        EXPECT_EQ(on.device.n_whole, on.device.n_replayed);
        EXPECT_EQ(on.device.n_launched, on.device.n_recorded + on.device.n_replayed) << "one launch a step";
        EXPECT_GT(on.store->stats().host_hits + (n_device > all ? 1 : 0), 0u);
        EXPECT_EQ(on.device.n_left > 0, n_device > top_k && n_device < all + top_k) << "what it reads in main memory stays, where anything does";
      }
      if (n_device == all + top_k) {  // all is there before long: whole steps
        const std::size_t skipped = on.device.n_skipped;
        session->reset();
        EXPECT_EQ(step_by_step(*session, tokens, 5), want);
        EXPECT_EQ(on.device.n_skipped, skipped);
      }
      const SessionStats& s = session->stats();
      EXPECT_EQ(s.device_hits + s.host_hits + s.disk_misses, on.store->stats().requests);
      n_at_once += on.device.n_launched_all;
    }
  EXPECT_GT(n_at_once, 0u) << "devices that launch all units of a step at once";
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Units, testing::Values("qwen3_5_moe-bf16", "qwen3_5_moe-mlx4", "gpt_oss-mxfp4", "deepseek_v3-mlx4"), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// Experts in main memory are computed by the processor, all it may have; the device waits for it.
TEST_P(Units, SameBytesWhoeverComputes) {
  const Loaded m(fixtures() / GetParam());
  auto tokens = golden_tokens(GetParam());
  tokens.resize(std::min<std::size_t>(tokens.size(), 40));
  const auto want = wanted(m, tokens, 5);
  const std::size_t all = m.n_experts(), top_k = m.top_k();
  std::uint32_t seed = 0;
  for (const std::size_t n_device : {top_k, top_k + 2, all / 2 + top_k, all + top_k}) {
    OnDevice on(m, n_device, top_k, all, ++seed, false, true);
    on.store->fill({});
    const auto session = on.session(nullptr, true);
    for (int pass = 0; pass < 2; ++pass) {
      session->reset();
      ASSERT_EQ(step_by_step(*session, tokens, 5), want) << n_device << " on the device, pass " << pass;
    }
    EXPECT_EQ(on.store->find_fault(), "");
    EXPECT_GT(on.device.n_whole, 40u);
    EXPECT_EQ(session->stats().cpu_experts, on.device.n_shared);
    EXPECT_EQ(on.device.n_shared > 0, n_device < all + top_k);
  }
}

// An error while the device waits for the processor's share leaves nobody waiting.
TEST_P(Units, CancelledWhileTheDeviceWaits) {
  const Loaded m(fixtures() / GetParam());
  auto tokens = golden_tokens(GetParam());
  tokens.resize(std::min<std::size_t>(tokens.size(), 24));
  const auto want = wanted(m, tokens, 5);
  const std::size_t all = m.n_experts(), top_k = m.top_k();
  OnDevice on(m, top_k + 2, top_k, all, 3, false, true);
  on.store->fill({});
  const auto session = on.session(nullptr, true);
  std::size_t n_cancelled = 0, n_checks = 0;
  for (const std::size_t at : {0u, 1u, 2u, 3u}) {
    session->reset();
    session->prefill(std::span(tokens).first(12));
    for (std::size_t i = 12; i < 15; ++i) session->step(tokens[i]);
    n_checks = 0;
    on.device.on_check = [&](std::size_t check, const std::int32_t*) {
      ++n_checks;
      if (check == at) session->cancel();
    };
    try {
      session->step(tokens[15]);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::Cancelled);
      ++n_cancelled;
    }
    on.device.on_check = {};
    session->reset_cancel();
  }
  EXPECT_GT(n_cancelled, 0u);
  session->reset();
  EXPECT_EQ(step_by_step(*session, tokens, 5), want);
  EXPECT_EQ(on.store->find_fault(), "");
}

// Two sessions share weights and store, and nothing of their steps. While one may be reading the table, the other evicts nothing.
class UnitNeighbours : public testing::TestWithParam<bool> {};
TEST_P(UnitNeighbours, TwoDoNotDisturb) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  const auto want = wanted(m, tokens, 5);
  store::TieredOptions o;
  o.n_device = 14;
  o.n_spare = 6;
  o.n_host = 12;
  o.n_staging = 2;
  o.device_reads_host = GetParam();
  o.make_reader = [&m](const io::MemoryRegions& r) { return io::make_reader(m.files, r, {}); };
  o.on_freed = poison;
  KnownAllocator memory, pinned;
  store::TieredStore store(m.binding.experts, m.names(), o, memory, pinned, std::make_unique<PromptCopier>());
  std::vector<std::vector<float>> got(2);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < got.size(); ++i)
    threads.emplace_back([&, i] {
      const auto cpu = backend::make_cpu_backend({.n_threads = 1, .isa = ""});
      UnitDevice device(*cpu, static_cast<std::uint32_t>(i));
      session::Session session({m.model, store, device, m.precision}, {.ctx_size = 256});
      for (int pass = 0; pass < 3; ++pass) {
        session.reset();
        got[i] = step_by_step(session, tokens, 5);
        EXPECT_EQ(got[i], want) << "session " << i << ", pass " << pass;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store.find_fault(), "");
  EXPECT_EQ(store.busy_slots(), 0u);
}

INSTANTIATE_TEST_SUITE_P(ReadsMainMemory, UnitNeighbours, testing::Bool());

// A device that cannot record units computes as it comes.
TEST(UnitSessions, WithoutRecordings) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  const auto want = wanted(m, tokens, 5);
  for (const int times : {1, 100}) {
    OnDevice on(m, 8, 3, 10);
    on.device.refuse(times);
    const auto session = on.session();
    EXPECT_EQ(step_by_step(*session, tokens, 5), want);
    EXPECT_EQ(on.device.n_recorded, times == 1 ? 1u : 0u);
  }
}

// A step that is cancelled or fails leaves the session and the store in order.
TEST(UnitSessions, ErrorsLeaveOrder) {
  const Loaded m(fixtures() / "gpt_oss-mxfp4");  // no recurrent state: the position is simply free again
  const auto tokens = golden_tokens("gpt_oss-mxfp4");
  const auto want = wanted(m, tokens, 5);
  OnDevice on(m, 6, 4, 4);
  const auto session = on.session();
  step_by_step(*session, tokens, 5);
  session->reset();
  session->prefill(std::span(tokens).first(5));
  session->cancel();
  expect_error([&] { session->step(tokens[5]); }, ErrorCode::Cancelled, {"cancelled"});
  session->reset_cancel();
  session->reset();
  EXPECT_EQ(step_by_step(*session, tokens, 5), want);
  EXPECT_EQ(on.store->find_fault(), "");
}

// The same where the device was lent slots for the step: they come back.
TEST(UnitSessions, CancelledWithLentSlots) {
  const Loaded m(fixtures() / "gpt_oss-mxfp4");
  const auto tokens = golden_tokens("gpt_oss-mxfp4");
  const auto want = wanted(m, tokens, 5);
  OnDevice on(m, 10, 4, 32, 1, true, true);
  on.store->fill({});
  const auto session = on.session();
  EXPECT_EQ(step_by_step(*session, tokens, 5), want);
  EXPECT_GT(on.device.n_left, 0u);
  for (int i = 0; i < 3; ++i) {
    session->reset();
    session->prefill(std::span(tokens).first(5));
    std::size_t n_checks = 0;
    on.device.on_check = [&](std::size_t, const std::int32_t*) {
      if (++n_checks == 1) session->cancel();
    };
    expect_error([&] { session->step(tokens[5]); }, ErrorCode::Cancelled, {"cancelled"});
    on.device.on_check = {};
    session->reset_cancel();
    EXPECT_EQ(on.store->find_fault(), "");
    EXPECT_EQ(on.store->busy_slots(), 0u);
  }
  session->reset();
  EXPECT_EQ(step_by_step(*session, tokens, 5), want);
}

// A hook that foretells is obeyed on the device, one that looks sees every choice.
TEST(UnitSessions, RoutingHooks) {
  struct Hook final : model::RoutingHook {
    void begin_pass(std::int64_t pos0, std::int64_t) override { pos = pos0; }
    bool routed(LayerIdx layer, std::int64_t n_experts, std::int64_t top_k, std::span<std::int32_t> ids) override {
      if (what == Kind::Looks) {
        seen.insert(seen.end(), ids.begin(), ids.end());
        return false;
      }
      for (std::size_t i = 0; i < ids.size(); ++i) {
        const auto t = static_cast<std::int64_t>(i) / top_k, r = static_cast<std::int64_t>(i) % top_k;
        ids[i] = static_cast<std::int32_t>((raw(layer) + pos + t + r * 2) % n_experts);
      }
      return true;
    }
    Kind kind() const noexcept override { return what; }
    void end_pass(bool) override {}
    Kind what = Kind::Looks;
    std::int64_t pos = 0;
    std::vector<std::int32_t> seen;
  };
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  HostAllocator allocator;
  HostCopier copier;
  store::ResidentStore resident(m.binding.experts, m.folder, allocator, copier, {});
  for (const auto kind : {model::RoutingHook::Kind::Looks, model::RoutingHook::Kind::Foretells}) {
    Hook plain, units;
    plain.what = units.what = kind;
    session::Parts parts{m.model, resident, *m.backend, m.precision};
    parts.routing = &plain;
    session::Session reference(parts, {.ctx_size = 256});
    std::vector<TokenId> many;
    for (int i = 0; i < 120; ++i) many.push_back(tokens[static_cast<std::size_t>(i) % tokens.size()]);
    const auto want = step_by_step(reference, many, 5);
    for (const std::size_t kept : {3u, 7u, 13u, 20u}) {
      units.seen.clear();
      OnDevice on(m, 3 + kept, 3, 10);
      EXPECT_EQ(step_by_step(*on.session(&units), many, 5), want);
      EXPECT_EQ(units.seen, plain.seen);
      EXPECT_GT(on.device.n_replayed, 5u);
    }
  }
}

// When the device looks at its table, everything in it is where the store says it is.
TEST(UnitSessions, TheTableIsNeverStale) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");  // experts in every layer
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  for (const std::size_t kept : {2u, 5u, 9u, 16u}) {
    OnDevice on(m, 3 + kept, 3, 12, static_cast<std::uint32_t>(kept));
    std::size_t n_looks = 0, n_slots = 0;
    std::vector<std::int32_t> truth(4 * 8);
    on.device.on_check = [&](std::size_t check, const std::int32_t* slot_of) {
      on.store->read_slots(0, truth, 8);
      for (std::size_t e = 0; e < 8; ++e) {
        if (slot_of[e] < 0) continue;
        ++n_slots;
        EXPECT_EQ(slot_of[e], truth[check * 8 + e]) << "layer " << check << ", expert " << e;
      }
      ++n_looks;
    };
    step_by_step(*on.session(), tokens, 3);
    EXPECT_GT(n_looks, 40u);
    EXPECT_GT(n_slots, 10u);
  }
}

}  // namespace
}  // namespace moeflux::test
