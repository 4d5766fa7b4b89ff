// Experts streamed through few slots give the same bytes as experts that are all in memory.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <fstream>
#include <random>
#include <thread>

#include "io/async_reader.h"
#include "support/evaluate.h"
#include "support/expect_error.h"
#include "support/fault_reader.h"
#include "support/loaded_model.h"
#include "support/manual_reader.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::test {
namespace {

namespace fs = std::filesystem;

std::vector<TokenId> some_prompt() {
  auto tokens = to_tokens(TensorFile::load(fixtures() / "demo-golden/golden.safetensors").ints("tokens"));
  tokens.resize(60);
  return tokens;
}

class Streaming : public testing::TestWithParam<std::string> {};

// From the least that works to everything, read by either reader, in any chunking.
TEST_P(Streaming, SameBytesForAnyNumberOfSlots) {
  const Loaded m(fixtures() / GetParam());
  const auto tokens = golden_tokens(GetParam());
  const auto want = m.resident(tokens);
  for (const std::size_t slots : {3u, 4u, 8u, 32u})
    for (const io::ReaderKind kind : {io::ReaderKind::Auto, io::ReaderKind::Pread}) {
      store::StreamingOptions o = m.streaming(slots, std::max<std::size_t>(3, slots / 2));
      o.make_reader = [&](const io::MemoryRegions& regions) {
        io::ReaderOptions r;
        r.kind = kind;
        return io::make_reader(m.files, regions, r);
      };
      store::StreamingStore experts(m.binding.experts, m.names(), o);
      EXPECT_EQ(m.logits(experts, tokens, 0, tokens.size()), want) << slots << " slots";
      EXPECT_EQ(m.logits(experts, tokens, 7, 20), want) << slots << " slots, chunks and decode";
      for (const Prefetch prefetch : {Prefetch::On, Prefetch::Auto})
        EXPECT_EQ(m.logits(experts, tokens, 7, 5, prefetch), want) << slots << " slots, prefetch";
      EXPECT_EQ(leaked_slots(experts), 0u);
      if (slots == 32) {  // everything fits: the second pass hits
        EXPECT_GT(experts.stats().hits * 2, experts.stats().requests);
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Streaming, testing::Values("qwen3_5_moe-bf16", "qwen3_5_moe-mlx4"), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// Reads that complete in random orders, with hints sprinkled in: 500 schedules.
TEST(StreamingSchedules, AnyOrderOfCompletionGivesTheSameBytes) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  tokens.resize(6);
  const auto want = m.resident(tokens);
  for (std::uint32_t seed = 0; seed < 500; ++seed) {
    std::mt19937 random(seed);
    store::StreamingOptions o = m.streaming(3 + random() % 12, 3);
    o.make_reader = [&](const io::MemoryRegions&) {
      return std::make_unique<ManualReader>(m.files, [&](std::span<const io::ReadRequest> pending) { return random() % pending.size(); });
    };
    store::StreamingStore experts(m.binding.experts, m.names(), o);
    const std::vector<ExpertIdx> hint{ExpertIdx(static_cast<std::int32_t>(random() % 8))};
    experts.hint(LayerIdx(static_cast<std::int32_t>(random() % 4)), hint, 1.0f);
    const Prefetch prefetch = seed % 2 == 0 ? Prefetch::On : Prefetch::Off;
    ASSERT_EQ(m.logits(experts, tokens, 1 + static_cast<std::int64_t>(random() % 6), 1 + random() % tokens.size(), prefetch), want) << "schedule " << seed;
  }
}

// The next layer's router foretells much of what that layer then wants, and what it foretells is read and used.
TEST(StreamingPrefetch, ForetellsAndCounts) {
  const Loaded m(demo_model());
  const auto tokens = some_prompt();
  store::StreamingStore experts(m.binding.experts, m.names(), m.streaming(24, 8));
  SessionStats s;
  EXPECT_EQ(m.logits(experts, tokens, 0, 8, Prefetch::On, &s), m.resident(tokens));
  EXPECT_EQ(s.prefetch_steps_on, tokens.size() - 8);
  EXPECT_EQ(s.prefetch_steps_off, 0u);
  EXPECT_GT(s.predicted, 0u);
  // By chance a prediction would be right for top-k of all experts.
  const double chance = static_cast<double>(m.parsed.spec.layers.size()) > 0 ? 0.25 : 0;
  EXPECT_GT(s.prefetch_recall(), chance);
  EXPECT_GT(s.hints_issued, 0u);
  EXPECT_GT(s.hints_used, 0u);
  EXPECT_LE(s.hints_used + s.hints_wasted, s.hints_issued);
  EXPECT_EQ(leaked_slots(experts), 0u);
  // Off: nothing is foretold.
  store::StreamingStore other(m.binding.experts, m.names(), m.streaming(24, 8));
  m.logits(other, tokens, 0, 8, Prefetch::Off, &s);
  EXPECT_EQ(s.predicted + s.hints_issued + s.prefetch_steps_on, 0u);
}

// A hint takes nothing that is pinned, still loading, or was loaded just now, and nothing worth more than itself.
TEST(StreamingPrefetch, HintsTakeNoSlotInUse) {
  const Loaded m(fixtures() / "qwen3_5_moe-bf16");
  store::StreamingStore experts(m.binding.experts, m.names(), m.streaming(3, 3));
  const std::vector<ExpertIdx> first{ExpertIdx{0}, ExpertIdx{1}, ExpertIdx{2}}, other{ExpertIdx{5}};
  experts.visit(LayerIdx{0}, first, {}, 1);
  {
    store::ExpertLease lease = experts.acquire(LayerIdx{0}, first);
    for (std::size_t i = 0; i < 3; ++i) lease.wait(i);
    experts.hint(LayerIdx{1}, other, 1.0f);
    EXPECT_EQ(experts.stats().hints_issued, 0u) << "all pinned";
  }
  experts.hint(LayerIdx{1}, other, 1.0f);
  EXPECT_EQ(experts.stats().hints_issued, 0u) << "all loaded just now";
  experts.visit(LayerIdx{1}, other, {}, 1);
  experts.visit(LayerIdx{2}, other, {}, 1);
  experts.hint(LayerIdx{3}, other, 0.0f);
  EXPECT_EQ(experts.stats().hints_issued, 0u) << "worth nothing";
  experts.hint(LayerIdx{3}, other, 1.0f);
  EXPECT_EQ(experts.stats().hints_issued, 1u);
  EXPECT_EQ(leaked_slots(experts), 0u);
}

store::StreamingOptions faulty(const Loaded& m, std::size_t slots, const Fault& fault) {
  store::StreamingOptions o = m.streaming(slots, 3);
  o.make_reader = [&m, fault](const io::MemoryRegions& regions) {
    auto reader = std::make_unique<FaultReader>(io::make_reader(m.files, regions, {}));
    reader->add(fault);
    return reader;
  };
  return o;
}

TEST(StreamingFaults, OneFailedReadIsRetriedAndChangesNothing) {
  const Loaded m(fixtures() / "qwen3_5_moe-mlx4");
  const auto tokens = golden_tokens("qwen3_5_moe-mlx4");
  Fault fault;
  fault.error = EIO;
  fault.times = 1;
  store::StreamingStore experts(m.binding.experts, m.names(), faulty(m, 8, fault));
  EXPECT_EQ(m.logits(experts, tokens, 0, 10), m.resident(tokens));
}

TEST(StreamingFaults, AReadThatKeepsFailingNamesFileLayerAndExpert) {
  const Loaded m(fixtures() / "qwen3_5_moe-bf16");
  const auto tokens = golden_tokens("qwen3_5_moe-bf16");
  Fault fault;
  fault.error = EIO;
  fault.times = -1;
  store::StreamingStore experts(m.binding.experts, m.names(), faulty(m, 8, fault));
  expect_error([&] { m.logits(experts, tokens, 0, tokens.size()); }, ErrorCode::Io, {"model.safetensors", "layer 0", "expert", "offset"});
  EXPECT_EQ(leaked_slots(experts), 0u);
}

// The real thing: the file is cut while the model runs. Another store on an intact copy goes on.
TEST(StreamingFaults, AFileCutWhileRunning) {
  const TempDir dir;
  copy_configs(fixtures() / "qwen3_5_moe-bf16", dir.path());
  fs::copy_file(fixtures() / "qwen3_5_moe-bf16/model.safetensors", dir / "model.safetensors");
  const Loaded m(dir.path());
  const auto tokens = golden_tokens("qwen3_5_moe-bf16");
  store::StreamingStore experts(m.binding.experts, m.names(), m.streaming(4, 3));
  m.logits(experts, std::span(tokens).first(2), 0, 2);
  fs::resize_file(dir / "model.safetensors", 300000);
  expect_error([&] { m.logits(experts, tokens, 0, tokens.size()); }, ErrorCode::Io, {"model.safetensors", "layer", "expert", "ends early"});
  EXPECT_EQ(leaked_slots(experts), 0u);
  fs::copy_file(fixtures() / "qwen3_5_moe-bf16/model.safetensors", dir / "model.safetensors", fs::copy_options::overwrite_existing);
  EXPECT_EQ(m.logits(experts, tokens, 0, tokens.size()), m.resident(tokens));  // whole again: the store goes on
}

// Another file under the same name while the model runs: the open one is read on, nothing changes. Overwritten in place by
// something shorter: an error. Neither stops the process.
TEST(StreamingFaults, AFileReplacedWhileRunning) {
  const TempDir dir;
  copy_configs(fixtures() / "qwen3_5_moe-bf16", dir.path());
  fs::copy_file(fixtures() / "qwen3_5_moe-bf16/model.safetensors", dir / "model.safetensors");
  const Loaded m(dir.path());
  const auto tokens = golden_tokens("qwen3_5_moe-bf16");
  const auto want = m.resident(tokens);
  store::StreamingStore experts(m.binding.experts, m.names(), m.streaming(4, 3));
  fs::rename(dir / "model.safetensors", dir / "old");
  std::ofstream(dir / "model.safetensors") << "not a model";
  EXPECT_EQ(m.logits(experts, tokens, 0, tokens.size()), want);
  std::ofstream(dir / "old", std::ios::trunc) << "not a model either";
  expect_error([&] { m.logits(experts, tokens, 0, tokens.size()); }, ErrorCode::Io, {"model.safetensors", "layer", "expert", "ends early"});
  EXPECT_EQ(leaked_slots(experts), 0u);
}

TEST(StreamingStore, TooFewSlotsAreRefused) {
  const Loaded m(fixtures() / "qwen3_5_moe-bf16");
  expect_error([&] { store::StreamingStore(m.binding.experts, m.names(), m.streaming(2, 3)); }, ErrorCode::InvalidArgument, {"2 expert slots", "3"});
}

// Through the engine: a ceiling that holds some experts, one too low, and what it says.
TEST(StreamingEngine, MemoryCeiling) {
  const auto tokens = some_prompt();
  const auto want = run(demo_model(), tokens, {.precision = Precision::Fast}).logits;
  EngineOptions o;
  o.model = demo_model();
  o.n_threads = 2;
  o.planned = {.ctx_size = 256, .chunk_size = 16};
  o.ram_bytes = 1;
  try {
    Engine::open(o);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::OutOfMemory);
    EXPECT_NE(std::string(e.what()).find("at least"), std::string::npos) << e.what();
  }
  // What this process takes is not known here, and sanitizers make it vary: go up where nothing fits and down where all does.
  std::unique_ptr<Engine> engine;
  o.ram_bytes = 40'000'000;
  for (int i = 0; i < 1000 && engine == nullptr; ++i) {
    try {
      auto opened = Engine::open(o);
      if (opened->memory().all_in_memory)
        o.ram_bytes -= 700'000;
      else
        engine = std::move(opened);
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), ErrorCode::OutOfMemory) << e.what();
      o.ram_bytes += 1'000'000;
    }
  }
  ASSERT_NE(engine, nullptr);
  EXPECT_NE(engine->experts_description().find("streamed"), std::string::npos) << engine->experts_description();
  const auto session = engine->create_session(o.planned);
  std::vector<float> got;
  EvaluateOptions e;
  e.on_logits = [&](std::int64_t, std::span<const float> l) { got.insert(got.end(), l.begin(), l.end()); };
  session->evaluate(tokens, e);
  EXPECT_EQ(got, want);
  EXPECT_GT(session->stats().bytes_read, 0u);
}

}  // namespace
}  // namespace moeflux::test
