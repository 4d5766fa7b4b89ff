#include "text/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>

#include "text/byte_alphabet.h"

namespace moeflux::text {
namespace {

const std::string kFffd = "\xEF\xBF\xBD";

TEST(Utf8, AcceptsEveryCodePointAndNothingElse) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_utf8(text, c);
    const Utf8Step step = utf8_step(text, 0);
    ASSERT_EQ(step.status, Utf8Status::Valid) << std::uint32_t(c);
    ASSERT_EQ(step.code_point, c);
    ASSERT_EQ(step.size, text.size());
  }
  for (const char* bad :
       {"\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF", "\xED\xA0\x80", "\xED\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\x80", "\xBF", "\xFE", "\xFF"})
    EXPECT_FALSE(is_valid_utf8(bad));
}

TEST(Utf8, CountsTwoByteSequencesExactly) {
  int valid = 0;
  for (int a = 0; a < 256; ++a)
    for (int b = 0; b < 256; ++b) valid += is_valid_utf8(std::string{char(a), char(b)}) ? 1 : 0;
  EXPECT_EQ(valid, 128 * 128 + 30 * 64);  // two ASCII, or a lead C2..DF with its continuation
}

TEST(Utf8, ReplacesPerMaximalSubpart) {
  // The example of the Unicode standard, section 3.9 (table 3-8), and its neighbours.
  EXPECT_EQ(replace_invalid_utf8("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64"),
            "a" + kFffd + kFffd + kFffd + "b" + kFffd + "c" + kFffd + kFffd + "d");
  EXPECT_EQ(replace_invalid_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            kFffd + kFffd + kFffd + kFffd + kFffd + kFffd + kFffd + kFffd + "A");
  EXPECT_EQ(replace_invalid_utf8("\xED\xA0\x80"), kFffd + kFffd + kFffd);
  EXPECT_EQ(replace_invalid_utf8("x\xF0\x9F\x98"), "x" + kFffd);
  EXPECT_EQ(replace_invalid_utf8(""), "");
}

TEST(Utf8, CompletePrefixHoldsBackOnlyWhatCanBeMended) {
  EXPECT_EQ(complete_utf8_prefix(""), 0u);
  EXPECT_EQ(complete_utf8_prefix("abc"), 3u);
  EXPECT_EQ(complete_utf8_prefix("ab\xC3"), 2u);
  EXPECT_EQ(complete_utf8_prefix("ab\xC3\xA9"), 4u);
  EXPECT_EQ(complete_utf8_prefix("\xF0"), 0u);
  EXPECT_EQ(complete_utf8_prefix("\xF0\x9F"), 0u);
  EXPECT_EQ(complete_utf8_prefix("\xF0\x9F\x98"), 0u);
  EXPECT_EQ(complete_utf8_prefix("\xF0\x9F\x98\x80"), 4u);
  EXPECT_EQ(complete_utf8_prefix("\xF0\x80"), 2u);       // overlong: no hope
  EXPECT_EQ(complete_utf8_prefix("\xED\xA0"), 2u);       // a surrogate
  EXPECT_EQ(complete_utf8_prefix("a\x80\x80\x80"), 4u);  // continuations without a lead
  EXPECT_EQ(complete_utf8_prefix("\xE4\xB8\xAD\xE4"), 3u);
}

TEST(Utf8, ShownStringsAreShortEscapedAndValid) {
  EXPECT_EQ(shown("a\"b\n"), "\"a\\\"b\\x0a\"");
  std::string wide;
  for (int i = 0; i < 100; ++i) wide += "é";
  EXPECT_TRUE(is_valid_utf8(shown(wide)));
  EXPECT_TRUE(is_valid_utf8(shown("x" + wide)));
  EXPECT_LT(shown(wide).size(), 70u);
}

TEST(ByteAlphabet, IsABijectionWithTheKnownCorners) {
  EXPECT_EQ(byte_to_char(0x20), U'\u0120');
  EXPECT_EQ(byte_to_char(0x0A), U'\u010A');
  EXPECT_EQ(byte_to_char(0x00), U'\u0100');
  EXPECT_EQ(byte_to_char(0x7F), U'\u0121');
  EXPECT_EQ(byte_to_char(0xAD), U'\u0143');
  EXPECT_EQ(byte_to_char('A'), U'A');
  EXPECT_EQ(byte_to_char(0xFF), U'\u00FF');
  int reached = 0;
  for (char32_t c = 0; c < 0x400; ++c) reached += char_to_byte(c) ? 1 : 0;
  EXPECT_EQ(reached, 256);
  for (int b = 0; b < 256; ++b) {
    const auto byte = static_cast<std::uint8_t>(b);
    EXPECT_EQ(char_to_byte(byte_to_char(byte)), std::optional(byte));
  }
  EXPECT_EQ(char_to_byte(U' '), std::nullopt);
}

TEST(ByteAlphabet, UnspellsWordsAndKeepsLiterals) {
  EXPECT_EQ(unspell("Ġthe"), " the");
  EXPECT_EQ(unspell("Ã©"), "é");
  EXPECT_EQ(unspell("a b"), "a b");              // a space is outside the alphabet
  EXPECT_EQ(unspell("<｜end｜>"), "<｜end｜>");  // so is a fullwidth bar
  std::string all, written;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  append_spelled(written, all);
  EXPECT_TRUE(is_valid_utf8(written));
  EXPECT_EQ(unspell(written), all);
}

}  // namespace
}  // namespace moeflux::text
