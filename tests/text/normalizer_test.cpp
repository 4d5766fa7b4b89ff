#include "text/normalizer.h"

#include <gtest/gtest.h>

#include <string>

#include "text/tokenizer_fixtures.h"

namespace moeflux::text {
namespace {

Normalizer parse(const Json& description) {
  const JsonDocument document(description.dump(), "test");
  return Normalizer::parse(document.root());
}

std::string normalized(const Json& description, const std::string& text) {
  MatchBudget budget(text.size());
  return parse(description).apply(text, budget);
}

TEST(NormalizeUnicode, ComposesAndDecomposes) {
  EXPECT_EQ(normalize_unicode("e\u0301", UnicodeForm::Nfc), "\u00E9");
  EXPECT_EQ(normalize_unicode("\u00E9", UnicodeForm::Nfd), "e\u0301");
  EXPECT_EQ(normalize_unicode("\u212B", UnicodeForm::Nfc), "\u00C5");              // Angstrom sign
  EXPECT_EQ(normalize_unicode("\u1100\u1161\u11A8", UnicodeForm::Nfc), "\uAC01");  // Hangul
  EXPECT_EQ(normalize_unicode("\uAC01", UnicodeForm::Nfd), "\u1100\u1161\u11A8");
  EXPECT_EQ(normalize_unicode("q\u0307\u0323", UnicodeForm::Nfc), "q\u0323\u0307");  // canonical order
  EXPECT_EQ(normalize_unicode("\u0958", UnicodeForm::Nfc), "\u0915\u093C");          // composition exclusion
  EXPECT_EQ(normalize_unicode("\uFB01\u00B2", UnicodeForm::Nfc), "\uFB01\u00B2");
  EXPECT_EQ(normalize_unicode("\uFB01\u00B2", UnicodeForm::Nfkc), "fi2");
  EXPECT_EQ(normalize_unicode("\u1E9B\u0323", UnicodeForm::Nfkc), "\u1E69");
  EXPECT_EQ(normalize_unicode("\u1E9B\u0323", UnicodeForm::Nfkd), "s\u0323\u0307");
}

TEST(NormalizeUnicode, KeepsWhatIsInForm) {
  using namespace std::string_literals;
  const std::string text = "plain\0 text, na\u00EFve \u65E5\u672C \U0001F469\u200D\U0001F467 \uFFFF"s;
  for (const auto form : {UnicodeForm::Nfc, UnicodeForm::Nfkc})
    EXPECT_EQ(normalize_unicode(text, form), text);
  EXPECT_EQ(normalize_unicode("", UnicodeForm::Nfc), "");
}

TEST(NormalizeUnicode, LongRunsOfMarksTakeNoQuadraticTime) {
  std::string text = "a";
  for (int i = 0; i < 100'000; ++i) text += i % 2 == 0 ? "\u0301" : "\u0323";
  const double start = cpu_seconds();
  const std::string out = normalize_unicode(text, UnicodeForm::Nfd);
  EXPECT_LT(cpu_seconds() - start, 5.0);
  ASSERT_EQ(out.size(), text.size());
  EXPECT_EQ(out.substr(0, 3), "a\u0323");
  EXPECT_EQ(out.substr(out.size() - 2), "\u0301");
}

TEST(Normalizer, RunsItsStepsInOrder) {
  const Json nfc = {{"type", "NFC"}};
  EXPECT_EQ(normalized(nfc, "e\u0301"), "\u00E9");
  EXPECT_EQ(parse(nfc).description(), "NFC");
  const Json empty = {{"type", "Sequence"}, {"normalizers", Json::array()}};
  EXPECT_EQ(normalized(empty, "e\u0301"), "e\u0301");
  EXPECT_EQ(parse(empty).description(), "no normalizer");

  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", "ab"}}}, {"content", "X"}};
  const Json regex = {{"type", "Replace"}, {"pattern", {{"Regex", " +"}}}, {"content", "_"}};
  const Json prepend = {{"type", "Prepend"}, {"prepend", ">"}};
  const Json all = {{"type", "Sequence"}, {"normalizers", {replace, regex, prepend}}};
  EXPECT_EQ(normalized(all, "ab  abab c"), ">X_XX_c");
  EXPECT_EQ(normalized(all, ""), "");
  EXPECT_EQ(parse(all).description(), "Replace + Replace + Prepend");
}

TEST(Normalizer, RefusesWhatItDoesNotKnow) {
  expect_error([] { parse({{"type", "Lowercase"}}); }, ErrorCode::Unsupported, {"test: $", "Lowercase"});
  expect_error([] { parse({{"kind", "NFC"}}); }, ErrorCode::InvalidModel, {"\"type\" is missing"});
  expect_error(
      [] {
        parse({{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "Strip"}}}}});
      },
      ErrorCode::Unsupported, {"$.normalizers[1]", "Strip"});
  Json deep = {{"type", "NFC"}};
  for (int i = 0; i < 20; ++i) deep = {{"type", "Sequence"}, {"normalizers", Json::array({deep})}};
  expect_error([&] { parse(deep); }, ErrorCode::Unsupported, {"nested"});
}

TEST(Normalizer, ReplacementsCannotExplode) {
  const Json grow = {{"type", "Replace"}, {"pattern", {{"Regex", "."}}}, {"content", std::string(64, 'x')}};
  const Json twice = {{"type", "Sequence"}, {"normalizers", {grow, grow, grow}}};
  expect_error([&] { normalized(twice, std::string(10'000, 'a')); }, ErrorCode::InvalidArgument,
               {"normalizer"});
}

}  // namespace
}  // namespace moeflux::text
