// One sequence through the public API: limits, errors, cancellation, statistics.
#include <gtest/gtest.h>

#include <thread>

#include "support/evaluate.h"
#include "support/expect_error.h"
#include "support/tensor_file.h"

namespace moeflux::test {
namespace {

std::unique_ptr<Engine> demo() { return open_engine(demo_model(), {.precision = Precision::Fast}); }

std::vector<TokenId> some_tokens(int n) {
  std::vector<TokenId> out;
  for (int i = 0; i < n; ++i) out.push_back(TokenId(100 + i * 37 % 900));
  return out;
}

TEST(Session, RefusesWhatDoesNotFitAndChangesNothing) {
  const auto engine = demo();
  const auto session = engine->create_session({.ctx_size = 10});
  session->prefill(some_tokens(6));
  const std::vector<float> before(session->logits().begin(), session->logits().end());
  expect_error([&] { session->prefill(some_tokens(5)); }, ErrorCode::InvalidArgument, {"5 tokens", "10"});
  expect_error([&] { session->step(TokenId(3072)); }, ErrorCode::InvalidArgument, {"3072"});
  expect_error([&] { session->step(TokenId(-1)); }, ErrorCode::InvalidArgument, {"-1"});
  expect_error([&] { session->prefill({}); }, ErrorCode::InvalidArgument, {"no tokens"});
  EXPECT_EQ(session->position(), 6);
  EXPECT_EQ(std::vector<float>(session->logits().begin(), session->logits().end()), before);
  session->prefill(some_tokens(4));
  EXPECT_EQ(session->position(), 10);
}

TEST(Session, ResetStartsAfresh) {
  const auto engine = demo();
  const auto session = engine->create_session({});
  session->prefill(some_tokens(20));
  const std::vector<float> first(session->logits().begin(), session->logits().end());
  session->prefill(some_tokens(9));
  session->reset();
  EXPECT_EQ(session->position(), 0);
  EXPECT_TRUE(session->logits().empty());
  session->prefill(some_tokens(20));
  EXPECT_EQ(std::vector<float>(session->logits().begin(), session->logits().end()), first);
}

TEST(Session, PrefillThenStepsIsOnePrefill) {
  const auto engine = demo();
  const auto a = engine->create_session({}), b = engine->create_session({});
  const auto tokens = some_tokens(30);
  a->prefill(tokens);
  b->prefill(std::span(tokens).first(11));
  for (std::size_t i = 11; i < tokens.size(); ++i) b->step(tokens[i]);
  EXPECT_EQ(std::vector<float>(a->logits().begin(), a->logits().end()), std::vector<float>(b->logits().begin(), b->logits().end()));
}

std::string generate(Engine& engine, std::uint64_t seed) {
  const auto session = engine.create_session({.ctx_size = 200});
  GenerateOptions o;
  o.max_tokens = 60;
  o.sampling.seed = seed;
  std::string text;
  o.on_token = [&](TokenId, std::string_view piece) {
    text += piece;
    return true;
  };
  session->generate(engine.tokenizer()->encode("ROMEO But soft"), o);
  return text;
}

TEST(Session, ASeedGivesTheSameTextOnEveryRun) {
  const auto a = demo(), b = open_engine(demo_model(), {.precision = Precision::Fast, .n_threads = 1});
  const std::string text = generate(*a, 42);
  EXPECT_EQ(generate(*a, 42), text);
  EXPECT_EQ(generate(*b, 42), text);
  EXPECT_NE(generate(*a, 43), text);
}

TEST(Session, StopsWhereItShould) {
  const auto engine = demo();
  const auto prompt = some_tokens(4);
  {
    const auto s = engine->create_session({.ctx_size = 12});
    GenerateOptions o;
    o.ignore_stop = true;
    const GenerateResult r = s->generate(prompt, o);
    EXPECT_EQ(r.reason, StopReason::ContextFull);
    EXPECT_EQ(r.n_tokens, 12 - 4 + 1);  // the last one is chosen from the last position
  }
  {
    const auto s = engine->create_session({.ctx_size = 100});
    GenerateOptions o;
    o.max_tokens = 5;
    o.ignore_stop = true;
    EXPECT_EQ(s->generate(prompt, o).n_tokens, 5);
  }
  {
    const auto s = engine->create_session({.ctx_size = 100});
    GenerateOptions o;
    int calls = 0;
    o.ignore_stop = true;
    o.on_token = [&](TokenId, std::string_view) { return ++calls < 3; };
    const GenerateResult r = s->generate(prompt, o);
    EXPECT_EQ(r.reason, StopReason::Callback);
    EXPECT_EQ(calls, 3);
  }
}

TEST(Session, StopTokensComeFromTheConfigs) {
  const auto engine = demo();
  EXPECT_EQ(engine->stop_tokens(), (std::vector<TokenId>{TokenId(3056), TokenId(3058)}));
  EXPECT_DOUBLE_EQ(engine->default_sampling().temperature, 0.8);
  EXPECT_EQ(engine->default_sampling().top_k, 40);
}

TEST(Session, PaddingIdsAreNeverSampled) {
  const auto engine = demo();  // vocabulary 3072, tokens up to 3058
  const auto session = engine->create_session({.ctx_size = 300});
  GenerateOptions o;
  o.max_tokens = 200;
  o.ignore_stop = true;
  o.sampling.temperature = 50.0;  // close to uniform
  o.sampling.top_k = 0;
  o.sampling.top_p = 1.0;
  o.on_token = [&](TokenId t, std::string_view) {
    EXPECT_LT(raw(t), 3059);
    return true;
  };
  session->generate(some_tokens(3), o);
}

TEST(Session, CancelFromAnotherThread) {
  const auto engine = demo();
  const auto session = engine->create_session({});
  GenerateOptions o;
  o.ignore_stop = true;
  std::thread other;
  int n = 0;
  o.on_token = [&](TokenId, std::string_view) {
    if (++n == 5) other = std::thread([&] { session->cancel(); });
    return true;
  };
  const GenerateResult r = session->generate(some_tokens(5), o);
  other.join();
  EXPECT_EQ(r.reason, StopReason::Cancelled);
  EXPECT_GE(r.n_tokens, 5);
  expect_error([&] { session->step(TokenId(5)); }, ErrorCode::Cancelled, {});
}

// Between two tokens nothing is half done: the session goes on as if nothing had happened.
TEST(Session, CancelBetweenTokensLosesNothing) {
  const auto engine = demo();
  const auto session = engine->create_session({}), other = engine->create_session({});
  const auto tokens = some_tokens(12);
  session->prefill(std::span(tokens).first(8));
  session->cancel();
  expect_error([&] { session->step(tokens[8]); }, ErrorCode::Cancelled, {});
  session->reset_cancel();
  session->prefill(std::span(tokens).subspan(8));
  other->prefill(tokens);
  EXPECT_EQ(std::vector<float>(session->logits().begin(), session->logits().end()),
            std::vector<float>(other->logits().begin(), other->logits().end()));
}

// In the middle of a token recurrent state has been touched: the session says so instead of going on from a wrong state.
TEST(Session, CancelInTheMiddleNeedsAReset) {
  const auto engine = demo();
  const auto session = engine->create_session({});
  session->prefill(some_tokens(8));
  EvaluateOptions e;
  e.on_hidden = [&](std::int64_t layer, std::int64_t, std::span<const float>) {
    if (layer == 3) session->cancel();
  };
  const TokenId next{5};
  expect_error([&] { session->evaluate({&next, 1}, e); }, ErrorCode::Cancelled, {});
  EXPECT_EQ(session->position(), 8);
  session->reset_cancel();
  expect_error([&] { session->step(next); }, ErrorCode::InvalidArgument, {"reset"});
  session->reset();
  session->prefill(some_tokens(5));
  const auto fresh = engine->create_session({});
  fresh->prefill(some_tokens(5));
  EXPECT_EQ(std::vector<float>(session->logits().begin(), session->logits().end()),
            std::vector<float>(fresh->logits().begin(), fresh->logits().end()));
}

TEST(Session, Statistics) {
  const auto engine = demo();
  const auto session = engine->create_session({});
  session->prefill(some_tokens(10));
  session->step(TokenId(7));
  session->step(TokenId(8));
  const SessionStats& s = session->stats();
  EXPECT_EQ(s.prefill_tokens, 10);
  EXPECT_EQ(s.decode_tokens, 2);
  EXPECT_GT(s.prefill_ns, 0u);
  EXPECT_NE(s.logits_hash, 0u);
  EXPECT_GE(s.expert_requests, 2u * 8 * 4);
  EXPECT_DOUBLE_EQ(s.hit_rate(), 1.0);
}

}  // namespace
}  // namespace moeflux::test
