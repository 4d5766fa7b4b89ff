#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <moeflux/engine.h>
#include <moeflux/moeflux.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/c_api_caller.h"
#include "support/temp_dir.h"

namespace {

using testing::HasSubstr;

const std::string kDemo = std::string(MOEFLUX_SOURCE_DIR) + "/models/demo";
constexpr std::string_view kPrompt = "HAMLET To be, or not to be";

mf_engine* open_demo() {
  mf_engine_params params = mf_engine_params_default();
  params.model = kDemo.c_str();
  params.n_threads = 2;
  mf_engine* engine = nullptr;
  mf_error error;
  EXPECT_EQ(mf_engine_open(&params, &engine, &error), MF_OK) << error.message;
  return engine;
}

class CApi : public testing::Test {
 protected:
  void SetUp() override {
    engine_ = open_demo();
    ASSERT_NE(engine_, nullptr);
    ASSERT_EQ(mf_session_create(engine_, nullptr, &session_, &error_), MF_OK) << error_.message;
  }
  void TearDown() override {
    mf_session_free(session_);
    mf_engine_free(engine_);
  }

  std::vector<std::int32_t> tokenize(std::string_view text, bool special = false) {
    std::vector<std::int32_t> tokens(text.size());
    std::size_t n = 0;
    EXPECT_EQ(
        mf_tokenize(engine_, text.data(), text.size(), special, tokens.data(), tokens.size(), &n, &error_),
        MF_OK);
    tokens.resize(n);
    return tokens;
  }

