// Experts in three tiers give the same bytes as experts that are all in memory, and the books are in order after every move. Host
// memory plays the device's: apart from main memory's slots, and filled with trash when a slot is nobody's.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include <moeflux/pack.h>

#include "store/tiered_store.h"
#include "support/expect_error.h"
#include "support/fault_reader.h"
#include "support/loaded_model.h"
#include "support/manual_copier.h"
#include "support/manual_reader.h"
#include "support/temp_dir.h"

namespace moeflux::test {
namespace {

using store::ExpertLease;
using store::TieredStore;

void poison(std::byte* slot, std::size_t bytes) { std::memset(slot, 0xCD, bytes); }

struct Shape {
  std::size_t n_device, n_spare, n_host, n_staging = 2;
  bool reads_host = false;
};

// A store and everything it stands on. By default reads are real and copies are done in random order.
struct Tiers {
  Tiers(const Loaded& m, Shape s, std::uint32_t seed = 1, store::MakeReader make_reader = {}) : random(seed) {
    store::TieredOptions o;
    o.n_device = s.n_device;
    o.n_spare = s.n_spare;
    o.n_host = s.n_host;
    o.n_staging = s.n_staging;
    o.device_reads_host = s.reads_host;
    o.make_reader = make_reader ? std::move(make_reader) : [&m](const io::MemoryRegions& r) { return io::make_reader(m.files, r, {}); };
    o.on_freed = poison;
    auto c = std::make_unique<ManualCopier>([this](std::size_t n) { return random() % n; });
    copier = c.get();
    store = std::make_unique<TieredStore>(m.binding.experts, m.names(), o, device, pinned, std::move(c));
  }
  // All copies that are under way end, and the store hears of it.
  void finish_copies() {
    while (copier->n_pending() > 0) copier->complete(0);
    store->poll();
  }
  // Nothing is under way once nobody holds a lease.
  void expect_quiet() {
    for (int i = 0; i < 5000 && store->busy_slots() > 0; ++i) {
      finish_copies();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(store->busy_slots(), 0u);
    EXPECT_EQ(store->find_fault(), "");
  }

  std::mt19937 random;
  KnownAllocator device, pinned;
  ManualCopier* copier = nullptr;
  std::unique_ptr<TieredStore> store;
};

class Tiered : public testing::TestWithParam<std::string> {};

// From the least that works to everything, on the device and in main memory, in any chunking.
TEST_P(Tiered, SameBytesForAnyPlacement) {
  const Loaded m(fixtures() / GetParam());
  const auto tokens = golden_tokens(GetParam());
  const auto want = m.resident(tokens);
  const std::size_t all = m.n_experts(), top_k = m.top_k();
  for (const std::size_t n_device : {top_k, top_k + 1, all / 4 + top_k, all / 2 + top_k, all + top_k})
    for (const std::size_t n_host : {std::size_t{0}, std::size_t{1}, all / 3, all + 2}) {
      Tiers t(m, {n_device, top_k, n_host});
      const std::string which = fmt::format("{} on the device, {} in main memory", n_device, n_host);
      EXPECT_EQ(m.logits(*t.store, tokens, 0, tokens.size()), want) << which;
      EXPECT_EQ(m.logits(*t.store, tokens, 7, tokens.size() / 2), want) << which << ", chunks and decode";
      EXPECT_EQ(m.logits(*t.store, tokens, 7, 5, Prefetch::On), want) << which << ", prefetch";
      t.expect_quiet();
      const store::StoreStats s = t.store->stats();
      if (n_device + n_host >= all + top_k) {  // nothing is read twice
        std::uint64_t bytes = 0;
        for (const auto& l : m.binding.experts.layers)
          for (const auto& p : l.pieces) bytes += p.source.bytes;
        EXPECT_LE(s.bytes_read, bytes) << which;
      }
      if (n_host == 0) {
        EXPECT_EQ(s.host_hits + s.bytes_to_host, 0u) << which;
      }
      EXPECT_LE(s.hits + s.host_hits, s.requests);
    }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Tiered, testing::Values("qwen3_5_moe-bf16", "qwen3_5_moe-mlx4", "gpt_oss-mxfp4", "deepseek_v3-mlx4"), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// A lease's experts lie in device memory, aligned as kernels want them whatever the file's layout is.
TEST(TieredStore, ViewsPointIntoDeviceMemory) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  Tiers t(m, {5, 3, 8});
  const std::vector<ExpertIdx> some{ExpertIdx{0}, ExpertIdx{4}, ExpertIdx{7}};
  for (std::int32_t l = 0; l < 3; ++l) {
    ExpertLease lease = t.store->acquire(LayerIdx{l}, some);
    for (std::size_t i = 0; i < some.size(); ++i) {
      const store::ExpertView v = lease.wait(i);
      for (const quant::MatrixView* w : {&v.gate, &v.up, &v.down})
        for (const std::byte* p : {w->data, w->scales, w->biases}) {
          EXPECT_TRUE(t.device.owns(p));
          EXPECT_FALSE(t.pinned.owns(p));
          EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % store::kComponentAlign, 0u);
        }
    }
  }
}

// What a device does that reads an expert in main memory, where its table says it is (-2 - s), and leaves all of it in one of its own slots.
void leave_in_slot(const TieredStore& store, LayerIdx layer, std::int32_t entry, std::int32_t slot) {
  const store::SlotExperts s = store.slot_layer(layer);
  const auto stride = static_cast<std::int64_t>(s.stride);
  const auto copy = [&](const std::byte* first, std::size_t bytes) {
    if (first != nullptr) std::memcpy(const_cast<std::byte*>(first) + stride * slot, first + s.host_offset + stride * (-2 - entry), bytes);
  };
  for (const quant::MatrixView* m : {&s.first.gate, &s.first.up, &s.first.down}) {
    const auto rows = static_cast<std::size_t>(m->rows);
    copy(m->data, rows * m->row_bytes());
    copy(m->scales, rows * m->scale_row_bytes());
    copy(m->biases, rows * m->scale_row_bytes());
  }
}

// Random leases of several holders, hints, and completions of reads and copies in any order, some of them failures: after every
// step the books are in order and what a lease shows is the expert. Now and then a device uses the table, and what it reads in main memory late in
// its step is still there.
class RandomMoves {
 public:
  RandomMoves(const Loaded& m, std::uint32_t seed, bool with_faults)
      : m_(m), random_(seed), with_faults_(with_faults), resident_(m.binding.experts, m.folder, host_, host_copier_, {}) {
    const Shape shape{3 + random_() % 14, 3, random_() % 20, 1 + random_() % 4, random_() % 2 == 0};
    tiers_ = std::make_unique<Tiers>(m, shape, seed, [this](const io::MemoryRegions&) {
      auto r = std::make_unique<ManualReader>(m_.files);
      reader_ = r.get();
      return r;
    });
  }

