// Recorded routing comes back as it was; replayed routing is what the trace says.
#include "engine/routing_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "support/evaluate.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::engine {
namespace {

namespace fs = std::filesystem;
using test::TempDir;

fs::path write(const TempDir& dir, const std::string& text) {
  const fs::path path = dir / "trace.jsonl";
  std::ofstream(path) << text;
  return path;
}

std::vector<std::int32_t> choose(const RoutingReplay& r, std::int64_t position, std::int64_t layer, std::int64_t n_experts, std::size_t k) {
  std::vector<std::int32_t> ids(k, -1);
  r.choose(position, layer, n_experts, ids);
  return ids;
}

TEST(RoutingReplay, SameShapeIsTakenAsItIs) {
  const TempDir dir;
  const RoutingReplay r(store::RoutingTrace::read(write(dir, R"({"model":"m","n_experts":8}
{"phase":"prefill","layers":[[1,2],[3,4],[5,6]]}
{"phase":"decode","layers":[[7,0],[6,5],[4,3]]}
)")));
  EXPECT_EQ(choose(r, 0, 0, 8, 2), (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(choose(r, 0, 2, 8, 2), (std::vector<std::int32_t>{5, 6}));
  EXPECT_EQ(choose(r, 1, 1, 8, 2), (std::vector<std::int32_t>{6, 5}));
  EXPECT_EQ(choose(r, 2, 0, 8, 2), choose(r, 0, 0, 8, 2)) << "from the start again";
  EXPECT_EQ(choose(r, 0, 3, 8, 2), choose(r, 0, 0, 8, 2)) << "more layers than the trace";
}

TEST(RoutingReplay, MoreExpertsComeFromMoreLayers) {
  const TempDir dir;
  const RoutingReplay r(store::RoutingTrace::read(write(dir, R"({"model":"m","n_experts":8}
{"phase":"decode","layers":[[1,2],[3,4],[5,6],[7,0]]}
)")));
  // Twice the experts: ranks of layers 0 and 2 in turn, the second in the upper half of the ids.
  EXPECT_EQ(choose(r, 0, 0, 16, 4), (std::vector<std::int32_t>{1, 13, 2, 14}));
  // More ranks than the trace has: further layers fill up.
  EXPECT_EQ(choose(r, 0, 0, 8, 3), (std::vector<std::int32_t>{1, 2, 3}));
}

TEST(RoutingReplay, AlwaysDistinctAndInRange) {
  const TempDir dir;
  const RoutingReplay r(store::RoutingTrace::read(write(dir, R"({"model":"m","n_experts":64}
{"phase":"decode","layers":[[1,33,17],[0,63,2]]}
{"phase":"decode","layers":[[5]]}
)")));
  for (std::int64_t position : {0, 1})
    for (std::int64_t n : {4, 16, 64, 100, 300})
      for (std::size_t k : {1u, 4u}) {
        const auto ids = choose(r, position, 5, n, k);
        EXPECT_EQ(std::set<std::int32_t>(ids.begin(), ids.end()).size(), k);
        for (std::int32_t id : ids) EXPECT_TRUE(id >= 0 && id < n) << id;
      }
}

// A run of the demo model, recorded; the recording replayed on the same model changes nothing.
TEST(RoutingFiles, RecordAndReplay) {
  const TempDir dir;
  EngineOptions o;
  o.model = test::demo_model();
  o.n_threads = 1;
  const auto engine = Engine::open(o);
  std::vector<TokenId> tokens;
  for (int i = 0; i < 12; ++i) tokens.push_back(TokenId(100 + 7 * i));
  const auto run = [&](const SessionOptions& options) {
    const auto session = engine->create_session(options);
    session->prefill(std::span(tokens).first(5));
    for (TokenId t : std::span(tokens).subspan(5)) session->step(t);
    session->finish_trace();
    return session->stats().logits_hash;
  };
  SessionOptions record, replay, other;
  record.trace = dir / "a.jsonl";
  record.chunk_size = 3;
  replay.replay = dir / "a.jsonl";
  replay.trace = dir / "b.jsonl";
  replay.chunk_size = 3;
  const std::uint64_t hash = run(record);
  const store::RoutingTrace trace = store::RoutingTrace::read(record.trace);
  ASSERT_EQ(trace.n_steps(), tokens.size());
  EXPECT_EQ(trace.n_experts(), engine->info().n_experts);
  EXPECT_EQ(static_cast<std::int64_t>(trace.n_layers(0)), engine->info().n_moe_layers);
  EXPECT_EQ(trace.phase(4), store::TracePhase::Prefill);
  EXPECT_EQ(trace.phase(5), store::TracePhase::Decode);
  EXPECT_EQ(run(replay), hash);
  std::ifstream a(dir / "a.jsonl"), b(dir / "b.jsonl");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(a), {}), std::string(std::istreambuf_iterator<char>(b), {}));
  // Another choice gives other logits: the replay is really used.
  std::string head = R"({"model":"m","n_experts":)" + std::to_string(trace.n_experts()) + "}\n{\"phase\":\"decode\",\"layers\":[";
  for (std::size_t l = 0; l < trace.n_layers(0); ++l) head += l == 0 ? "[0,1,2,3]" : ",[0,1,2,3]";
  other.replay = write(dir, head + "]}\n");
  EXPECT_NE(run(other), hash);
}

TEST(RoutingFiles, WithoutFinishThereIsNoFile) {
  const TempDir dir;
  EngineOptions o;
  o.model = test::demo_model();
  o.n_threads = 1;
  const auto engine = Engine::open(o);
  SessionOptions options;
  options.trace = dir / "a.jsonl";
  engine->create_session(options)->step(TokenId{5});
  EXPECT_FALSE(fs::exists(options.trace));
  options.trace.clear();
  options.replay = dir / "none.jsonl";
  test::expect_error([&] { engine->create_session(options); }, ErrorCode::Io, {"none.jsonl"});
}

}  // namespace
}  // namespace moeflux::engine