  mf_engine* engine_ = nullptr;
  mf_session* session_ = nullptr;
  mf_error error_{};
};

TEST(CApiAlone, NamesAndDefaults) {
  EXPECT_STREQ(mf_version(), moeflux::version());
  EXPECT_STREQ(mf_status_name(MF_OK), "ok");
  EXPECT_STREQ(mf_status_name(MF_INVALID_MODEL), "invalid model");
  EXPECT_STREQ(mf_status_name(MF_INTERNAL), "internal error");
  EXPECT_STREQ(mf_status_name(99), "unknown status");
  EXPECT_STREQ(mf_status_name(-1), "unknown status");
  EXPECT_EQ(mf_engine_params_default().precision, MF_PRECISION_FAST);
  EXPECT_EQ(mf_generate_params_default().max_tokens, -1);
  EXPECT_EQ(mf_sampling_params_default().temperature, moeflux::SamplingParams().temperature);
  EXPECT_EQ(mf_sampling_params_default().top_k, moeflux::SamplingParams().top_k);
}

TEST(CApiAlone, OpenFailuresHaveCodeAndMessage) {
  mf_engine_params params = mf_engine_params_default();
  mf_engine* engine = reinterpret_cast<mf_engine*>(&params);  // must be overwritten
  mf_error error{};
  EXPECT_EQ(mf_engine_open(&params, &engine, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(engine, nullptr);
  EXPECT_STREQ(error.message, "model is NULL");

  const moeflux::test::TempDir dir;
  const std::string nowhere = (dir / "nowhere").string();
  params.model = nowhere.c_str();
  EXPECT_EQ(mf_engine_open(&params, &engine, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(error.code, MF_INVALID_ARGUMENT);
  EXPECT_THAT(error.message, HasSubstr("nowhere"));
  EXPECT_EQ(mf_engine_open(&params, &engine, nullptr), MF_INVALID_ARGUMENT);

  params.model = kDemo.c_str();
  params.precision = 7;
  EXPECT_EQ(mf_engine_open(&params, &engine, &error), MF_INVALID_ARGUMENT);
  EXPECT_THAT(error.message, HasSubstr("precision has no value 7"));
  EXPECT_EQ(mf_engine_open(nullptr, &engine, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_engine_open(&params, nullptr, &error), MF_INVALID_ARGUMENT);
}

TEST(CApiAlone, LongMessagesAreCutBetweenCharacters) {
  mf_engine_params params = mf_engine_params_default();
  mf_engine* engine = nullptr;
  for (int shift = 0; shift < 3; ++shift) {
    std::string name(static_cast<std::size_t>(shift), 'x');
    for (int i = 0; i < 400; ++i) name += "\xe2\x82\xac";  // a euro sign, three bytes
    const std::string path = "/nowhere/" + name;
    params.model = path.c_str();
    mf_error error{};
    EXPECT_EQ(mf_engine_open(&params, &engine, &error), MF_INVALID_ARGUMENT);
    const std::string_view message = error.message;
    EXPECT_GE(message.size(), sizeof(error.message) - 3);
    EXPECT_EQ(message.substr(message.size() - 3), "\xe2\x82\xac");
  }
}

TEST(CApiAlone, NullObjectsAreRefused) {
  mf_error error{};
  std::size_t n = 7;
  EXPECT_EQ(mf_tokenize(nullptr, "x", 1, false, nullptr, 0, &n, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(n, 0U);
  EXPECT_STREQ(error.message, "engine is NULL");
  EXPECT_EQ(mf_detokenize(nullptr, nullptr, 0, false, nullptr, 0, &n, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_token_to_text(nullptr, 1, nullptr, 0, &n, &error), MF_INVALID_ARGUMENT);
  mf_session* session = nullptr;
  EXPECT_EQ(mf_session_create(nullptr, nullptr, &session, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_session_prefill(nullptr, nullptr, 0, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_session_step(nullptr, 1, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_session_generate(nullptr, nullptr, 0, nullptr, nullptr, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_session_reset(nullptr, &error), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_session_logits(nullptr, &n), nullptr);
  EXPECT_EQ(mf_session_position(nullptr), 0);
  EXPECT_EQ(mf_session_ctx_size(nullptr), 0);
  EXPECT_EQ(mf_session_stats(nullptr).prefill_tokens, 0);
  EXPECT_EQ(mf_engine_vocab_size(nullptr), 0);
  EXPECT_EQ(mf_engine_n_layers(nullptr), 0);
  EXPECT_EQ(mf_engine_max_context(nullptr), 0);
  EXPECT_FALSE(mf_engine_has_tokenizer(nullptr));
  EXPECT_FALSE(mf_engine_is_stop_token(nullptr, 1));
  EXPECT_EQ(mf_engine_default_sampling(nullptr).top_k, mf_sampling_params_default().top_k);
  mf_session_cancel(nullptr);
  mf_session_reset_cancel(nullptr);
  mf_session_free(nullptr);
  mf_engine_free(nullptr);
}

TEST_F(CApi, EngineFacts) {
  EXPECT_EQ(mf_engine_vocab_size(engine_), 3072);
  EXPECT_EQ(mf_engine_n_layers(engine_), 8);
  EXPECT_EQ(mf_engine_max_context(engine_), 8192);
  EXPECT_TRUE(mf_engine_has_tokenizer(engine_));
  EXPECT_TRUE(mf_engine_is_stop_token(engine_, 3056));
  EXPECT_TRUE(mf_engine_is_stop_token(engine_, 3058));
  EXPECT_FALSE(mf_engine_is_stop_token(engine_, 3057));
  EXPECT_EQ(mf_engine_default_sampling(engine_).top_k, 40);
}

TEST_F(CApi, TokenizeWritesWhatFitsAndTellsTheWholeSize) {
  const std::vector<std::int32_t> all = tokenize(kPrompt);
  ASSERT_GT(all.size(), 4U);
  std::size_t n = 0;
  EXPECT_EQ(mf_tokenize(engine_, kPrompt.data(), kPrompt.size(), false, nullptr, 0, &n, &error_), MF_OK);
  EXPECT_EQ(n, all.size());
  std::array<std::int32_t, 4> few = {-1, -1, -1, -1};
  EXPECT_EQ(mf_tokenize(engine_, kPrompt.data(), kPrompt.size(), false, few.data(), 3, &n, &error_), MF_OK);
  EXPECT_EQ(n, all.size());
  EXPECT_THAT(few, testing::ElementsAre(all[0], all[1], all[2], -1));
  EXPECT_EQ(mf_tokenize(engine_, nullptr, 0, false, nullptr, 0, &n, &error_), MF_OK);
  EXPECT_EQ(n, 0U);
  EXPECT_EQ(mf_tokenize(engine_, nullptr, 3, false, nullptr, 0, &n, &error_), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_tokenize(engine_, "x", 1, false, nullptr, 5, &n, &error_), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_tokenize(engine_, "x", 1, false, nullptr, 0, nullptr, &error_), MF_INVALID_ARGUMENT);
  EXPECT_EQ(tokenize("<|im_end|>", true), std::vector<std::int32_t>{3058});
  EXPECT_GT(tokenize("<|im_end|>").size(), 1U);
}

TEST_F(CApi, DetokenizeGivesTheTextBack) {
  const std::vector<std::int32_t> tokens = tokenize(kPrompt);
  std::size_t n = 0;
  EXPECT_EQ(mf_detokenize(engine_, tokens.data(), tokens.size(), false, nullptr, 0, &n, &error_), MF_OK);
  EXPECT_EQ(n, kPrompt.size());
  std::string text(n + 1, '#');
  EXPECT_EQ(
      mf_detokenize(engine_, tokens.data(), tokens.size(), false, text.data(), text.size(), &n, &error_),
      MF_OK);
  EXPECT_EQ(text, std::string(kPrompt) + '\0');
  std::string cut(5, '#');
  EXPECT_EQ(mf_detokenize(engine_, tokens.data(), tokens.size(), false, cut.data(), 4, &n, &error_), MF_OK);
  EXPECT_EQ(cut, "HAML#");
  EXPECT_EQ(n, kPrompt.size());
  std::array<char, 32> piece{};
  EXPECT_EQ(mf_token_to_text(engine_, tokens[0], piece.data(), piece.size(), &n, &error_), MF_OK);
  EXPECT_EQ(std::string_view(piece.data(), n), kPrompt.substr(0, n));
  EXPECT_EQ(mf_token_to_text(engine_, 1 << 30, piece.data(), piece.size(), &n, &error_), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_detokenize(engine_, nullptr, 2, false, nullptr, 0, &n, &error_), MF_INVALID_ARGUMENT);
}

TEST_F(CApi, PrefillAndStepsGiveTheSameLogits) {
  const std::vector<std::int32_t> tokens = tokenize(kPrompt);
  std::size_t n = 9;
  EXPECT_EQ(mf_session_logits(session_, &n), nullptr);
  EXPECT_EQ(n, 0U);
  ASSERT_EQ(mf_session_prefill(session_, tokens.data(), tokens.size(), &error_), MF_OK) << error_.message;
  EXPECT_EQ(error_.code, MF_OK);
  EXPECT_STREQ(error_.message, "");
  const float* logits = mf_session_logits(session_, &n);
  ASSERT_EQ(n, 3072U);
  const std::vector<float> prefilled(logits, logits + n);
  const std::uint64_t hash = mf_session_stats(session_).logits_hash;
  EXPECT_NE(hash, 0U);
  EXPECT_EQ(mf_session_position(session_), static_cast<std::int64_t>(tokens.size()));
  EXPECT_EQ(mf_session_ctx_size(session_), 4096);

  ASSERT_EQ(mf_session_reset(session_, &error_), MF_OK);
  EXPECT_EQ(mf_session_position(session_), 0);
  for (const std::int32_t token : tokens) ASSERT_EQ(mf_session_step(session_, token, &error_), MF_OK);
  logits = mf_session_logits(session_, &n);
  EXPECT_EQ(std::memcmp(logits, prefilled.data(), n * sizeof(float)), 0);
  const mf_stats stats = mf_session_stats(session_);
  EXPECT_EQ(stats.logits_hash, hash);
  EXPECT_EQ(stats.prefill_tokens, static_cast<std::int64_t>(tokens.size()));
  EXPECT_EQ(stats.decode_tokens, static_cast<std::int64_t>(tokens.size()));
  EXPECT_GT(stats.decode_ns, 0U);
  EXPECT_GT(stats.expert_requests, 0U);
}

TEST_F(CApi, BadTokensAndSizesAreErrors) {
  EXPECT_EQ(mf_session_prefill(session_, nullptr, 0, &error_), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_session_prefill(session_, nullptr, 3, &error_), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_session_step(session_, 3072, &error_), MF_INVALID_ARGUMENT);
  EXPECT_THAT(error_.message, HasSubstr("3072"));
  EXPECT_EQ(mf_session_step(session_, -1, &error_), MF_INVALID_ARGUMENT);
  EXPECT_EQ(mf_session_position(session_), 0);
  mf_session_params params = mf_session_params_default();
  params.kv = 5;
  mf_session* other = session_;
  EXPECT_EQ(mf_session_create(engine_, &params, &other, &error_), MF_INVALID_ARGUMENT);
  EXPECT_EQ(other, nullptr);
  EXPECT_THAT(error_.message, HasSubstr("kv has no value 5"));
  EXPECT_EQ(mf_session_create(engine_, nullptr, nullptr, &error_), MF_INVALID_ARGUMENT);
}

bool stop_after_three(void* user_data, std::int32_t /*token*/, const char* text, std::size_t /*n_bytes*/) {
  EXPECT_NE(text, nullptr);
  return ++*static_cast<int*>(user_data) < 3;
}

TEST_F(CApi, GenerateCallsBackAndStops) {
  const std::vector<std::int32_t> tokens = tokenize(kPrompt);
  mf_generate_params params = mf_generate_params_default();
  params.ignore_stop = true;
  int calls = 0;
  params.on_token = stop_after_three;
  params.user_data = &calls;
  mf_generate_result result{};
  ASSERT_EQ(mf_session_generate(session_, tokens.data(), tokens.size(), &params, &result, &error_), MF_OK);
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(result.reason, MF_STOP_CALLBACK);
  params.on_token = nullptr;
  params.max_tokens = 4;
  ASSERT_EQ(mf_session_reset(session_, &error_), MF_OK);
  ASSERT_EQ(mf_session_generate(session_, tokens.data(), tokens.size(), &params, &result, &error_), MF_OK);
  EXPECT_EQ(result.n_tokens, 4);
  EXPECT_EQ(result.reason, MF_STOP_MAX_TOKENS);
  ASSERT_EQ(mf_session_reset(session_, &error_), MF_OK);
  EXPECT_EQ(mf_session_generate(session_, nullptr, 0, &params, &result, &error_), MF_INVALID_ARGUMENT);
}

TEST_F(CApi, CancelIsAReasonForGenerateAndAStatusElsewhere) {
  const std::vector<std::int32_t> tokens = tokenize(kPrompt);
  mf_session_cancel(session_);
  mf_generate_result result{};
  EXPECT_EQ(mf_session_generate(session_, tokens.data(), tokens.size(), nullptr, &result, &error_), MF_OK);
  EXPECT_EQ(result.reason, MF_STOP_CANCELLED);
  ASSERT_EQ(mf_session_reset(session_, &error_), MF_OK);
  EXPECT_EQ(mf_session_prefill(session_, tokens.data(), tokens.size(), &error_), MF_CANCELLED);
  mf_session_reset_cancel(session_);
  ASSERT_EQ(mf_session_reset(session_, &error_), MF_OK);
  EXPECT_EQ(mf_session_prefill(session_, tokens.data(), tokens.size(), &error_), MF_OK) << error_.message;
}

bool throwing(void* /*user_data*/, std::int32_t /*token*/, const char* /*text*/, std::size_t /*n_bytes*/) {
  throw std::logic_error("from a callback");
}

TEST_F(CApi, NoExceptionPasses) {
  const std::vector<std::int32_t> tokens = tokenize(kPrompt);
  mf_generate_params params = mf_generate_params_default();
  params.on_token = throwing;
  EXPECT_EQ(mf_session_generate(session_, tokens.data(), tokens.size(), &params, nullptr, &error_),
            MF_INTERNAL);
  EXPECT_STREQ(error_.message, "from a callback");
}

struct Heard {
  int progress_calls = 0;
  std::uint64_t done = 0, total = 1;
};

TEST(CApiAlone, ProgressIsReported) {
  Heard heard;
  mf_engine_params params = mf_engine_params_default();
  params.model = kDemo.c_str();
  params.user_data = &heard;
  params.on_progress = [](void* user_data, const char* what, std::uint64_t done, std::uint64_t total) {
    auto* h = static_cast<Heard*>(user_data);
    ++h->progress_calls;
    h->done = done;
    h->total = total;
    EXPECT_GT(std::strlen(what), 0U);
  };
  params.on_log = [](void*, std::int32_t level, const char* message) {
    EXPECT_LE(level, MF_LOG_WARNING) << message;
  };
  mf_engine* engine = nullptr;
  mf_error error{};
  ASSERT_EQ(mf_engine_open(&params, &engine, &error), MF_OK) << error.message;
  EXPECT_GT(heard.progress_calls, 0);
  EXPECT_EQ(heard.done, heard.total);
  mf_engine_free(engine);
}

TEST_F(CApi, ACProgramGetsTheTextThatCxxGets) {
  std::array<char, 4096> text{};
  mf_error error{};
  ASSERT_EQ(c_generate(kDemo.c_str(), kPrompt.data(), 12, text.data(), text.size(), &error), MF_OK)
      << error.message;

  moeflux::EngineOptions options;
  options.model = kDemo;
  const std::unique_ptr<moeflux::Engine> engine = moeflux::Engine::open(options);
  const std::unique_ptr<moeflux::Session> session = engine->create_session({});
  std::string expected;
  moeflux::GenerateOptions generate;
  generate.max_tokens = 12;
  generate.sampling.temperature = 0;
  generate.on_token = [&](moeflux::TokenId, std::string_view piece) {
    expected += piece;
    return true;
  };
  session->generate(engine->tokenizer()->encode(kPrompt), generate);
  EXPECT_FALSE(expected.empty());
  EXPECT_EQ(std::string(text.data()), expected);
}

}  // namespace
