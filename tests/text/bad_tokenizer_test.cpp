// Broken, hostile and foreign tokenizer.json files: each is refused with a message that names the place.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "text/tokenizer_fixtures.h"

namespace moeflux::text {
namespace {

void expect_refused(const std::function<void(Json&)>& change, ErrorCode code,
                    std::initializer_list<std::string_view> words) {
  Json root = tiny_json();
  add_merge(root, "a", "b");
  change(root);
  expect_error([&] { make(root); }, code, {"test/tokenizer.json"});
  expect_error([&] { make(root); }, code, words);
}

constexpr auto kBad = ErrorCode::InvalidModel;
constexpr auto kForeign = ErrorCode::Unsupported;

TEST(BadTokenizer, NotJson) {
  const std::string whole = tiny_json().dump();
  for (const std::size_t size : {std::size_t(0), std::size_t(1), whole.size() / 2, whole.size() - 1})
    expect_error([&] { Tokenizer::from_json(whole.substr(0, size), "", "test"); }, kBad,
                 {"test/tokenizer.json", "JSON"});
  for (const char* text :
       {"[]", "7", "null", "\"x\"", "{\"a\": \"\xFF\"}", "{\"a\": \"\\ud800\"}", "\xEF\xBB\xBF"})
    expect_error([&] { Tokenizer::from_json(text, "", "test"); }, kBad, {"test/tokenizer.json"});
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "[";
  expect_error([&] { Tokenizer::from_json(deep, "", "test"); }, kBad, {"JSON"});
  for (int i = 0; i < 100'000; ++i) deep += "]";
  expect_error([&] { Tokenizer::from_json("{\"x\":" + deep + "}", "", "test"); }, kBad, {"JSON"});
}

TEST(BadTokenizer, WrongTypes) {
  expect_refused([](Json& j) { j.erase("model"); }, kBad, {"\"model\" is missing"});
  expect_refused([](Json& j) { j["model"] = 3; }, kBad, {"$.model", "object"});
  expect_refused([](Json& j) { j["model"].erase("vocab"); }, kBad, {"$.model", "vocab"});
  expect_refused([](Json& j) { j["model"]["vocab"] = Json::array(); }, kBad, {"$.model.vocab", "object"});
  expect_refused([](Json& j) { j["model"]["vocab"] = Json::object(); }, kBad, {"$.model.vocab", "empty"});
  expect_refused([](Json& j) { j["model"]["merges"] = "a b"; }, kBad, {"$.model.merges", "array"});
  expect_refused([](Json& j) { j["model"].erase("merges"); }, kBad, {"merges"});
  expect_refused([](Json& j) { j["model"]["ignore_merges"] = 1; }, kBad, {"$.model.ignore_merges"});
  expect_refused([](Json& j) { j["added_tokens"] = Json::object(); }, kBad, {"$.added_tokens", "array"});
  expect_refused([](Json& j) { j["added_tokens"] = Json::array({1}); }, kBad, {"$.added_tokens[0]"});
  expect_refused(
      [](Json& j) {
        j["added_tokens"] = Json::array({Json{{"id", "x"}, {"content", "x"}}});
      },
      kBad, {"$.added_tokens[0].id"});
  expect_refused([](Json& j) { j["normalizer"] = "NFC"; }, kBad, {"$.normalizer"});
  expect_refused([](Json& j) { j["pre_tokenizer"]["use_regex"] = "yes"; }, kBad,
                 {"$.pre_tokenizer.use_regex"});
}

TEST(BadTokenizer, VocabularyIds) {
  expect_refused([](Json& j) { j["model"]["vocab"]["zz"] = 5; }, kBad,
                 {"$.model.vocab", "\"zz\"", "same id 5"});
  expect_refused([](Json& j) { j["model"]["vocab"]["zz"] = -1; }, kBad, {"\"zz\""});
  expect_refused([](Json& j) { j["model"]["vocab"]["zz"] = 1 << 24; }, kBad, {"\"zz\""});
  expect_refused([](Json& j) { j["model"]["vocab"]["zz"] = 18446744073709551615u; }, kBad, {"\"zz\""});
  expect_refused([](Json& j) { j["model"]["vocab"]["zz"] = 300.5; }, kBad, {"\"zz\""});
  expect_refused([](Json& j) { j["model"]["vocab"]["zz"] = "300"; }, kBad, {"\"zz\""});
  std::string twice = tiny_json().dump();
  twice.replace(twice.find("\"vocab\":{"), 9, "\"vocab\":{\"a\":900,");
  expect_error([&] { Tokenizer::from_json(twice, "", "test"); }, kBad, {"$.model.vocab", "\"a\"", "twice"});
}

TEST(BadTokenizer, Merges) {
  const auto merge = [](const Json& value) {
    return [value](Json& j) { j["model"]["merges"].push_back(value); };
  };
  expect_refused(merge({"qq", "a"}), kBad, {"$.model.merges", "merge 1", "\"qq\""});
  expect_refused(merge({"a", "qq"}), kBad, {"merge 1", "\"qq\""});
  expect_refused(merge({"x", "y"}), kBad, {"merge 1", "\"xy\""});
  expect_refused(merge("x y"), kBad, {"merge 1", "\"xy\""});
  for (const Json& value :
       {Json("ab"), Json("a b c"), Json("a "), Json(7), Json(nullptr), Json::array({"a"}),
        Json::array({"a", "b", "c"}), Json::array({1, 2}), Json::array(), Json::array({"", "a"})})
    expect_refused(merge(value), kBad, {"merge 1"});
}

TEST(BadTokenizer, ForeignKinds) {
  for (const char* type : {"WordPiece", "Unigram", "WordLevel"})
    expect_refused([&](Json& j) { j["model"]["type"] = type; }, kForeign, {"$.model", type});
  expect_refused([](Json& j) { j["model"]["byte_fallback"] = true; }, kForeign, {"byte_fallback"});
  expect_refused([](Json& j) { j["model"]["fuse_unk"] = true; }, kForeign, {"fuse_unk"});
  expect_refused([](Json& j) { j["model"]["unk_token"] = "<unk>"; }, kForeign, {"unk_token"});
  expect_refused([](Json& j) { j["model"]["dropout"] = 0.1; }, kForeign, {"dropout"});
  expect_refused([](Json& j) { j["model"]["continuing_subword_prefix"] = "##"; }, kForeign,
                 {"continuing_subword_prefix"});
  expect_refused([](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, kForeign,
                 {"end_of_word_suffix"});
  expect_refused(
      [](Json& j) {
        j["pre_tokenizer"] = {{"type", "Metaspace"}};
      },
      kForeign, {"$.pre_tokenizer", "Metaspace"});
  expect_refused([](Json& j) { j["pre_tokenizer"] = nullptr; }, kForeign, {"ByteLevel"});
  expect_refused(
      [](Json& j) {
        j["pre_tokenizer"] = {{"type", "Sequence"},
                              {"pretokenizers", {j["pre_tokenizer"], j["pre_tokenizer"]}}};
      },
      kForeign, {"ByteLevel", "found 2"});
  expect_refused(
      [](Json& j) {
        j["normalizer"] = {{"type", "BertNormalizer"}};
      },
      kForeign, {"$.normalizer", "BertNormalizer"});
  expect_refused(
      [](Json& j) {
        j["decoder"] = {{"type", "Metaspace"}};
      },
      kForeign, {"$.decoder", "Metaspace"});
  expect_refused([](Json& j) { j["decoder"] = nullptr; }, kForeign, {"decoder"});
}

TEST(BadTokenizer, HarmlessDefaultsAreAccepted) {
  Json root = tiny_json();
  for (const char* key : {"unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
    root["model"][key] = "";
  root["model"]["dropout"] = 0.0;
  root["decoder"] = {{"type", "Sequence"}, {"decoders", Json::array({root["decoder"]})}};
  root.erase("added_tokens");
  root["truncation"] = nullptr;
  EXPECT_EQ(numbers(make(root).encode("ab", {})), (std::vector<int>{'a', 'b'}));
}

TEST(BadTokenizer, RegularExpressions) {
  const auto regex = [](const std::string& pattern) {
    return [pattern](Json& j) {
      const Json split = {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
      j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, j["pre_tokenizer"]}}};
    };
  };
  for (const char* bad : {"(", "[a", "a{2,1}(", "\\p{Nothing}", "(?<n>a)\\k<m>", "*a", "(?z:a)"})
    expect_refused(regex(bad), kBad, {"$.pre_tokenizer.pretokenizers[0].pattern.Regex"});
  Json root = tiny_json();
  regex("(?:x+x+)+y")(root);
  const Tokenizer t = make(root);
  EXPECT_EQ(t.encode("xxy", {}).size(), 3u);
  expect_error([&] { t.encode(std::string(3000, 'x'), {}); }, ErrorCode::InvalidArgument,
               {"tokenizer.json", "given up"});
}

}  // namespace
}  // namespace moeflux::text
