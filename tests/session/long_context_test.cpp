// Tens of thousands of positions with every kind of mixer: the CPU backend against the reference, and what it
// costs.
#include <gtest/gtest.h>
#include <malloc.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/reference/reference_backend.h"
#include "model/binder.h"
#include "model/family.h"
#include "model/planner.h"
#include "session/session.h"
#include "store/resident_store.h"
#include "support/tiny_models.h"

namespace moeflux::test {
namespace {

constexpr std::int64_t kContext = 33000;
constexpr std::int64_t kCompared = 64,
                       kDecoded = 8;  // last positions, and those of them that come one by one

// Attention for the last positions alone: in a model whose only layer it is, nothing that is compared depends
// on the others, and there are half a billion pairs of them.
class LastQueriesOnly final : public backend::Backend {
 public:
  LastQueriesOnly(backend::Backend& inner, std::int64_t first) : inner_(inner), first_(first) {}
  std::string name() const override { return inner_.name(); }
  std::unique_ptr<backend::Stream> create_stream() override { return inner_.create_stream(); }
  void synchronize(backend::Stream& stream) override { inner_.synchronize(stream); }
  Allocator& allocator() noexcept override { return inner_.allocator(); }
  Copier& copier() noexcept override { return inner_.copier(); }

 protected:
#define MOEFLUX_HAND_ON(Op) \
  void execute(backend::Stream& stream, const backend::Op& op) override { hand_on(stream, op); }
  MOEFLUX_FOR_EACH_OP(MOEFLUX_HAND_ON)
#undef MOEFLUX_HAND_ON

 private:
  template <class Op>
  void hand_on(backend::Stream& stream, const Op& op) {
    forward_to(inner_, stream, op);
  }
  void hand_on(backend::Stream& stream, backend::Attention op) {
    const std::int64_t skipped = std::min(std::max<std::int64_t>(first_ - op.pos0, 0), op.q.dim(0));
    if (skipped == op.q.dim(0)) return;
    op.q = op.q.slice(skipped, op.q.dim(0) - skipped);
    op.y = op.y.slice(skipped, op.y.dim(0) - skipped);
    op.pos0 += skipped;
    forward_to(inner_, stream, op);
  }

  backend::Backend& inner_;
  const std::int64_t first_;
};

// A folder's model on a backend.
struct Loaded {
  format::ModelFolder folder;
  model::ParsedModel parsed;
  model::Binding binding;
  model::Model model;
  store::ResidentStore experts;
  backend::Backend& backend;

  Loaded(const std::filesystem::path& path, backend::Backend& b)
      : folder(format::ModelFolder::open(path)),
        parsed(model::parse_model(folder)),
        binding(model::bind(folder, parsed.spec, parsed.names)),
        model(parsed.spec, binding, folder, b, {}),
        experts(binding.experts, folder, b.allocator(), b.copier(), {}),
        backend(b) {}