  void run(int n_steps) {
    for (int i = 0; i < n_steps; ++i) {
      step();
      const std::string fault = tiers_->store->find_fault();
      ASSERT_EQ(fault, "") << "step " << i;
    }
    leases_.clear();
    if (use_) end_use();
    while (reader_->pending().size() + tiers_->copier->n_pending() > 0) {
      complete_something();
      tiers_->store->poll();
    }
    tiers_->expect_quiet();
  }
  std::size_t n_compared() const { return n_compared_; }
  std::size_t n_left() const { return n_left_; }

 private:
  struct Held {
    ExpertLease lease;
    LayerIdx layer;
    std::vector<ExpertIdx> experts;
  };

  void step() {
    if (random_() % 12 == 0) return use_ ? end_use() : begin_use();
    switch (random_() % 8) {
      case 0:
      case 1:
        return acquire();
      case 2:
        if (!leases_.empty()) leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(random_() % leases_.size()));
        return;
      case 3: {
        const auto e = some();
        return tiers_->store->hint(layer(), e, static_cast<float>(random_() % 3) / 2);
      }
      case 4:
        return look();
      default:
        return complete_something();
    }
  }
  struct Use {
    std::vector<std::int32_t> table, lent;
  };
  void begin_use() {
    use_.emplace();
    tiers_->store->begin_use();
    use_->table.resize(m_.binding.experts.layers.size() * 8);
    tiers_->store->read_slots(0, use_->table, 8);
    use_->lent.resize(1 + random_() % 4);
    use_->lent.resize(tiers_->store->lend_slots(use_->lent));
  }
  void end_use() {
    std::vector<store::FilledSlot> filled;
    for (std::int32_t slot : use_->lent) {
      LayerIdx l{};
      ExpertIdx e{};
      std::int32_t entry = -1;
      for (int tries = 0; tries < 16 && entry > -2; ++tries) {
        l = layer(), e = ExpertIdx(static_cast<std::int32_t>(random_() % 8));
        entry = use_->table[static_cast<std::size_t>(raw(l) * 8 + raw(e))];
      }
      if (entry > -2) continue;
      leave_in_slot(*tiers_->store, l, entry, slot);
      filled.push_back({slot, l, e});
      tiers_->store->used(l, {&e, 1}, 0);
    }
    n_left_ += filled.size();
    tiers_->store->take_back(use_->lent, filled);
    tiers_->store->end_use();
    use_.reset();
  }
  LayerIdx layer() { return LayerIdx(static_cast<std::int32_t>(random_() % m_.binding.experts.layers.size())); }
  std::vector<ExpertIdx> some() {
    std::vector<ExpertIdx> out;
    for (std::int32_t e = 0; e < 8 && out.size() < 3; ++e)
      if (random_() % 3 == 0) out.push_back(ExpertIdx(e));
    if (out.empty()) out.push_back(ExpertIdx(static_cast<std::int32_t>(random_() % 8)));
    return out;
  }
  void acquire() {
    Held h{{}, layer(), some()};
    tiers_->store->visit(h.layer, h.experts, {}, 1 + random_() % 2);
    h.lease = tiers_->store->try_acquire(h.layer, h.experts);
    if (h.lease) leases_.push_back(std::move(h));
  }
  void look() {
    if (leases_.empty()) return;
    Held& h = leases_[random_() % leases_.size()];
    const std::size_t i = random_() % h.experts.size();
    if (!h.lease.ready(i)) return;
    try {
      compare(h.lease.wait(i), h, i);
    } catch (const Error&) {
      EXPECT_TRUE(with_faults_);
    }
  }
  void compare(const store::ExpertView& got, const Held& h, std::size_t i) {
    ExpertLease lease = resident_.acquire(h.layer, {&h.experts[i], 1});
    const store::ExpertView want = lease.wait(0);
    const auto same = [](const quant::MatrixView& a, const quant::MatrixView& b) {
      return std::memcmp(a.data, b.data, static_cast<std::size_t>(a.rows) * a.row_bytes()) == 0 &&
             (a.scales == nullptr || std::memcmp(a.scales, b.scales, static_cast<std::size_t>(a.rows) * a.scale_row_bytes()) == 0);
    };
    EXPECT_TRUE(same(got.gate, want.gate) && same(got.up, want.up) && same(got.down, want.down)) << raw(h.layer) << " " << raw(h.experts[i]);
    EXPECT_TRUE(tiers_->device.owns(got.gate.data));
    ++n_compared_;
  }
  void complete_something() {
    const bool bad = with_faults_ && random_() % 10 == 0;
    const std::size_t n_reads = reader_->pending().size(), n_copies = tiers_->copier->n_pending();
    if (n_reads > 0 && (n_copies == 0 || random_() % 2 == 0)) {
      if (bad)
        reader_->fail(random_() % n_reads, EIO);
      else
        reader_->complete(random_() % n_reads);
    } else if (n_copies > 0) {
      tiers_->copier->complete(random_() % n_copies, !bad);
    }
    if (with_faults_ && random_() % 50 == 0) tiers_->copier->refuse_next(1);
  }

