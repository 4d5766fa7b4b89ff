#include "text/bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "text/tokenizer_fixtures.h"

namespace moeflux::text {
namespace {

using testing::ElementsAre;

std::vector<int> ids_of(const Tokenizer& tokenizer, std::string_view text) {
  return numbers(tokenizer.encode(text, {}));
}

TEST(Bpe, LowestRankFirstLeftmostAmongEquals) {
  Json root = tiny_json();
  add_merge(root, "b", "c");   // 256
  add_merge(root, "a", "b");   // 257
  add_merge(root, "a", "a");   // 258
  add_merge(root, "aa", "a");  // 259
  const Tokenizer t = make(root);
  EXPECT_THAT(ids_of(t, "abc"), ElementsAre('a', 256));
  EXPECT_THAT(ids_of(t, "ab"), ElementsAre(257));
  EXPECT_THAT(ids_of(t, "aaa"), ElementsAre(259));
  EXPECT_THAT(ids_of(t, "aaaa"), ElementsAre(258, 258));
  EXPECT_THAT(ids_of(t, "aaab"), ElementsAre(258, 257));
}

TEST(Bpe, BothFormsOfMergesAreTheSame) {
  Json pairs = tiny_json();
  add_merge(pairs, "h", "e");
  add_merge(pairs, "\u0120", "he");
  Json lines = pairs;
  lines["model"]["merges"] = {"h e", "\u0120 he"};
  EXPECT_EQ(ids_of(make(pairs), " hehe he"), ids_of(make(lines), " hehe he"));
  EXPECT_THAT(ids_of(make(lines), " he"), ElementsAre(257));
}

TEST(Bpe, IgnoreMergesTakesWholePieces) {
  Json root = tiny_json();
  root["model"]["vocab"]["abc"] = 256;
  EXPECT_THAT(ids_of(make(root), "abc"), ElementsAre('a', 'b', 'c'));
  root["model"]["ignore_merges"] = true;
  EXPECT_THAT(ids_of(make(root), "abc"), ElementsAre(256));
  EXPECT_THAT(ids_of(make(root), "abcd"), ElementsAre('a', 'b', 'c', 'd'));
}

TEST(Bpe, AMissingCharacterIsAnErrorNotAGap) {
  Json root = tiny_json();
  root["model"]["vocab"].erase("x");
  const Tokenizer t = make(root);
  EXPECT_THAT(ids_of(t, "ab"), ElementsAre('a', 'b'));
  expect_error([&] { t.encode("axb", {}); }, ErrorCode::InvalidModel, {"tokenizer.json", "\"x\""});
}

// The same definition without heap or cache: find the best pair by looking at all of them.
std::vector<std::string> merge_naively(const std::string& piece,
                                       const std::map<std::pair<std::string, std::string>, int>& ranks) {
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  for (;;) {
    std::size_t best = 0;
    int best_rank = -1;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto it = ranks.find({parts[i], parts[i + 1]});
      if (it != ranks.end() && (best_rank < 0 || it->second < best_rank)) {
        best = i;
        best_rank = it->second;
      }
    }
    if (best_rank < 0) return parts;
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(Bpe, AgreesWithTheNaiveDefinitionOnRandomMerges) {
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    Json root = tiny_json();
    std::vector<std::string> known = {"a", "b", "c"};
    std::map<std::pair<std::string, std::string>, int> ranks;
    for (int i = 0; i < 30; ++i) {
      const std::string left = known[random() % known.size()], right = known[random() % known.size()];
      if (left.size() + right.size() > 8 || !ranks.emplace(std::pair(left, right), int(ranks.size())).second)
        continue;
      add_merge(root, left, right);
      known.push_back(left + right);
    }
    const Tokenizer t = make(root);
    for (int i = 0; i < 50; ++i) {
      std::string piece;
      for (std::size_t n = 1 + random() % 90; n > 0; --n)
        piece.push_back(static_cast<char>('a' + random() % 3));
      std::vector<std::string> got;
      for (const TokenId id : t.encode(piece, {})) got.push_back(t.token_bytes(id));
      ASSERT_EQ(got, merge_naively(piece, ranks)) << piece;
    }
  }
}

TEST(Bpe, AMegabyteInOnePieceIsQuick) {
  const Tokenizer& t = demo_tokenizer();
  std::string text;
  std::mt19937 random(3);
  while (text.size() < 1'000'000) text.push_back(static_cast<char>('a' + random() % 26));
  const double start = cpu_seconds();
  const auto ids = t.encode(text, {});
  EXPECT_LT(cpu_seconds() - start, 20.0);  // quadratic takes hours
  EXPECT_TRUE(t.decode(ids, false) == text);
}

// As large as the largest published vocabularies; the bound leaves room for sanitizers and slow machines.
TEST(Bpe, LoadsAQuarterMillionTokens) {
  Json root = tiny_json();
  std::string vocab = root["model"]["vocab"].dump();
  vocab.pop_back();
  std::string merges = "[";
  int id = 256;
  std::vector<std::string> level = {""};
  while (id < 250'000) {
    std::vector<std::string> next;
    for (const std::string& stem : level)
      for (char c = 'a'; c <= 'z' && id < 250'000; ++c) {
        next.push_back(stem + c);
        if (stem.empty()) continue;
        vocab += ",\"" + stem + c + "\":" + std::to_string(id++);
        merges += (merges.size() > 1 ? ",[\"" : "[\"") + stem + "\",\"" + c + "\"]";
      }
    level = std::move(next);
  }
  root["model"]["vocab"] = "@V";
  root["model"]["merges"] = "@M";
  std::string text = root.dump();
  text.replace(text.find("\"@V\""), 4, vocab + "}");
  text.replace(text.find("\"@M\""), 4, merges + "]");
  const double start = cpu_seconds();
  const Tokenizer t = Tokenizer::from_json(text, "", "test");
  const double took = cpu_seconds() - start;
  RecordProperty("load_ms", static_cast<int>(1000 * took));
  EXPECT_LT(took, 10.0);
  EXPECT_EQ(t.vocab_size(), 250'000u);
  EXPECT_EQ(t.decode(t.encode("hello", {}), false), "hello");
  EXPECT_EQ(t.encode("abc", {}).size(), 1u);
}

}  // namespace
}  // namespace moeflux::text
