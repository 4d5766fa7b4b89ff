// Whole models on a device: the goldens, the CPU's bytes, the same bytes however a prompt is cut. Skipped where there is
// no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "backend/check_backend.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cuda_backend.h"
#include "backend/hosted_backend.h"
#include "engine/tier_setup.h"
#include "model/family.h"
#include "session/session.h"
#include "store/resident_store.h"
#include "support/evaluate.h"
#include "support/tensor_file.h"

namespace moeflux::test {
namespace {

namespace fs = std::filesystem;

#define MOEFLUX_NEEDS_DEVICE() \
  if (backend::count_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device here (or a build without CUDA): no model was run on one"

std::vector<std::string> goldens() {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(fixtures()))
    if (fs::exists(entry.path() / "golden.safetensors") && fs::exists(entry.path() / "config.json")) out.push_back(entry.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

std::unique_ptr<Engine> open_on(BackendKind kind, const fs::path& model, Precision precision) {
  EngineOptions o;
  o.model = model;
  o.n_threads = 2;
  o.precision = precision;
  o.backend = kind;
  return Engine::open(o);
}

class CudaModel : public testing::TestWithParam<std::string> {
 protected:
  fs::path folder() const { return fixtures() / GetParam(); }
  TensorFile golden() const { return TensorFile::load(folder() / "golden.safetensors"); }
};

void expect_same(const RunResult& got, const RunResult& want, const std::string& what) {
  for (const auto& [layer, rows] : want.hidden) {
    if (got.hidden.at(layer) == rows) continue;
    ADD_FAILURE() << what << ": hidden state after layer " << layer << " differs by " << max_abs_difference(got.hidden.at(layer), rows);
    return;
  }
  EXPECT_EQ(max_abs_difference(got.logits, want.logits), 0.0) << what;
}

TEST_P(CudaModel, ExactLogits) {
  MOEFLUX_NEEDS_DEVICE();
  const TensorFile g = golden();
  const auto engine = open_on(BackendKind::Cuda, folder(), Precision::Exact);
  const auto want = g.floats("logits");
  for (const bool decode : {false, true}) {
    const RunResult r = run(*engine, to_tokens(g.ints("tokens")), {.decode = decode});
    const auto last = std::span(r.logits).last(std::min(want.size(), r.logits.size()));
    EXPECT_LE(max_abs_difference(last, want), 5e-3) << "decode " << decode;
  }
}

TEST_P(CudaModel, FastLogits) {
  MOEFLUX_NEEDS_DEVICE();
  const TensorFile g = golden();
  if (!g.tensors.contains("logits_fast")) GTEST_SKIP() << "this fixture has no fast values";
  const auto want = g.floats("logits_fast");
  const auto stable = g.ints("fast_stable");
  const auto vocab = static_cast<std::size_t>(g.at("logits_fast").shape[1]);
  const RunResult r = run(*open_on(BackendKind::Cuda, folder(), Precision::Fast), to_tokens(g.ints("tokens")), {});
  ASSERT_EQ(r.logits.size(), want.size());
  int n_stable = 0, n_good = 0;
  for (std::size_t t = 0; t < stable.size(); ++t) {
    if (stable[t] != 1) continue;
    ++n_stable;
    n_good += cosine(std::span(&r.logits[t * vocab], vocab), std::span(&want[t * vocab], vocab)) >= 0.99999 ? 1 : 0;
  }
  EXPECT_GT(n_stable, 0);
  EXPECT_GE(n_good * 10, n_stable * 9) << n_good << " of " << n_stable;
}

TEST_P(CudaModel, EqualsCpu) {
  MOEFLUX_NEEDS_DEVICE();
  const auto tokens = to_tokens(golden().ints("tokens"));
  for (const Precision precision : {Precision::Exact, Precision::Fast}) {
    const auto cpu = open_on(BackendKind::Cpu, folder(), precision), cuda = open_on(BackendKind::Cuda, folder(), precision);
    const std::string which = precision == Precision::Exact ? "exact" : "fast";
    for (const KvType kv : {KvType::F32, KvType::F16}) {
      const RunResult want = run(*cpu, tokens, {.hidden = true, .kv = kv});
      expect_same(run(*cuda, tokens, {.hidden = true, .kv = kv}), want, which + ", prefill");
      expect_same(run(*cuda, tokens, {.chunk = 7, .hidden = true, .kv = kv}), want, which + ", chunks of 7");
      expect_same(run(*cuda, tokens, {.decode = true, .hidden = true, .kv = kv}), want, which + ", token by token");
    }
  }
}

// Steps that are recorded and replayed give what steps without recording give.
TEST_P(CudaModel, RecordedSteps) {
  MOEFLUX_NEEDS_DEVICE();
  const auto tokens = to_tokens(golden().ints("tokens"));
  const auto engine = open_on(BackendKind::Cuda, folder(), Precision::Fast);
  const RunResult want = run(*engine, tokens, {});
  const std::size_t vocab = want.logits.size() / tokens.size();
  const auto session = engine->create_session({.ctx_size = static_cast<std::int64_t>(tokens.size())});
  for (int pass = 0; pass < 2; ++pass) {
    session->reset();
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      session->step(tokens[t]);
      ASSERT_EQ(max_abs_difference(session->logits(), std::span(want.logits).subspan(t * vocab, vocab)), 0.0) << "pass " << pass << ", step " << t;
    }
  }
}

// Experts in tiers: the CPU's bytes for any share on the device and in main memory, however the prompt is cut.
TEST_P(CudaModel, TiersEqualCpu) {
  MOEFLUX_NEEDS_DEVICE();
  auto tokens = to_tokens(golden().ints("tokens"));
  tokens.resize(std::min<std::size_t>(tokens.size(), 150));
  const RunResult want = run(*open_on(BackendKind::Cpu, folder(), Precision::Fast), tokens, {});
  const format::ModelFolder files = format::ModelFolder::open(folder());
  const model::ParsedModel parsed = model::parse_model(files);
  const model::Binding binding = model::bind(files, parsed.spec, parsed.names);
  EngineOptions o;
  o.model = folder();
  o.backend = BackendKind::Cuda;
  o.planned = {.ctx_size = static_cast<std::int64_t>(tokens.size()), .chunk_size = 64};
  o.ram_bytes = std::uint64_t{64} << 30;
  const MemorySplit all = engine::split_tiers(o, parsed.spec, binding, std::uint64_t{64} << 30, std::uint64_t{2} << 30);
  if (all.n_experts == 0) GTEST_SKIP() << "no experts";
  const auto processor = backend::make_cpu_backend({2, ""});
  for (const std::uint64_t percent : {0u, 25u, 50u})
    for (const auto& [host_percent, reads_pinned] : {std::pair{0u, false}, {30u, true}, {100u, false}, {100u, true}}) {
      o.vram_bytes = all.device.least_bytes + all.n_experts * all.slot_bytes * percent / 100;
      const auto backend = backend::make_cuda_backend({});
      const model::Model model(parsed.spec, binding, files, *backend, {});
      MemorySplit split = engine::split_tiers(o, parsed.spec, binding, o.vram_bytes, std::uint64_t{2} << 30);
      split.n_slots = all.n_experts * host_percent / 100;
      const engine::ExpertSetup setup =
          engine::make_tiered_experts(o, binding, files, split, {backend->allocator(), backend->pinned_allocator(), backend->make_async_copier(), reads_pinned});
      for (const std::int64_t chunk : {64, 7}) {
        for (int pass = 0; pass < 2; ++pass) {
          session::Parts parts{model, *setup.store, *backend, Precision::Fast};
          if (chunk == 7) parts.processor = processor.get(), parts.cpu_experts = CpuExperts::On;
          session::Session session(parts, {.ctx_size = static_cast<std::int64_t>(tokens.size()), .chunk_size = chunk});
          std::vector<float> got;
          EvaluateOptions e;
          e.on_logits = [&](std::int64_t, std::span<const float> l) { got.insert(got.end(), l.begin(), l.end()); };
          session.evaluate(std::span(tokens).first(tokens.size() / 2), e);
          for (const TokenId token : std::span(tokens).subspan(tokens.size() / 2)) session.evaluate({&token, 1}, e);
          ASSERT_EQ(max_abs_difference(got, want.logits), 0.0) << setup.description << ", chunks of " << chunk << ", pass " << pass;
          session.reset();  // and in units
          const std::size_t vocab = want.logits.size() / tokens.size();
          for (std::size_t i = 0; i < tokens.size(); ++i) {
            session.step(tokens[i]);
            ASSERT_EQ(max_abs_difference(session.logits(), std::span(want.logits).subspan(i * vocab, vocab)), 0.0) << setup.description << ", step " << i << " in units, pass " << pass;
          }
        }
      }
    }
}

// Every op of a forward pass on both, judged by itself.
TEST_P(CudaModel, EveryOpChecked) {
  MOEFLUX_NEEDS_DEVICE();
  const auto device = backend::make_cuda_backend({});
  backend::HostedBackend hosted(*device);
  const auto cpu = backend::make_cpu_backend({2, ""});
  backend::CheckBackend check(*cpu, hosted, {.tolerance = 0.0});
  const format::ModelFolder model_folder = format::ModelFolder::open(folder());
  const model::ParsedModel parsed = model::parse_model(model_folder);
  const model::Binding binding = model::bind(model_folder, parsed.spec, parsed.names);
  const model::Model model(parsed.spec, binding, model_folder, check, {});
  store::ResidentStore experts(binding.experts, model_folder, check.allocator(), check.copier(), {});
  for (const Precision precision : {Precision::Exact, Precision::Fast}) {
    session::Session session({model, experts, check, precision}, {.ctx_size = 64});
    const auto tokens = to_tokens(golden().ints("tokens"));
    session.prefill(std::span(tokens).first(std::min<std::size_t>(tokens.size(), 20)));
    session.step(tokens[0]);
  }
  EXPECT_GT(check.n_ops(), 20u);
  EXPECT_EQ(check.n_differences(), 0u) << check.first_difference()->text();
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Fixtures, CudaModel, testing::ValuesIn(goldens()), test_name);

// The demo model over 600 tokens of its own making: more than one tile of keys, all of its experts.
TEST(CudaDemo, EqualsCpu) {
  MOEFLUX_NEEDS_DEVICE();
  std::vector<TokenId> tokens;
  for (int i = 0; i < 600; ++i) tokens.push_back(TokenId(static_cast<std::int32_t>((i * 7919L + i * i) % 3000)));
  for (const Precision precision : {Precision::Exact, Precision::Fast}) {
    const RunResult want = run(*open_on(BackendKind::Cpu, demo_model(), precision), tokens, {});
    const auto cuda = open_on(BackendKind::Cuda, demo_model(), precision);
    EXPECT_EQ(max_abs_difference(run(*cuda, tokens, {}).logits, want.logits), 0.0);
    EXPECT_EQ(max_abs_difference(run(*cuda, tokens, {.chunk = 100}).logits, want.logits), 0.0);
    EXPECT_EQ(max_abs_difference(run(*cuda, tokens, {.decode = true}).logits, want.logits), 0.0);
  }
}

TEST(CudaErrors, ClearWithoutADevice) {
  if (backend::count_cuda_devices() > 0) GTEST_SKIP() << "there is a CUDA device here";
  try {
    open_on(BackendKind::Cuda, demo_model(), Precision::Fast);
    FAIL() << "opened";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::Unsupported);
    EXPECT_NE(std::string(e.what()).find("CUDA"), std::string::npos) << e.what();
  }
}

TEST(CudaErrors, AutoFallsBackToTheCpu) {
  if (backend::count_cuda_devices() > 0) GTEST_SKIP() << "there is a CUDA device here";
  EXPECT_EQ(open_on(BackendKind::Auto, demo_model(), Precision::Fast)->backend_name().substr(0, 3), "cpu");
}

TEST(CudaErrors, TooLittleMemory) {
  MOEFLUX_NEEDS_DEVICE();
  EngineOptions o;
  o.model = demo_model();
  o.backend = BackendKind::Cuda;
  o.vram_bytes = 1 << 20;
  try {
    Engine::open(o);
    FAIL() << "opened";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::OutOfMemory) << e.what();
    EXPECT_NE(std::string(e.what()).find("at least"), std::string::npos) << e.what();
  }
}

// Through the engine: a ceiling for some experts, and auto takes the device all the same.
TEST(CudaDemo, TiersThroughTheEngine) {
  MOEFLUX_NEEDS_DEVICE();
  std::vector<TokenId> tokens;
  for (int i = 0; i < 200; ++i) tokens.push_back(TokenId(static_cast<std::int32_t>((i * 7919L + i * i) % 3000)));
  const RunResult want = run(*open_on(BackendKind::Cpu, demo_model(), Precision::Fast), tokens, {});
  EngineOptions o;
  o.model = demo_model();
  o.backend = BackendKind::Cuda;
  o.planned = {.ctx_size = 200, .chunk_size = 64};
  const std::unique_ptr<Engine> all = Engine::open(o);
  ASSERT_TRUE(all->memory().all_in_memory);
  for (const BackendKind kind : {BackendKind::Cuda, BackendKind::Auto}) {
    o.backend = kind;
    o.vram_bytes = all->memory().ram_bytes - all->memory().expert_bytes / 2;
    const auto engine = Engine::open(o);
    EXPECT_EQ(engine->backend_name().substr(0, 4), "cuda");
    EXPECT_FALSE(engine->memory().all_in_memory);
    EXPECT_LE(engine->memory().device.fixed_bytes() + engine->memory().device.n_slots * engine->memory().device.slot_bytes, o.vram_bytes);
    EXPECT_EQ(max_abs_difference(run(*engine, tokens, {.chunk = 64}).logits, want.logits), 0.0);
    EXPECT_EQ(max_abs_difference(run(*engine, tokens, {.decode = true}).logits, want.logits), 0.0);
  }
}

// The processor computes its share beside the device: none, what is measured to pay, all it may.
TEST(CudaDemo, ProcessorComputesItsShare) {
  MOEFLUX_NEEDS_DEVICE();
  std::vector<TokenId> tokens;
  for (int i = 0; i < 200; ++i) tokens.push_back(TokenId(static_cast<std::int32_t>((i * 7919L + i * i) % 3000)));
  const RunResult want = run(*open_on(BackendKind::Cpu, demo_model(), Precision::Fast), tokens, {});
  const std::size_t vocab = want.logits.size() / tokens.size();
  EngineOptions o;
  o.model = demo_model();
  o.backend = BackendKind::Cuda;
  o.planned = {.ctx_size = 200, .chunk_size = 64};
  const auto all = Engine::open(o);
  o.vram_bytes = all->memory().ram_bytes - all->memory().expert_bytes * 3 / 4;
  for (const CpuExperts share : {CpuExperts::Off, CpuExperts::Auto, CpuExperts::On}) {
    o.cpu_experts = share;
    const auto engine = Engine::open(o);
    const auto session = engine->create_session({.ctx_size = 200, .chunk_size = 64});
    for (int pass = 0; pass < 2; ++pass) {
      session->reset();
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        session->step(tokens[i]);
        ASSERT_EQ(max_abs_difference(session->logits(), std::span(want.logits).subspan(i * vocab, vocab)), 0.0) << "step " << i << ", pass " << pass;
      }
    }
    const SessionStats& s = session->stats();
    if (share == CpuExperts::Off) {
      EXPECT_EQ(s.cpu_experts, 0u);
    } else if (share == CpuExperts::On) {
      EXPECT_GT(s.cpu_experts, 0u);
    }
    EXPECT_LE(s.cpu_experts, s.host_hits);
  }
}

}  // namespace
}  // namespace moeflux::test