  const Loaded& m_;
  std::mt19937 random_;
  bool with_faults_;
  HostAllocator host_;
  HostCopier host_copier_;
  store::ResidentStore resident_;
  ManualReader* reader_ = nullptr;
  std::unique_ptr<Tiers> tiers_;
  std::vector<Held> leases_;
  std::optional<Use> use_;
  std::size_t n_compared_ = 0, n_left_ = 0;
};

TEST(TieredMoves, AnExpertLivesInOneTier) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  std::size_t n_compared = 0, n_left = 0;
  for (std::uint32_t seed = 0; seed < 24; ++seed) {
    RandomMoves moves(m, seed, seed % 2 == 1);
    moves.run(4000);
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
    EXPECT_GT(moves.n_compared(), 0u);
    n_compared += moves.n_compared();
    n_left += moves.n_left();
  }
  EXPECT_GT(n_left, 100u);
  EXPECT_GT(n_compared, 2000u);  // records whose bytes were looked at; how many falls to a seed differs from compiler to compiler
}

// Whole models while reads and copies complete in random orders.
TEST(TieredMoves, AnyOrderOfCompletionGivesTheSameBytes) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  tokens.resize(6);
  const auto want = m.resident(tokens);
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    Tiers t(m, {3 + random() % 12, 3, random() % 16, 1 + random() % 3}, seed, [&](const io::MemoryRegions&) {
      return std::make_unique<ManualReader>(m.files, [&random](std::span<const io::ReadRequest> pending) { return random() % pending.size(); });
    });
    const Prefetch prefetch = seed % 2 == 0 ? Prefetch::On : Prefetch::Off;
    ASSERT_EQ(m.logits(*t.store, tokens, 1 + static_cast<std::int64_t>(random() % 6), 1 + random() % tokens.size(), prefetch), want) << "schedule " << seed;
    ASSERT_EQ(t.store->find_fault(), "") << "schedule " << seed;
  }
}

