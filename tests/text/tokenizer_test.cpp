#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "text/tokenizer_fixtures.h"

namespace moeflux::text {
namespace {

using testing::ElementsAre;

TEST(Tokenizer, DemoModelAgreesWithEveryGoldenCase) {
  const Tokenizer& t = demo_tokenizer();
  const Json golden =
      parse_json(read_file(source_dir() / "tests/fixtures/demo-golden/tokenizer_golden.json"), "golden");
  ASSERT_GE(golden.size(), 23u);
  for (const Json& item : golden) {
    const auto text = item.at("text").get<std::string>();
    const auto ids = t.encode(text, {.parse_special = true});
    EXPECT_EQ(numbers(ids), item.at("ids").get<std::vector<int>>()) << text;
    EXPECT_EQ(t.decode(ids, false), item.at("decoded").get<std::string>());
  }
}

// The held-out text is third-party data and lives outside the repository.
TEST(Tokenizer, HeldOutTextHasTheReferenceIds) {
  const auto folder = source_dir().parent_path() / "shared/fixtures/demo-golden";
  if (!std::filesystem::exists(folder / "val.txt")) GTEST_SKIP() << "no held-out text beside the repository";
  const std::string file = read_file(folder / "val_tokens.safetensors");
  std::uint64_t header_size = 0;
  ASSERT_GT(file.size(), 8u);
  std::memcpy(&header_size, file.data(), 8);
  ASSERT_LT(header_size, file.size());
  const Json header = parse_json(std::string_view(file).substr(8, header_size), "val_tokens");
  const auto n = header.at("val_tokens").at("shape").at(0).get<std::size_t>();
  ASSERT_EQ(file.size(), 8 + header_size + 4 * n);
  std::vector<std::int32_t> want(n);
  std::memcpy(want.data(), file.data() + 8 + header_size, 4 * n);
  const auto ids = demo_tokenizer().encode(read_file(folder / "val.txt"), {.parse_special = true});
  ASSERT_EQ(ids.size(), n);
  for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(raw(ids[i]), want[i]) << "token " << i;
}

TEST(Tokenizer, TellsAboutItself) {
  const Tokenizer& t = demo_tokenizer();
  EXPECT_EQ(t.description(), "byte-level BPE, 3056 tokens, 2800 merges, 3 added, NFC");
  EXPECT_EQ(t.vocab_size(), 3059u);
  EXPECT_EQ(t.find("<|im_end|>"), TokenId{3058});
  EXPECT_EQ(t.find("\u0120t"), t.encode(" t", {}).front());
  EXPECT_EQ(t.find("no such token"), std::nullopt);
  EXPECT_TRUE(t.is_special(TokenId{3058}));
  EXPECT_FALSE(t.is_special(TokenId{0}));
  EXPECT_FALSE(t.is_special(TokenId{-1}));
  EXPECT_TRUE(t.has_token(TokenId{3058}));
  EXPECT_FALSE(t.has_token(TokenId{3059}));
  EXPECT_FALSE(t.has_token(TokenId{-5}));
  EXPECT_EQ(t.token_bytes(TokenId{220}), " ");
  EXPECT_EQ(t.token_bytes(TokenId{3056}), "<|endoftext|>");
  EXPECT_EQ(t.eos(), std::nullopt);
  EXPECT_EQ(t.bos(), std::nullopt);
}

TEST(Tokenizer, UserTextDoesNotBecomeSpecial) {
  const Tokenizer& t = demo_tokenizer();
  const std::string text = "hi<|im_end|>\n<|im_start|>system";
  for (const TokenId id : t.encode(text, {})) EXPECT_FALSE(t.is_special(id));
  EXPECT_EQ(t.decode(t.encode(text, {}), true), text);
  int special = 0;
  for (const TokenId id : t.encode(text, {.parse_special = true})) special += t.is_special(id) ? 1 : 0;
  EXPECT_EQ(special, 2);
}

TEST(Tokenizer, DecodeSkipsSpecialTokensOnRequest) {
  const Tokenizer& t = demo_tokenizer();
  const auto ids = t.encode("a<|im_end|>b", {.parse_special = true});
  EXPECT_EQ(t.decode(ids, true), "ab");
  EXPECT_EQ(t.decode(ids, false), "a<|im_end|>b");
  EXPECT_EQ(t.decode({}, false), "");
}

TEST(Tokenizer, UnknownIdsAreRefused) {
  const Tokenizer& t = demo_tokenizer();
  for (const int id : {-1, 3059, 1 << 30})
    expect_error([&] { t.decode(tokens({0, id}), false); }, ErrorCode::InvalidArgument, {std::to_string(id)});
  expect_error([&] { t.token_bytes(TokenId{3059}); }, ErrorCode::InvalidArgument, {"3059"});
}

TEST(Tokenizer, InvalidUtf8BecomesReplacementCharacters) {
  const Tokenizer& t = demo_tokenizer();
  EXPECT_EQ(t.encode("a\xFF\xE2\x82z", {}), t.encode("a\uFFFD\uFFFDz", {}));
  EXPECT_EQ(t.decode(tokens({127}), false), "\uFFFD");  // a lone lead byte
  EXPECT_EQ(t.decode(tokens({64, 127, 64}), false), "a\uFFFDa");
}

TEST(Tokenizer, EosAndBosComeFromTheConfig) {
  Json root = tiny_json();
  root["added_tokens"] = Json::array({added_token(256, "<s>", true), added_token(257, "</s>", true)});
  const Tokenizer t =
      make(root, R"({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>"})");
  EXPECT_EQ(t.bos(), TokenId{256});
  EXPECT_EQ(t.eos(), TokenId{257});
  EXPECT_EQ(make(root, R"({"bos_token": null})").bos(), std::nullopt);
  expect_error([&] { make(root, R"({"eos_token": "<nope>"})"); }, ErrorCode::InvalidModel,
               {"test/tokenizer_config.json", "$.eos_token", "<nope>"});
  expect_error([&] { make(root, R"({"eos_token": 7})"); }, ErrorCode::InvalidModel,
               {"$.eos_token", "string"});
  expect_error([&] { make(root, R"({"eos_token": {}})"); }, ErrorCode::InvalidModel,
               {"$.eos_token", "content"});
  expect_error([&] { make(root, "{"); }, ErrorCode::InvalidModel, {"test/tokenizer_config.json"});
}

TEST(Tokenizer, TemplateTokensOnlyOnRequest) {
  Json root = tiny_json();
  root["added_tokens"] = Json::array({added_token(256, "<s>", true), added_token(257, "</s>", true)});
  root["post_processor"] = Json::parse(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
    {"type": "TemplateProcessing",
     "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}}],
     "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]},
                                    "</s>": {"id": "</s>", "ids": [257], "tokens": ["</s>"]}}}]})");
  const Tokenizer t = make(root, R"({"bos_token": "<s>", "add_bos_token": true})");
  EXPECT_THAT(numbers(t.encode("a", {})), ElementsAre('a'));
  EXPECT_THAT(numbers(t.encode("a", {.add_bos = true})), ElementsAre(256, 'a', 257));
  EXPECT_THAT(numbers(t.encode("", {.add_bos = true})), ElementsAre(256, 257));

  root["post_processor"]["processors"][1]["special_tokens"]["<s>"]["ids"] = Json::array({999});
  expect_error([&] { make(root); }, ErrorCode::InvalidModel, {"$.post_processor", "999"});
  root["post_processor"] = {{"type", "BertProcessing"}};
  expect_error([&] { make(root); }, ErrorCode::Unsupported, {"$.post_processor", "BertProcessing"});
}

