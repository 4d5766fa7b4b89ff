#include "text/added_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "text/tokenizer_fixtures.h"

namespace moeflux::text {
namespace {

using testing::ElementsAre;

std::vector<int> encode(const Tokenizer& t, std::string_view text, bool special = true) {
  return numbers(t.encode(text, {.parse_special = special}));
}

TEST(AddedTokens, LeftmostThenLongest) {
  Json root = tiny_json();
  root["added_tokens"] = {added_token(300, "<a>", false), added_token(301, "<a><b>", false),
                          added_token(302, "<b>", false), added_token(303, "b><", false)};
  const Tokenizer t = make(root);
  EXPECT_THAT(encode(t, "<a><b>x"), ElementsAre(301, 'x'));
  EXPECT_THAT(encode(t, "<a><a><b>"), ElementsAre(300, 301));
  EXPECT_THAT(encode(t, "<b><b>"), ElementsAre(302, 302));  // "b><" starts later
  EXPECT_THAT(encode(t, "b><b>"), ElementsAre(303, 'b', '>'));
  EXPECT_THAT(encode(t, "<a"), ElementsAre('<', 'a'));
}

TEST(AddedTokens, UserTextMakesNoSpecialTokens) {
  Json root = tiny_json();
  root["added_tokens"] = Json::array({added_token(300, "<|end|>", true), added_token(301, "<think>", false)});
  const Tokenizer t = make(root);
  EXPECT_THAT(encode(t, "a<|end|><think>", true), ElementsAre('a', 300, 301));
  EXPECT_THAT(encode(t, "a<|end|><think>", false), ElementsAre('a', '<', '|', 'e', 'n', 'd', '|', '>', 301));
  EXPECT_EQ(t.decode(t.encode("<|end|>", {}), true), "<|end|>");
}

// A file may list its special tokens in the vocabulary too, with merges that spell them.
TEST(AddedTokens, NeitherMergesNorWholePiecesMakeSpecialTokens) {
  Json root = tiny_json();
  add_merge(root, "<", "s");   // 256
  add_merge(root, "<s", ">");  // 257: the special token
  root["added_tokens"] = Json::array({added_token(257, "<s>", true)});
  EXPECT_THAT(encode(make(root), "<s>", true), ElementsAre(257));
  EXPECT_THAT(encode(make(root), "<s>", false), ElementsAre(256, '>'));
  root["model"]["ignore_merges"] = true;
  EXPECT_THAT(encode(make(root), "<s>", false), ElementsAre(256, '>'));
}

TEST(AddedTokens, NormalizedOnesAreFoundInNormalizedText) {
  Json root = tiny_json();
  root["normalizer"] = {{"type", "NFC"}};
  Json raw_token = added_token(300, "e\u0301", false);
  Json normalized = added_token(301, "o\u0301", false);
  normalized["normalized"] = true;
  root["added_tokens"] = {raw_token, normalized};
  const Tokenizer t = make(root);
  EXPECT_THAT(encode(t, "e\u0301"), ElementsAre(300));
  EXPECT_THAT(encode(t, "\u00E9"), ElementsAre(0xC3, 0xA9));
  EXPECT_THAT(encode(t, "o\u0301"), ElementsAre(301));
  EXPECT_THAT(encode(t, "\u00F3"), ElementsAre(301));
}

TEST(AddedTokens, SingleWord) {
  Json root = tiny_json();
  Json token = added_token(300, "cat", false);
  token["single_word"] = true;
  root["added_tokens"] = Json::array({token});
  const Tokenizer t = make(root);
  EXPECT_THAT(encode(t, "cat"), ElementsAre(300));
  EXPECT_THAT(encode(t, "a cat."), ElementsAre('a', ' ', 300, '.'));
  EXPECT_THAT(encode(t, "cats"), ElementsAre('c', 'a', 't', 's'));
  EXPECT_THAT(encode(t, "\u00E9cat"), ElementsAre(0xC3, 0xA9, 'c', 'a', 't'));
}

TEST(AddedTokens, StripsTakeWhiteSpace) {
  Json root = tiny_json();
  Json left = added_token(300, "<l>", false), right = added_token(301, "<r>", false);
  left["lstrip"] = true;
  right["rstrip"] = true;
  root["added_tokens"] = {left, right};
  const Tokenizer t = make(root);
  EXPECT_THAT(encode(t, "a \u00A0<l> b"), ElementsAre('a', 300, ' ', 'b'));
  EXPECT_THAT(encode(t, "a <r>\n\u3000b"), ElementsAre('a', ' ', 301, 'b'));
  EXPECT_THAT(encode(t, "<r>  <l>"), ElementsAre(301, 300));
  EXPECT_THAT(encode(t, "  <l>"), ElementsAre(300));
}

TEST(AddedTokens, ContradictionsAreRefused) {
  const auto with = [](std::vector<Json> list) {
    Json root = tiny_json();
    root["added_tokens"] = list;
    return make(root);
  };
  EXPECT_NO_THROW(with({added_token(300, "x1", true), added_token(300, "x1", true)}));
  EXPECT_NO_THROW(with({added_token('a', "a", false)}));
  expect_error(
      [&] {
        with({added_token(300, "x1", true), added_token(300, "x2", true)});
      },
      ErrorCode::InvalidModel, {"test/tokenizer.json", "$.added_tokens[1]", "x1", "x2", "300"});
  expect_error(
      [&] {
        with({added_token(300, "x1", true), added_token(301, "x1", true)});
      },
      ErrorCode::InvalidModel, {"$.added_tokens[1]", "x1"});
  expect_error([&] { with({added_token('a', "x1", true)}); }, ErrorCode::InvalidModel, {"x1", "\"a\""});
  expect_error([&] { with({added_token(300, "a", true)}); }, ErrorCode::InvalidModel, {"\"a\"", "300"});
  expect_error([&] { with({added_token(-1, "x1", true)}); }, ErrorCode::InvalidModel, {"x1"});
  expect_error([&] { with({added_token(1 << 24, "x1", true)}); }, ErrorCode::InvalidModel, {"x1"});
  expect_error([&] { with({added_token(300, "", true)}); }, ErrorCode::InvalidModel, {"content", "empty"});
  expect_error([&] { with({added_token(300, std::string(600, 'x'), true)}); }, ErrorCode::Unsupported,
               {"600 bytes"});
}

}  // namespace
}  // namespace moeflux::text