TEST(TieredMoves, TwoSessionsShareAStore) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  const auto want = m.resident(tokens);
  Tiers t(m, {8, 3, 6});
  std::vector<std::vector<float>> got(2);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < got.size(); ++i)
    threads.emplace_back([&, i] { got[i] = m.logits(*t.store, tokens, 5 + static_cast<std::int64_t>(i) * 4, tokens.size() / 2, i == 0 ? Prefetch::On : Prefetch::Off); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(got[0], want);
  EXPECT_EQ(got[1], want);
  t.expect_quiet();
}

// One layer's experts are used again and again; then a prompt passes that touches all of the others once. They are still there.
TEST(TieredMoves, AScanPassesThrough) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  Tiers t(m, {6, 3, 40});
  const std::vector<ExpertIdx> favourites{ExpertIdx{1}, ExpertIdx{2}, ExpertIdx{5}};
  const auto visit = [&](LayerIdx layer, std::span<const ExpertIdx> experts, std::span<const std::uint32_t> counts, std::uint32_t n) {
    t.store->visit(layer, experts, counts, n);
    ExpertLease lease = t.store->acquire(layer, experts);
    for (std::size_t i = 0; i < experts.size(); ++i) lease.wait(i);
  };
  for (int i = 0; i < 30; ++i) visit(LayerIdx{0}, favourites, {}, 1);
  const std::vector<std::uint32_t> once(1, 1);
  for (std::int32_t l = 1; l < 4; ++l)
    for (std::int32_t e = 0; e < 8; ++e) {
      const ExpertIdx expert{e};
      visit(LayerIdx{l}, {&expert, 1}, once, 8);
    }
  for (const ExpertIdx e : favourites) EXPECT_EQ(t.store->tier_of(LayerIdx{0}, e), TieredStore::Tier::Device);
  // What passed through has found a home in main memory.
  EXPECT_EQ(t.store->tier_of(LayerIdx{1}, ExpertIdx{3}), TieredStore::Tier::Host);
  const std::uint64_t read = t.store->stats().bytes_read;
  const ExpertIdx again{3};
  visit(LayerIdx{1}, {&again, 1}, {}, 1);
  EXPECT_EQ(t.store->stats().bytes_read, read);
  EXPECT_EQ(t.store->stats().host_hits, 1u);
  t.expect_quiet();
}

