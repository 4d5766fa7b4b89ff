// Random input with fixed seeds: texts that must survive the round trip, and files that must load or be
// refused.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "text/normalizer.h"
#include "text/tokenizer_fixtures.h"

namespace moeflux::text {
namespace {

// Code points from the ranges that tokenizers treat differently.
std::string random_text(std::mt19937& random) {
  const auto in = [&](unsigned low, unsigned high) {
    return static_cast<char32_t>(low + random() % (high - low + 1));
  };
  std::string text;
  for (std::size_t n = random() % 40; n > 0; --n) {
    char32_t c = 0;
    switch (random() % 10) {
      case 0:
        c = in(0, 0x1F);
        break;
      case 1:
        c = U" \n\r\t\u00A0\u3000"[random() % 6];
        break;
      case 2:
        c = in('0', '9');
        break;
      case 3:
        c = in(0x21, 0x7E);
        break;
      case 4:
        c = in(0x80, 0x24F);
        break;
      case 5:
        c = in(0x300, 0x36F);
        break;
      case 6:
        c = in(0x900, 0x97F);
        break;
      case 7:
        c = in(0x4E00, 0x9FFF);
        break;
      case 8:
        c = in(0x1F300, 0x1FAFF);
        break;
      default:
        c = in(0xAC00, 0x10FFFF);
        break;
    }
    if (c < 0xD800 || c > 0xDFFF) append_utf8(text, c);
  }
  return text;
}

TEST(TokenizerFuzz, ValidTextSurvivesTheRoundTrip) {
  const Tokenizer& t = demo_tokenizer();
  std::mt19937 random(1);
  for (int round = 0; round < 4000; ++round) {
    const std::string text = normalize_unicode(random_text(random), UnicodeForm::Nfc);
    ASSERT_EQ(normalize_unicode(text, UnicodeForm::Nfc), text);
    ASSERT_EQ(t.decode(t.encode(text, {}), false), text);
    ASSERT_EQ(t.decode(t.encode(text, {.parse_special = true}), false), text);
  }
}

TEST(TokenizerFuzz, BrokenBytesDecodeToTheMendedText) {
  const Tokenizer& t = demo_tokenizer();
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::string text = random_text(random);
    for (std::size_t n = random() % 6; n > 0 && !text.empty(); --n)
      text[random() % text.size()] = static_cast<char>(random());
    ASSERT_EQ(t.decode(t.encode(text, {}), false),
              normalize_unicode(replace_invalid_utf8(text), UnicodeForm::Nfc));
  }
}

TEST(TokenizerFuzz, ChangedFilesLoadOrAreRefused) {
  // Few tokens keep a file small, so that most changes hit its structure.
  Json root = parse_json(demo_json(), "demo");
  root["model"]["merges"].erase(root["model"]["merges"].begin() + 20, root["model"]["merges"].end());
  Json vocab = Json::object();
  for (const auto& [token, id] : root["model"]["vocab"].items())
    if (id.get<int>() < 276) vocab[token] = id;
  root["model"]["vocab"] = vocab;
  const std::string good = root.dump();
  ASSERT_NO_THROW(Tokenizer::from_json(good, "", "test"));

  std::mt19937 random(5);
  int loaded = 0, refused = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string text = good;
    for (std::size_t n = 1 + random() % 3; n > 0; --n) {
      const std::size_t at = random() % text.size();
      switch (random() % 5) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 20);
          break;
        case 2:
          text.insert(at, text.substr(random() % text.size(), random() % 20));
          break;
        case 3:
          text[at] = "{}[]\",:0129-nt\\"[random() % 15];
          break;
        default:
          text.resize(1 + random() % text.size());
          break;
      }
      if (text.empty()) break;
    }
    try {
      const Tokenizer t = Tokenizer::from_json(text, "", "test");
      ++loaded;
      t.decode(t.encode("It's <|im_end|> a  test\n12", {.parse_special = true}), false);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(loaded, 20);
  EXPECT_GT(refused, 200);
}

// Patterns that multiply when they are taken literally must not do so when they are compiled.
TEST(TokenizerFuzz, CompilingDoesNotRunAway) {
  std::string repeats = "a", optional, classes;
  for (int i = 0; i < 100; ++i) repeats = "(?:" + repeats + "){2,1000}";
  for (int i = 0; i < 5000; ++i) optional += "(?:a|b|)?";
  for (int i = 0; i < 150; ++i) classes += "[\\p{L}&&[^\\p{Lu}]]{1,50}";
  const double start = cpu_seconds();
  for (const std::string& pattern :
       {repeats, optional, classes, "(?i:" + std::string(3000, 's') + ")", "(?<=" + optional + ")x"}) {
    try {
      const std::string text = "aaaabbbbAAAAssss";
      MatchBudget budget(text.size());
      Regex::compile(pattern, "test").find_all(text, budget);
    } catch (const Error&) {
    }
  }
  EXPECT_LT(cpu_seconds() - start, 60.0);
}

// Random strings over the alphabet of patterns: compile and match, or be refused.
TEST(TokenizerFuzz, RandomPatternsEndAndNeverCrash) {
  const std::vector<std::string> parts = {
      "a",     "b",   ".",   "\\s",  "\\p{L}", "[ab]", "[^a]", "(?:", "(",    ")",
      "*",     "+",   "?",   "|",    "$",      "^",    "(?=",  "(?!", "(?<=", "{2}",
      "{1,3}", "\\b", "\\K", "(?i:", "&&",     "[",    "]",    "\\1", "(?>",  "+?"};
  std::mt19937 random(9);
  int compiled = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string pattern;
    for (std::size_t n = 1 + random() % 12; n > 0; --n) pattern += parts[random() % parts.size()];
    try {
      const Regex regex = Regex::compile(pattern, "test");
      ++compiled;
      const std::string text = "aab ba\u00E9 aaaaaaaaaaaaaaaaab\n";
      MatchBudget budget(text.size());
      std::size_t done = 0;
      for (const Match& match : regex.find_all(text, budget)) {
        ASSERT_LE(done, match.begin) << pattern;
        ASSERT_LE(match.begin, match.end);
        ASSERT_LE(match.end, text.size());
        done = match.end;
      }
    } catch (const Error&) {
    }
  }
  EXPECT_GT(compiled, 200);
}

}  // namespace
}  // namespace moeflux::text
