// Synthetic models route as their skew says: how many experts a token shares with the one before it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>

#include "backend/cpu/cpu_backend.h"
#include "format/model_folder.h"
#include "model/binder.h"
#include "model/family.h"
#include "model/model.h"
#include "session/session.h"
#include "store/resident_store.h"
#include "support/temp_dir.h"

namespace moeflux::test {
namespace {

// Notes the experts of every acquire.
class RecordingStore final : public store::ExpertStore {
 public:
  explicit RecordingStore(store::ExpertStore& inner) : inner_(inner) {}

  void visit(LayerIdx, std::span<const ExpertIdx>, std::span<const std::uint32_t>, std::uint32_t) noexcept override {}
  void hint(LayerIdx, std::span<const ExpertIdx>, float) noexcept override {}
  std::size_t scan_batch() const noexcept override { return inner_.scan_batch(); }
  std::size_t max_lease() const noexcept override { return inner_.max_lease(); }
  store::StoreStats stats() const noexcept override { return inner_.stats(); }

  std::map<int, std::vector<std::vector<ExpertIdx>>> chosen;  // layer -> token -> experts, sorted

 protected:
  std::uint32_t pin(LayerIdx layer, std::span<const ExpertIdx> experts) override {
    std::vector<ExpertIdx> sorted(experts.begin(), experts.end());
    std::sort(sorted.begin(), sorted.end());
    chosen[raw(layer)].push_back(std::move(sorted));
    leases_[next_] = inner_.acquire(layer, experts);
    return next_++;
  }
  bool try_pin(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket) override {
    ticket = pin(layer, experts);
    return true;
  }
  bool ready(std::uint32_t ticket, std::size_t i) noexcept override { return leases_.at(ticket).ready(i); }
  bool hit(std::uint32_t ticket, std::size_t i) noexcept override { return leases_.at(ticket).hit(i); }
  store::ExpertView wait(std::uint32_t ticket, std::size_t i) override { return leases_.at(ticket).wait(i); }
  void unpin(std::uint32_t ticket) noexcept override { leases_.erase(ticket); }

 private:
  store::ExpertStore& inner_;
  std::map<std::uint32_t, store::ExpertLease> leases_;
  std::uint32_t next_ = 0;
};

struct Routing {
  double overlap = 0;  // share of a token's experts that the token before had too
  double top_quarter = 0;  // share of all requests that go to each layer's most wanted quarter
  bool finite = true;      // all logits
};

double overlap(const std::vector<std::vector<ExpertIdx>>& tokens) {
  double sum = 0;
  for (std::size_t t = 1; t < tokens.size(); ++t) {
    std::vector<ExpertIdx> common;
    std::set_intersection(tokens[t].begin(), tokens[t].end(), tokens[t - 1].begin(), tokens[t - 1].end(),
                          std::back_inserter(common));
    sum += static_cast<double>(common.size()) / static_cast<double>(tokens[t].size());
  }
  return sum / static_cast<double>(tokens.size() - 1);
}

double top_quarter(const std::vector<std::vector<ExpertIdx>>& tokens, std::int64_t n_experts) {
  std::vector<double> counts(static_cast<std::size_t>(n_experts));
  double total = 0;
  for (const auto& experts : tokens) {
    for (const ExpertIdx e : experts) counts[static_cast<std::size_t>(raw(e))] += 1;
    total += static_cast<double>(experts.size());
  }
  std::sort(counts.rbegin(), counts.rend());
  double top = 0;
  for (std::size_t i = 0; i < counts.size() / 4; ++i) top += counts[i];
  return top / total;
}

Routing measure(const std::filesystem::path& path, int n_tokens) {
  const format::ModelFolder folder = format::ModelFolder::open(path);
  const model::ParsedModel parsed = model::parse_model(folder);
  const model::Binding binding = model::bind(folder, parsed.spec, parsed.names);
  binding.require_complete(folder);
  const auto backend = backend::make_cpu_backend({});
  const model::Model model(parsed.spec, binding, folder, *backend, {});
  store::ResidentStore resident(binding.experts, folder, backend->allocator(), backend->copier(), {});
  RecordingStore store(resident);
  SessionOptions options;
  options.ctx_size = n_tokens;
  session::Session session({model, store, *backend, Precision::Fast}, options);
  std::mt19937_64 random(1);
  Routing routing;
  for (int i = 0; i < n_tokens; ++i) {
    session.step(TokenId(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(parsed.spec.vocab_size))));
    for (const float logit : session.logits()) routing.finite = routing.finite && std::isfinite(logit);
  }
  for (const auto& [layer, tokens] : store.chosen) {
    const std::int64_t n_experts = binding.experts.layers[static_cast<std::size_t>(layer)].n_experts;
    routing.overlap += overlap(tokens) / static_cast<double>(store.chosen.size());
    routing.top_quarter += top_quarter(tokens, n_experts) / static_cast<double>(store.chosen.size());
  }
  return routing;
}

Routing measure_skew(const TempDir& dir, const std::string& skew) {
  const std::filesystem::path out = dir.path() / ("skew" + skew);
  const std::string command = std::string(MOEFLUX_COMMAND) + " synth --shape tiny --skew " + skew + " --out '" +
                              out.string() + "' > /dev/null 2>&1";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  return measure(out, 200);
}

TEST(RoutingOverlap, FollowsTheSkew) {
  const TempDir dir;
  const Routing none = measure_skew(dir, "0"), two = measure_skew(dir, "2"), six = measure_skew(dir, "6");
  EXPECT_TRUE(none.finite && two.finite && six.finite);
  // 4 of 64 experts: uniform choice shares 6 %.
  EXPECT_GT(none.overlap, 0.04);
  EXPECT_LT(none.overlap, 0.12);
  EXPECT_GT(two.overlap, 0.14);
  EXPECT_LT(two.overlap, 0.26);
  EXPECT_GT(two.top_quarter, none.top_quarter + 0.15);
  EXPECT_GT(six.overlap, 0.40);
}

// By hand, for models too large for a suite: prints the figures of the folder named by MOEFLUX_ROUTING_MODEL.
TEST(RoutingOverlap, OfAModel) {
  const char* model = std::getenv("MOEFLUX_ROUTING_MODEL");
  if (model == nullptr) GTEST_SKIP() << "MOEFLUX_ROUTING_MODEL names no model";
  const Routing routing = measure(model, 200);
  std::printf("overlap %.3f, top quarter %.3f\n", routing.overlap, routing.top_quarter);
  EXPECT_TRUE(routing.finite);
}

}  // namespace
}  // namespace moeflux::test