// An expert that leaves the device soon after it came needs no copy: its bytes are still in main memory.
TEST(TieredMoves, ComingBackSoonCostsNothing) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  Tiers t(m, {4, 3, 40});  // one is kept
  const auto use = [&](std::int32_t e, int times) {
    const ExpertIdx expert{e};
    for (int i = 0; i < times; ++i) {
      t.store->visit(LayerIdx{0}, {&expert, 1}, {}, 1);
      t.store->acquire(LayerIdx{0}, {&expert, 1}).wait(0);
      t.finish_copies();
    }
  };
  use(0, 3);
  use(1, 6);  // 0 goes to main memory
  t.expect_quiet();
  ASSERT_EQ(t.store->tier_of(LayerIdx{0}, ExpertIdx{0}), TieredStore::Tier::Host);
  const std::uint64_t once = t.store->stats().bytes_to_host;
  EXPECT_GT(once, 0u);
  use(0, 20);
  ASSERT_EQ(t.store->tier_of(LayerIdx{0}, ExpertIdx{0}), TieredStore::Tier::Device);
  const std::uint64_t twice = t.store->stats().bytes_to_host;
  use(1, 20);
  ASSERT_EQ(t.store->tier_of(LayerIdx{0}, ExpertIdx{0}), TieredStore::Tier::Host);
  EXPECT_EQ(t.store->stats().bytes_to_host, twice);
  t.expect_quiet();
}

// While somebody's device may read the table, what is in it stays where it is: others pass through. Who uses it alone and is at rest
// may push out.
TEST(TieredTable, StaysWhileItIsUsed) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  Tiers t(m, {4, 3, 40});  // one is kept
  std::vector<std::int32_t> table(4 * 10, 7);
  const auto slot_of = [&](std::int32_t e) {
    t.store->read_slots(0, table, 10);
    return table[static_cast<std::size_t>(e)];
  };
  const auto use = [&](std::int32_t e, int times, bool at_rest) {
    const ExpertIdx expert{e};
    for (int i = 0; i < times; ++i) {
      t.store->visit(LayerIdx{0}, {&expert, 1}, {}, 1);
      (at_rest ? t.store->acquire_at_rest(LayerIdx{0}, {&expert, 1}) : t.store->acquire(LayerIdx{0}, {&expert, 1})).wait(0);
      ASSERT_EQ(t.store->find_fault(), "");
      t.finish_copies();
    }
  };
  use(0, 2, false);
  const std::int32_t first = slot_of(0);
  EXPECT_GE(first, 0);
  t.store->begin_use();
  use(1, 30, false);
  const std::vector<ExpertIdx> hint{ExpertIdx{2}};
  t.store->hint(LayerIdx{1}, hint, 1.0f);
  EXPECT_EQ(slot_of(0), first) << "one user, and another session";
  t.store->begin_use();
  use(1, 30, true);
  EXPECT_EQ(slot_of(0), first) << "two users";
  t.store->end_use();
  use(1, 1, true);
  EXPECT_EQ(slot_of(0), -1) << "the only user, at rest";
  EXPECT_GE(slot_of(1), 0);
  const std::uint64_t version = t.store->read_slots(0, table, 10);
  table.assign(table.size(), 7);
  EXPECT_EQ(t.store->read_slots(version, table, 10), version);
  EXPECT_EQ(table[0], 7) << "nothing new";
  t.store->end_use();
  t.expect_quiet();
}

