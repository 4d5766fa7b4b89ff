// Same bytes of logits, whatever the threads, the chunks, prefill or decode, the instruction set, the neighbours.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "backend/cpu/cpu_backend.h"
#include "support/evaluate.h"
#include "support/tensor_file.h"

namespace moeflux::test {
namespace {

struct Case {
  std::string model;
  Precision precision;
};

class Determinism : public testing::TestWithParam<Case> {
 protected:
  std::filesystem::path folder() const { return GetParam().model == "demo" ? demo_model() : fixtures() / GetParam().model; }
  std::vector<TokenId> tokens() const {
    const auto golden = GetParam().model == "demo" ? fixtures() / "demo-golden/golden.safetensors" : folder() / "golden.safetensors";
    auto ids = to_tokens(TensorFile::load(golden).ints("tokens"));
    ids.resize(std::min<std::size_t>(ids.size(), 150));
    return ids;
  }
  RunOptions options() const { return {.precision = GetParam().precision}; }
};

TEST_P(Determinism, ThreadsChunksAndDecode) {
  const auto ids = tokens();
  const auto want = run(folder(), ids, options()).logits;
  for (const int threads : {1, 2, 5}) {
    RunOptions o = options();
    o.n_threads = threads;
    const auto engine = open_engine(folder(), o);
    for (const std::int64_t chunk : {1, 7, 64, 1024}) {
      o.chunk = chunk;
      EXPECT_EQ(run(*engine, ids, o).logits, want) << threads << " threads, chunks of " << chunk;
    }
    o.decode = true;
    EXPECT_EQ(run(*engine, ids, o).logits, want) << threads << " threads, decode";
    EXPECT_EQ(run(*engine, ids, o).logits, want) << "the second time";
  }
}

TEST_P(Determinism, EveryInstructionSet) {
  const auto ids = tokens();
  const auto want = run(folder(), ids, options()).logits;
  for (const std::string& isa : backend::supported_isas()) {
    RunOptions o = options();
    o.isa = isa;
    EXPECT_EQ(run(folder(), ids, o).logits, want) << isa;
  }
}

TEST_P(Determinism, HalfPrecisionCacheToo) {
  const auto ids = tokens();
  RunOptions o = options();
  o.kv = KvType::F16;
  const auto want = run(folder(), ids, o).logits;
  o.n_threads = 5;
  o.chunk = 7;
  EXPECT_EQ(run(folder(), ids, o).logits, want);
  o.decode = true;
  EXPECT_EQ(run(folder(), ids, o).logits, want);
}

// Two engines and two sessions of one engine at the same time.
TEST_P(Determinism, NeighboursDoNotDisturb) {
  const auto ids = tokens();
  const auto want = run(folder(), ids, options()).logits;
  const auto a = open_engine(folder(), options()), b = open_engine(folder(), options());
  std::vector<std::vector<float>> got(3);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      RunOptions o = options();
      o.chunk = static_cast<std::int64_t>(5 + i);
      got[i] = run(i == 2 ? *b : *a, ids, o).logits;
    });
  for (std::thread& t : threads) t.join();
  for (const auto& g : got) EXPECT_EQ(g, want);
}

// Every fixture in exact precision, and in fast precision where that differs.
std::vector<Case> cases() {
  std::vector<Case> out{{"demo", Precision::Exact}, {"demo", Precision::Fast}};
  for (const auto& entry : std::filesystem::directory_iterator(fixtures())) {
    const std::string name = entry.path().filename().string();
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    out.push_back({name, Precision::Exact});
    if (!name.ends_with("-bf16")) out.push_back({name, Precision::Fast});
  }
  std::sort(out.begin(), out.end(), [](const Case& a, const Case& b) { return std::pair(a.model, a.precision) < std::pair(b.model, b.precision); });
  return out;
}

INSTANTIATE_TEST_SUITE_P(Models, Determinism, testing::ValuesIn(cases()),
                         [](const auto& test) {
                           std::string name = test.param.model + (test.param.precision == Precision::Fast ? "_fast" : "_exact");
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moeflux::test
