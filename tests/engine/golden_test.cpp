// Every registered family against the expected values of an independent implementation.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "model/family.h"
#include "support/evaluate.h"
#include "support/tensor_file.h"

namespace moeflux::test {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> golden_folders(const std::string& family) {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(fixtures()))
    if (entry.path().filename().string().starts_with(family + "-") && fs::exists(entry.path() / "golden.safetensors"))
      out.push_back(entry.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

// "-bf16" folders hold plain weights, "-mlx4" quantized ones.
std::vector<std::string> goldens(const std::string& suffix = "") {
  std::vector<std::string> out;
  for (const model::Family* f : model::all_families())
    for (const std::string& g : golden_folders(std::string(f->name)))
      if (g.ends_with(suffix)) out.push_back(g);
  return out;
}

TEST(Registry, EveryFamilyHasAGolden) {
  ASSERT_FALSE(model::all_families().empty());
  for (const model::Family* f : model::all_families()) EXPECT_FALSE(golden_folders(std::string(f->name)).empty()) << f->name;
}

class Golden : public testing::TestWithParam<std::string> {
 protected:
  fs::path folder() const { return fixtures() / GetParam(); }
  static std::int64_t context(const TensorFile& g) { return static_cast<std::int64_t>(g.ints("tokens").size() + g.ints("greedy").size()) + 8; }
  TensorFile golden() const { return TensorFile::load(folder() / "golden.safetensors"); }
};

// Fixtures with a long prompt keep the values of its last positions only.
std::span<const float> last(const std::vector<float>& all, std::size_t n) { return std::span(all).last(std::min(n, all.size())); }

TEST_P(Golden, ExactLogitsAndHiddenStates) {
  const TensorFile g = golden();
  const auto tokens = to_tokens(g.ints("tokens"));
  for (const bool decode : {false, true}) {
    const RunResult r = run(folder(), tokens, {.decode = decode, .hidden = true});
    EXPECT_LE(max_abs_difference(last(r.logits, g.floats("logits").size()), g.floats("logits")), 2e-3) << "decode " << decode;
    std::int64_t n_hidden = 0;
    for (; g.tensors.contains("hidden." + std::to_string(n_hidden)); ++n_hidden) {
      const std::string name = "hidden." + std::to_string(n_hidden);
      ASSERT_TRUE(r.hidden.contains(n_hidden)) << n_hidden;
      EXPECT_LE(relative_difference(last(r.hidden.at(n_hidden), g.floats(name).size()), g.floats(name)), 1e-3) << name;
    }
    EXPECT_EQ(static_cast<std::int64_t>(r.hidden.size()), n_hidden);
    EXPECT_GE(n_hidden, 2);
  }
}

TEST_P(Golden, GreedyContinuation) {
  const TensorFile g = golden();
  const auto engine = open_engine(folder(), {});
  const auto session = engine->create_session({.ctx_size = context(g)});
  const auto want = g.ints("greedy");
  const auto margins = g.floats("greedy_margin");
  session->prefill(to_tokens(g.ints("tokens")));
  for (std::size_t i = 0; i < want.size(); ++i) {
    const auto logits = session->logits();
    const auto best = static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    if (margins[i] > 4e-3f) {  // twice the error allowed for a logit
      ASSERT_EQ(best, want[i]) << "step " << i;
    }
    session->step(TokenId(want[i]));
  }
}

// The generator's own greedy loop.
TEST_P(Golden, GenerateIsGreedyAtTemperatureZero) {
  const TensorFile g = golden();
  const auto margins = g.floats("greedy_margin");
  // Compared up to the first step that is too close to call.
  const auto close = std::find_if(margins.begin(), margins.end(), [](float m) { return m < 4e-3f; });
  const auto n_sure = static_cast<std::size_t>(close - margins.begin());
  const auto engine = open_engine(folder(), {});
  const auto session = engine->create_session({.ctx_size = context(g)});
  std::vector<std::int32_t> got;
  GenerateOptions o;
  o.max_tokens = static_cast<std::int64_t>(g.ints("greedy").size());
  o.sampling.temperature = 0.0;
  o.ignore_stop = true;
  o.on_token = [&](TokenId t, std::string_view) {
    got.push_back(raw(t));
    return true;
  };
  session->generate(to_tokens(g.ints("tokens")), o);
  auto want = g.ints("greedy");
  ASSERT_EQ(got.size(), want.size());
  got.resize(n_sure);
  want.resize(n_sure);
  EXPECT_GT(n_sure, 0u);
  EXPECT_EQ(got, want);
}

class QuantizedGolden : public Golden {};

TEST_P(QuantizedGolden, FastLogits) {
  const TensorFile g = golden();
  const auto want = g.floats("logits_fast");
  const auto stable = g.ints("fast_stable");
  const auto vocab = static_cast<std::size_t>(g.at("logits_fast").shape[1]);
  const RunResult r = run(folder(), to_tokens(g.ints("tokens")), {.precision = Precision::Fast});
  ASSERT_EQ(r.logits.size(), want.size());
  int n_stable = 0, n_good = 0;
  for (std::size_t t = 0; t < stable.size(); ++t) {
    if (stable[t] != 1) continue;
    ++n_stable;
    const std::span<const float> got(&r.logits[t * vocab], vocab), expected(&want[t * vocab], vocab);
    n_good += cosine(got, expected) >= 0.99999 ? 1 : 0;
  }
  EXPECT_GT(n_stable, 0);
  EXPECT_GE(n_good * 10, n_stable * 9) << n_good << " of " << n_stable;
}

// Plain weights see f32 activations in both precisions.
class PlainGolden : public Golden {};

TEST_P(PlainGolden, FastEqualsExact) {
  const auto tokens = to_tokens(golden().ints("tokens"));
  EXPECT_EQ(run(folder(), tokens, {.precision = Precision::Fast}).logits, run(folder(), tokens, {}).logits);
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Golden, testing::ValuesIn(goldens()), test_name);
INSTANTIATE_TEST_SUITE_P(Fixtures, PlainGolden, testing::ValuesIn(goldens("-bf16")), test_name);
INSTANTIATE_TEST_SUITE_P(Fixtures, QuantizedGolden, testing::ValuesIn(goldens("-mlx4")), test_name);

TensorFile demo_golden() { return TensorFile::load(fixtures() / "demo-golden/golden.safetensors"); }

TEST(Demo, ExactLogits) {
  const TensorFile g = demo_golden();
  EXPECT_LE(max_abs_difference(run(demo_model(), to_tokens(g.ints("tokens")), {}).logits, g.floats("logits")), 2e-3);
}

TEST(Demo, SixtyFourGreedyTokens) {
  const TensorFile g = demo_golden();
  const auto engine = open_engine(demo_model(), {});
  const auto session = engine->create_session({});
  std::vector<std::int32_t> got;
  GenerateOptions o;
  o.max_tokens = 64;
  o.sampling.temperature = 0.0;
  o.ignore_stop = true;
  o.on_token = [&](TokenId t, std::string_view) {
    got.push_back(raw(t));
    return true;
  };
  session->generate(to_tokens(g.ints("greedy_prompt")), o);
  const auto want = g.ints("greedy");
  const auto margins = g.floats("greedy_margin");
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(got[i], want[i]) << "step " << i << ", margin " << margins[i];
  }
}

}  // namespace
}  // namespace moeflux::test