// A device that stores what it reads from main memory: an expert stays in the slot that was lent where it is worth more than another, and
// nothing is copied for it.
TEST(TieredTable, LentSlotsKeepWhatIsWorthIt) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const std::size_t all = m.n_experts();
  Tiers t(m, {.n_device = 12, .n_spare = 4, .n_host = all, .reads_host = true});
  t.store->fill({});
  t.finish_copies();
  std::vector<std::int32_t> table(4 * 8);
  const auto entry = [&](std::int32_t e) {
    t.store->read_slots(0, table, 8);
    return table[static_cast<std::size_t>(e)];
  };
  const auto visit = [&](std::int32_t e, int times) {
    const ExpertIdx expert{e};
    for (int i = 0; i < times; ++i) t.store->visit(LayerIdx{0}, {&expert, 1}, {}, 1);
  };
  std::vector<std::int32_t> near, far;
  for (std::int32_t e = 0; e < 8; ++e) (entry(e) >= 0 ? near : far).push_back(e);
  ASSERT_GE(far.size(), 3u);
  const auto fill = [&](std::int32_t e, std::int32_t slot) {
    ASSERT_LE(entry(e), -2);
    leave_in_slot(*t.store, LayerIdx{0}, entry(e), slot);
  };
  const std::uint64_t copied = t.store->stats().bytes_to_device;
  const auto lend = [&](std::size_t n) {
    std::vector<std::int32_t> lent(n, -1);
    lent.resize(t.store->lend_slots(lent));
    EXPECT_EQ(t.store->find_fault(), "");
    return lent;
  };

  t.store->begin_use();
  auto lent = lend(8);
  ASSERT_EQ(lent.size(), 3u) << "one spare slot stays for others";
  EXPECT_EQ(lend(8).size(), 0u);
  visit(far[0], 20);
  fill(far[0], lent[1]);
  fill(far[1], lent[0]);  // nobody has ever asked for it
  t.store->take_back(lent, std::vector<store::FilledSlot>{{lent[1], LayerIdx{0}, ExpertIdx{far[0]}}, {lent[0], LayerIdx{0}, ExpertIdx{far[1]}}});
  EXPECT_EQ(t.store->find_fault(), "");
  EXPECT_EQ(entry(far[0]), lent[1]);
  EXPECT_EQ(t.store->tier_of(LayerIdx{0}, ExpertIdx{far[0]}), TieredStore::Tier::Device);
  EXPECT_LE(entry(far[1]), -2);
  EXPECT_TRUE(t.store->table_is_whole());

  // While another session's device may read the table nothing is pushed out.
  lent = lend(2);
  ASSERT_EQ(lent.size(), 2u);
  t.store->begin_use();
  visit(far[2], 20);
  fill(far[2], lent[0]);
  t.store->take_back(lent, std::vector<store::FilledSlot>{{lent[0], LayerIdx{0}, ExpertIdx{far[2]}}});
  EXPECT_EQ(t.store->tier_of(LayerIdx{0}, ExpertIdx{far[2]}), TieredStore::Tier::Host);
  t.store->end_use();
  t.store->end_use();
  EXPECT_EQ(t.store->stats().bytes_to_device, copied) << "nothing was copied";
  t.expect_quiet();
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  EXPECT_EQ(m.logits(*t.store, tokens, 7, 20), m.resident(tokens));
  t.expect_quiet();
}

// Slots that are lent anew for every token do not keep a lease of another session waiting for ever.
TEST(TieredTable, LeasesComeBeforeLending) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  Tiers t(m, {.n_device = 12, .n_spare = 4, .n_host = m.n_experts(), .reads_host = true});
  t.store->fill({});
  t.finish_copies();
  std::vector<std::int32_t> lent, table(4 * 8);
  const auto lend = [&] {
    lent.resize(8);
    lent.resize(t.store->lend_slots(lent));
    return lent.size();
  };
  t.store->read_slots(0, table, 8);
  std::vector<ExpertIdx> wanted;
  for (std::int32_t e = 0; e < 8 && wanted.size() < 3; ++e)
    if (table[static_cast<std::size_t>(e)] < 0) wanted.push_back(ExpertIdx(e));
  ASSERT_EQ(wanted.size(), 3u);
  t.store->begin_use();
  ASSERT_EQ(lend(), 3u);
  ExpertLease lease;
  std::thread other([&] { lease = t.store->acquire(LayerIdx{0}, wanted); });
  // One slot comes back and would be lent again, but for the lease that waits for three.
  bool refused = false;
  for (int i = 0; i < 20000 && !refused; ++i) {
    t.store->take_back(std::span(lent).first(1), {});
    refused = t.store->lend_slots(std::span(lent).first(1)) == 0;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  EXPECT_TRUE(refused);
  t.store->take_back(refused ? std::span(lent).subspan(1) : std::span(lent), {});
  other.join();
  EXPECT_EQ(lease.size(), 3u);
  lease = {};
  t.store->end_use();
  t.expect_quiet();
}