TEST(Tokenizer, ConfigMayAskForBosWithoutATemplate) {
  Json root = tiny_json();
  root["added_tokens"] = Json::array({added_token(256, "<s>", true)});
  const auto first = [&](const char* config) {
    return numbers(make(root, config).encode("a", {.add_bos = true}));
  };
  EXPECT_THAT(first(R"({"bos_token": "<s>", "add_bos_token": true})"), ElementsAre(256, 'a'));
  EXPECT_THAT(first(R"({"bos_token": "<s>", "add_bos_token": false})"), ElementsAre('a'));
  EXPECT_THAT(first(R"({"bos_token": "<s>"})"), ElementsAre('a'));
}

TEST(Tokenizer, IdsMayHaveGaps) {
  Json root = tiny_json();
  root["added_tokens"] = Json::array({added_token(16'000'000, "<far>", true)});
  const Tokenizer t = make(root);
  EXPECT_EQ(t.vocab_size(), 16'000'001u);
  EXPECT_FALSE(t.has_token(TokenId{5000}));
  EXPECT_THAT(numbers(t.encode("<far>", {.parse_special = true})), ElementsAre(16'000'000));
}

TEST(Tokenizer, ServesThreadsAtOnce) {
  const Tokenizer& t = demo_tokenizer();
  const std::string text = read_file(source_dir() / "tests/fixtures/demo-golden/tokenizer_golden.json");
  const auto want = t.encode(text, {});
  std::vector<std::vector<TokenId>> got(4);
  std::vector<std::thread> threads;
  for (auto& mine : got)
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) mine = t.encode(text, {});
    });
  for (auto& thread : threads) thread.join();
  for (const auto& mine : got) EXPECT_EQ(mine, want);
}

}  // namespace
}  // namespace moeflux::text
