// The demo model's perplexity over held-out text.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/json.h"
#include "support/evaluate.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::test {
namespace {

namespace fs = std::filesystem;

// The protocol of golden_ppl.json over text that is not part of this repository.
double demo_perplexity(Precision precision) {
  const TensorFile ids = TensorFile::load(fs::path(MOEFLUX_SOURCE_DIR) / "../shared/fixtures/demo-golden/val_tokens.safetensors");
  const auto tokens = to_tokens(ids.ints("val_tokens"));
  const auto engine = open_engine(demo_model(), {.precision = precision});
  const auto session = engine->create_session({.ctx_size = 1024});
  double total = 0.0;
  const std::size_t windows = (tokens.size() - 1) / 1024;
  for (std::size_t w = 0; w < windows; ++w) {
    session->reset();
    double window = 0.0;
    EvaluateOptions e;
    e.on_logits = [&](std::int64_t position, std::span<const float> l) {
      const float top = *std::max_element(l.begin(), l.end());
      double sum = 0.0;
      for (float x : l) sum += std::exp(static_cast<double>(x) - static_cast<double>(top));
      const auto target = static_cast<std::size_t>(raw(tokens[w * 1024 + static_cast<std::size_t>(position) + 1]));
      window += std::log(sum) + static_cast<double>(top) - static_cast<double>(l[target]);
    };
    session->evaluate(std::span(tokens).subspan(w * 1024, 1024), e);
    total += window / 1024.0;
  }
  return std::exp(total / static_cast<double>(windows));
}

TEST(DemoPerplexity, ExactAndFast) {
  if (!fs::exists(fs::path(MOEFLUX_SOURCE_DIR) / "../shared/fixtures/demo-golden/val_tokens.safetensors"))
    GTEST_SKIP() << "the held-out text is not here (../shared)";
  const double want = parse_json(slurp(fixtures() / "demo-golden/golden_ppl.json"), "golden_ppl.json")["val_ppl"].get<double>();
  EXPECT_NEAR(demo_perplexity(Precision::Exact), want, want * 0.0005);
  EXPECT_NEAR(demo_perplexity(Precision::Fast), want, want * 0.003);
}

}  // namespace
}  // namespace moeflux::test
