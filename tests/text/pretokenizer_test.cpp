#include "text/pretokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "text/tokenizer_fixtures.h"

namespace moeflux::text {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

const std::string kSuffixes = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const std::string kWhite = R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

Json split(const std::string& regex, const std::string& behavior = "Isolated", bool invert = false) {
  return {{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", behavior}, {"invert", invert}};
}

Json sequence(std::vector<Json> stages) { return {{"type", "Sequence"}, {"pretokenizers", stages}}; }

// The o200k form; `not_han` restricts the letter classes, `tail` ends a run of punctuation.
std::string o200k(const std::string& not_han, const std::string& tail) {
  const std::string upper = R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M})" + not_han + "]";
  const std::string lower = R"([\p{Ll}\p{Lm}\p{Lo}\p{M})" + not_han + "]";
  const std::string lead = R"([^\r\n\p{L}\p{N}]?)";
  return lead + upper + "*" + lower + "+" + kSuffixes + "?|" + lead + upper + "+" + lower + "*" + kSuffixes +
         R"(?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+)" + tail + "|" + kWhite;
}

Json family(const std::string& name) {
  if (name == "qwen2")
    return split(kSuffixes + R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" + kWhite);
  if (name == "qwen35")
    return split(kSuffixes + R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|)" +
                 kWhite);
  if (name == "glm4_cl100k")
    return split(kSuffixes + R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" + kWhite);
  if (name == "o200k") return split(o200k("", R"([\r\n/]*)"));
  if (name == "kimi_k2") return split(R"([\p{Han}]+|)" + o200k(R"(&&[^\p{Han}])", R"([\r\n]*)"));
  if (name == "deepseek_v3")
    return sequence(
        {split(R"(\p{N}{1,3})"), split("[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"),
         split(R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
               R"(| ?[\p{P}\p{S}]+[\r\n]*|)" +
               kWhite)});
  return {};
}

TEST(PreTokenizer, FamiliesSplitAsTheVectorsSay) {
  const Json vectors = parse_json(read_file(source_dir() / "tests/fixtures/vectors.json"), "vectors.json");
  int compared = 0;
  for (const Json& item : vectors.at("pretokenize")) {
    const auto text = item.at("text").get<std::string>();
    for (const auto& [name, want] : item.items()) {
      if (name == "text") continue;
      const Json description = family(name);
      ASSERT_FALSE(description.is_null()) << "no patterns for the column " << name;
      EXPECT_EQ(pieces_of(make_pre_tokenizer(description), text), want.get<std::vector<std::string>>())
          << name << ": " << text;
      ++compared;
    }
  }
  EXPECT_GE(compared, 48);
}

TEST(PreTokenizer, BehaviorsArrangeMatchesAndGaps) {
  const auto cut = [](const std::string& behavior, bool invert, const std::string& text) {
    return pieces_of(make_pre_tokenizer(split("-", behavior, invert)), text);
  };
  EXPECT_THAT(cut("Isolated", false, "a-b--c-"), ElementsAre("a", "-", "b", "-", "-", "c", "-"));
  EXPECT_THAT(cut("Removed", false, "a-b--c-"), ElementsAre("a", "b", "c"));
  EXPECT_THAT(cut("MergedWithPrevious", false, "a-b--c-"), ElementsAre("a-", "b-", "-", "c-"));
  EXPECT_THAT(cut("MergedWithNext", false, "a-b--c-"), ElementsAre("a", "-b", "-", "-c", "-"));
  EXPECT_THAT(cut("Contiguous", false, "a-b--c-"), ElementsAre("a", "-", "b", "--", "c", "-"));
  EXPECT_THAT(cut("Removed", true, "a-b--c-"), ElementsAre("-", "-", "-", "-"));
  EXPECT_THAT(cut("MergedWithPrevious", false, "-a"), ElementsAre("-", "a"));
  EXPECT_THAT(cut("Isolated", false, ""), IsEmpty());
}

TEST(PreTokenizer, StringPatternsAreLiteral) {
  const Json dots = {{"type", "Split"}, {"pattern", {{"String", "."}}}, {"behavior", "Isolated"}};
  EXPECT_THAT(pieces_of(make_pre_tokenizer(dots), "a.b"), ElementsAre("a", ".", "b"));
}

TEST(PreTokenizer, ZeroLengthMatchesCutButMakeNoPiece) {
  EXPECT_THAT(pieces_of(make_pre_tokenizer(split("(?=b)")), "abab"), ElementsAre("a", "ba", "b"));
  EXPECT_THAT(pieces_of(make_pre_tokenizer(split("x*")), "axxb"), ElementsAre("a", "xx", "b"));
}

TEST(PreTokenizer, LookAheadEndsWithThePiece) {
  // After the first stage the blanks are a piece of their own, so \s+(?!\S) takes all of them.
  EXPECT_THAT(pieces_of(make_pre_tokenizer(sequence({split("b"), split(kWhite)})), "a   b"),
              ElementsAre("a", "   ", "b"));
  EXPECT_THAT(pieces_of(make_pre_tokenizer(split(kWhite)), "a   b"), ElementsAre("a", "  ", " ", "b"));
}

TEST(PreTokenizer, Digits) {
  const Json each = {{"type", "Digits"}, {"individual_digits", true}};
  const Json runs = {{"type", "Digits"}, {"individual_digits", false}};
  EXPECT_THAT(pieces_of(make_pre_tokenizer(each), "a12\u0663"), ElementsAre("a", "1", "2", "\u0663"));
  EXPECT_THAT(pieces_of(make_pre_tokenizer(runs), "12a34\u00BDb"), ElementsAre("12", "a", "34\u00BD", "b"));
}

TEST(PreTokenizer, ByteLevelSpellsBytes) {
  const Json plain = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  EXPECT_THAT(pieces_of(make_pre_tokenizer(plain), "a \u00E9\n"), ElementsAre("a\u0120\u00C3\u00A9\u010A"));
  const Json prefix = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"use_regex", true}};
  EXPECT_THAT(pieces_of(make_pre_tokenizer(prefix), "It's  12"),
              ElementsAre("\u0120It", "'s", "\u0120", "\u012012"));
  EXPECT_THAT(pieces_of(make_pre_tokenizer(prefix), " x"), ElementsAre("\u0120x"));
  EXPECT_EQ(make_pre_tokenizer(prefix).byte_level_stages(), 1u);
  EXPECT_EQ(make_pre_tokenizer(split("a")).byte_level_stages(), 0u);
}