// Nothing is lent where nothing is kept, or where the device does not read main memory.
TEST(TieredTable, LendsNothingInVain) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  for (const Shape& s : {Shape{.n_device = 4, .n_spare = 4, .n_host = 32, .reads_host = true}, Shape{.n_device = 12, .n_spare = 4, .n_host = 32}}) {
    Tiers t(m, s);
    std::vector<std::int32_t> lent(8);
    EXPECT_EQ(t.store->lend_slots(lent), 0u);
    t.expect_quiet();
  }
}

TEST(TieredFill, ReadsEverythingThatFits) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const std::size_t all = m.n_experts();
  Tiers t(m, {all / 4 + 3, 3, all});
  std::uint64_t last = 0, total = 0;
  t.store->fill([&](std::string_view, std::uint64_t done, std::uint64_t of) { last = done, total = of; });
  EXPECT_EQ(last, total);
  t.expect_quiet();
  const std::uint64_t read = t.store->stats().bytes_read;
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  EXPECT_EQ(m.logits(*t.store, tokens, 7, 20), m.resident(tokens));
  EXPECT_EQ(t.store->stats().bytes_read, read) << "all was there";
  t.expect_quiet();
}

TEST(TieredFaults, ReadsThatFail) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  for (const int times : {1, -1}) {
    Tiers t(m, {6, 3, 4}, 1, [&](const io::MemoryRegions& regions) {
      auto reader = std::make_unique<FaultReader>(io::make_reader(m.files, regions, {}));
      Fault fault;
      fault.error = EIO;
      fault.times = times;
      reader->add(fault);
      return reader;
    });
    if (times == 1) {  // tried once more
      EXPECT_EQ(m.logits(*t.store, tokens, 0, 10), m.resident(tokens));
    } else {
      expect_error([&] { m.logits(*t.store, tokens, 0, tokens.size()); }, ErrorCode::Io, {"model.safetensors", "layer 0", "expert", "offset"});
    }
    t.expect_quiet();
  }
}

// A record of a pack that is not as its checksum says counts as a failed read, before any of it reaches the device.
TEST(TieredFaults, DamagedRecords) {
  const TempDir dir;
  PackOptions pack;
  pack.model = fixtures() / "qwen3_5_moe-mlx4";
  pack.out = dir / "p";
  pack_model(pack);
  const Loaded m(dir / "p");
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  for (const int times : {0, 1, -1}) {
    Tiers t(m, {6, 3, 8}, 1, [&](const io::MemoryRegions& regions) {
      auto reader = std::make_unique<FaultReader>(io::make_reader(m.files, regions, {}));
      Fault fault;
      fault.flip_bit = 12345;
      fault.times = times;
      reader->add(fault);
      return reader;
    });
    if (times >= 0) {
      EXPECT_EQ(m.logits(*t.store, tokens, 0, 10), m.resident(tokens));
    } else {
      expect_error([&] { m.logits(*t.store, tokens, 0, 10); }, ErrorCode::InvalidModel, {"experts.bin", "layer 0", "expert", "checksum"});
    }
    t.expect_quiet();
  }
}

TEST(TieredFaults, CopiesThatFail) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  const auto want = m.resident(tokens);
  for (const bool refused : {false, true}) {
    Tiers t(m, {6, 3, 8});
    m.logits(*t.store, tokens, 0, 10);
    refused ? t.copier->refuse_next(1000000) : t.copier->fail_next(1000000);
    expect_error([&] { m.logits(*t.store, tokens, 0, 10); }, ErrorCode::Internal, {"layer", "expert", "device", "by hand"});
    t.expect_quiet();
    refused ? t.copier->refuse_next(0) : t.copier->fail_next(0);
    EXPECT_EQ(m.logits(*t.store, tokens, 0, 10), want);  // the store goes on
    t.expect_quiet();
  }
}

TEST(TieredStore, TooFewSlotsAreRefused) {
  const Loaded m(fixtures() / "qwen3_5_moe-bf16");
  expect_error([&] { Tiers(m, {2, 3, 4}); }, ErrorCode::InvalidArgument, {"2 device slots", "3"});
  expect_error([&] { Tiers(m, {3, 3, 4, 0}); }, ErrorCode::InvalidArgument, {"0 for reads"});
}

}  // namespace
}  // namespace moeflux::test