  session::Parts parts() { return {model, experts, backend, Precision::Exact}; }
};

std::vector<TokenId> random_tokens(std::int64_t n) {
  std::mt19937 random(3);
  std::vector<TokenId> out;
  for (std::int64_t i = 0; i < n; ++i)
    out.push_back(TokenId(static_cast<std::int32_t>(random() % TinyModel::kVocab)));
  return out;
}

// Logits of the last positions.
std::vector<float> last_logits(Loaded& m) {
  session::Session s(m.parts(), {.ctx_size = kContext, .kv = KvType::F32, .chunk_size = 0});
  const std::vector<TokenId> tokens = random_tokens(kContext);
  const std::span<const TokenId> all(tokens), compared = all.last(kCompared);
  s.prefill(all.first(kContext - kCompared));
  std::vector<float> out;
  EvaluateOptions options;
  options.on_logits = [&](std::int64_t, std::span<const float> l) {
    out.insert(out.end(), l.begin(), l.end());
  };
  s.evaluate(compared.first(kCompared - kDecoded), options);
  options.one_at_a_time = true;
  s.evaluate(compared.last(kDecoded), options);
  return out;
}

struct Kind {
  std::string name;
  std::function<TinyModel()> make;
  bool linear;  // no layer sees all positions: every one of them can be computed
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

std::vector<Kind> kinds() {
  return {{"Gqa", [] { return tiny_gqa(); }, false},
          {"Sinks", [] { return tiny_sinks({false}); }, false},
          {"WindowAndSinks",
           [] {
             return tiny_sinks({true, true});
           },
           true},
          {"Mla", [] { return tiny_mla(); }, false},
          {"DeltaNet",
           [] {
             return tiny_delta({false, false});
           },
           true},
          {"GatedGqa", [] { return tiny_delta({true}); }, false}};
}

class LongContext : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { GetParam().make().write(dir_); }
  const TempDir dir_;
};

TEST_P(LongContext, AgreesWithTheReference) {
  const auto cpu = backend::make_cpu_backend({.n_threads = 2, .isa = ""});
  const auto reference = backend::make_reference_backend();
  LastQueriesOnly last_of_cpu(*cpu, kContext - kCompared),
      last_of_reference(*reference, kContext - kCompared);
  const bool linear = GetParam().linear;
  Loaded fast(dir_.path(), linear ? *cpu : last_of_cpu),
      oracle(dir_.path(), linear ? *reference : last_of_reference);
  const std::vector<float> got = last_logits(fast), want = last_logits(oracle);
  ASSERT_EQ(got.size(), static_cast<std::size_t>(kCompared) * TinyModel::kVocab);
  EXPECT_LE(relative_difference(got, want), 1e-5);
}

// Bytes that are allocated now.
std::uint64_t allocated() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

// What a session of this context takes once it has computed a whole chunk and a single token at its end.
std::uint64_t measured_bytes(Loaded& m, std::int64_t ctx, std::int64_t chunk) {
  const std::uint64_t before = allocated();
  session::Session s(m.parts(), {.ctx_size = ctx, .kv = KvType::F32, .chunk_size = chunk});
  session::SequenceState state(m.model.spec(), ctx, KvType::F32, m.backend.allocator(), m.backend.copier());
  model::Arena arena(m.backend.allocator().allocate(model::activation_bytes(m.model.spec(), chunk), 64));
  const auto stream = m.backend.create_stream();
  model::MoeScratch moe;
  model::ExpertCounters counters;
  model::Context c{m.backend, *stream, m.experts, arena, moe, counters, Precision::Exact};
  const std::vector<std::int32_t> tokens(static_cast<std::size_t>(chunk), 1);
  m.model.forward(c, tokens, ctx - chunk - 1, state.layers(), {});
  m.model.forward(c, std::span(tokens).first(1), ctx - 1, state.layers(), {});
  return allocated() - before;
}

TEST_P(LongContext, MemoryIsLinearAndAsPlanned) {
  const auto cpu = backend::make_cpu_backend({.n_threads = 2, .isa = ""});
  Loaded m(dir_.path(), *cpu);
  constexpr std::int64_t kChunk = 256, kShort = 8250;
  const auto planned = [&](std::int64_t ctx) {
    return model::plan_memory(m.parsed.spec, m.binding, ctx, kChunk, KvType::F32);
  };
  EXPECT_EQ(planned(4 * kShort).kv, 4 * planned(kShort).kv);
  EXPECT_EQ(planned(4 * kShort).session() - planned(4 * kShort).kv,
            planned(kShort).session() - planned(kShort).kv);

  measured_bytes(m, kShort, kChunk);  // what a process allocates once
  const std::uint64_t small = measured_bytes(m, kShort, kChunk),
                      large = measured_bytes(m, 4 * kShort, kChunk);
  // Beside the cache (twice: the session has one as well) only the history and the merged groups of one query
  // grow: a few bytes for each position.
  const std::uint64_t grown = large - small, cache = 2 * (planned(4 * kShort).kv - planned(kShort).kv);
  EXPECT_GE(grown, cache);
  EXPECT_LE(grown, cache + 8 * 3 * kShort);
}

INSTANTIATE_TEST_SUITE_P(Kinds, LongContext, testing::ValuesIn(kinds()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace moeflux::test