TEST(PreTokenizer, CaseFoldingIsAsciiOnly) {
  EXPECT_THAT(pieces_of(make_pre_tokenizer(split(kSuffixes)), "x'S"), ElementsAre("x", "'S"));
  EXPECT_THAT(pieces_of(make_pre_tokenizer(split(kSuffixes)), "x'\u017F"), ElementsAre("x'\u017F"));
}

TEST(PreTokenizer, UnicodeClassesReachBeyondAscii) {
  EXPECT_THAT(pieces_of(make_pre_tokenizer(split(R"(\s)")), "a\u00A0b\u2003c\u3000d\u0085e"),
              ElementsAre("a", "\u00A0", "b", "\u2003", "c", "\u3000", "d", "\u0085", "e"));
  EXPECT_THAT(pieces_of(make_pre_tokenizer(split(R"(\p{Lu})")), "\u00C4\u00E4\u0416"),
              ElementsAre("\u00C4", "\u00E4", "\u0416"));
}

TEST(PreTokenizer, RefusesWhatItDoesNotKnow) {
  expect_error([] { make_pre_tokenizer({{"type", "Metaspace"}}); }, ErrorCode::Unsupported, {"Metaspace"});
  expect_error([] { make_pre_tokenizer(split("a", "Sideways")); }, ErrorCode::Unsupported,
               {"$.behavior", "Sideways"});
  expect_error([] { make_pre_tokenizer(split("(a")); }, ErrorCode::InvalidModel, {"$.pattern.Regex", "(a"});
  expect_error([] { make_pre_tokenizer(split("\\p{Nonsense}")); }, ErrorCode::InvalidModel, {"Nonsense"});
  expect_error([] { make_pre_tokenizer(split("[b-a]")); }, ErrorCode::InvalidModel, {"[b-a]"});
  expect_error([] { make_pre_tokenizer(split(std::string(1000, '('))); }, ErrorCode::Unsupported, {"nested"});
  expect_error([] { make_pre_tokenizer(split(std::string(100'000, 'a'))); }, ErrorCode::Unsupported,
               {"100000 bytes"});
  expect_error(
      [] {
        make_pre_tokenizer(sequence({split("a"), {{"type", "Split"}}}));
      },
      ErrorCode::InvalidModel, {"$.pretokenizers[1]", "pattern"});
  expect_error(
      [] {
        make_pre_tokenizer({{"type", "Split"}, {"pattern", {{"String", ""}}}, {"behavior", "Isolated"}});
      },
      ErrorCode::InvalidModel, {"empty"});
}

// Patterns that would take for ever are given up, however the work is spread: in one match, over
// many starts, or over many pieces.
TEST(PreTokenizer, RunawayPatternsAreGivenUp) {
  const double start = cpu_seconds();
  // The engine first looks for letters that a match must have, so the text has them, out of reach.
  const std::string many = std::string(5000, 'a') + "-bc";
  expect_error([&] { pieces_of(make_pre_tokenizer(split("(?:a+a+)+b")), many); }, ErrorCode::InvalidArgument,
               {"given up"});
  expect_error([&] { pieces_of(make_pre_tokenizer(split("^(a|aa)+c")), many); }, ErrorCode::InvalidArgument,
               {"given up"});
  std::string lines;
  for (int i = 0; i < 20'000; ++i) lines += std::string(22, 'a') + "-b\n";
  expect_error(
      [&] {
        pieces_of(make_pre_tokenizer(sequence({split("\n"), split("^(?:a+a+)+b")})), lines);
      },
      ErrorCode::InvalidArgument, {"given up"});
  expect_error([] { pieces_of(make_pre_tokenizer(split("\\s+$")), std::string(1'000'000, ' ') + "x"); },
               ErrorCode::InvalidArgument, {"given up"});
  EXPECT_LT(cpu_seconds() - start, 60.0);
}

// Long runs are ordinary texts for ordinary patterns.
TEST(PreTokenizer, LongRunsPassEveryFamily) {
  for (const char* name : {"qwen2", "qwen35", "glm4_cl100k", "o200k", "deepseek_v3", "kimi_k2"})
    for (const std::string& unit :
         {std::string("a"), std::string("A"), std::string(" "), std::string("\n"), std::string("7"),
          std::string("-"), std::string("\u4E2D"), std::string("\u0301")}) {
      std::string text;
      while (text.size() < 300'000) text += unit;
      text += "x";
      std::string joined;
      for (const std::string& piece : pieces_of(make_pre_tokenizer(family(name)), text)) joined += piece;
      EXPECT_TRUE(joined == text) << name << " " << unit;
    }
}

}  // namespace
}  // namespace moeflux::text
