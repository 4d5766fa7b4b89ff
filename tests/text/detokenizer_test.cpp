#include "text/detokenizer.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "text/tokenizer_fixtures.h"

namespace moeflux::text {
namespace {

// One token per byte, so that the tests choose where a stream is cut.
const Tokenizer& byte_tokenizer() {
  static const Tokenizer tokenizer = [] {
    Json root = tiny_json();
    root["added_tokens"] =
        Json::array({added_token(256, "<|end|>", true), added_token(257, "<think>", false)});
    return make(root);
  }();
  return tokenizer;
}

std::vector<TokenId> ids_of(std::string_view bytes) {
  std::vector<TokenId> ids;
  for (const char c : bytes) ids.push_back(static_cast<TokenId>(static_cast<unsigned char>(c)));
  return ids;
}

// Streams the ids; every part must be valid UTF-8 and the whole what decode() says.
std::string stream(const Tokenizer& t, const std::vector<TokenId>& ids, bool skip_special) {
  StreamDecoder decoder(t, skip_special);
  std::string all;
  for (const TokenId id : ids) {
    const std::string part = decoder.push(id);
    EXPECT_TRUE(is_valid_utf8(part));
    all += part;
  }
  all += decoder.finish();
  EXPECT_EQ(all, t.decode(ids, skip_special));
  EXPECT_EQ(decoder.finish(), "");
  return all;
}

TEST(StreamDecoder, HoldsBackUnfinishedCharacters) {
  StreamDecoder d(byte_tokenizer(), false);
  const auto push = [&](int byte) { return d.push(static_cast<TokenId>(byte)); };
  EXPECT_EQ(push('a'), "a");
  EXPECT_EQ(push(0xF0), "");
  EXPECT_EQ(push(0x9F), "");
  EXPECT_EQ(push(0x98), "");
  EXPECT_EQ(push(0x80), "\U0001F600");
  EXPECT_EQ(push(0xE4), "");
  EXPECT_EQ(push('b'), "\uFFFDb");  // the sequence is broken for good
  EXPECT_EQ(push(0xFF), "\uFFFD");
  EXPECT_EQ(push(0xC3), "");
  EXPECT_EQ(d.finish(), "\uFFFD");
  EXPECT_EQ(push('c'), "c");
}

TEST(StreamDecoder, EveryTruncationOfMultiByteText) {
  const std::string text = "a\u00E9\u65E5\U0001F469\u200D\U0001F467 \U0001F1FA\U0001F1F8\u0939\u093F";
  for (std::size_t n = 0; n <= text.size(); ++n) {
    const std::string part = text.substr(0, n);
    const std::size_t complete = complete_utf8_prefix(part);
    EXPECT_EQ(stream(byte_tokenizer(), ids_of(part), false),
              text.substr(0, complete) + (complete < n ? "\uFFFD" : ""));
  }
}

// All ways to cut a text into tokens: the cuts are the bits of a number.
TEST(StreamDecoder, EverySplitOfAMultiByteText) {
  const std::string text = "\u00E9\U0001F600\u65E5!";  // 10 bytes
  for (unsigned cuts = 0; cuts < (1u << (text.size() - 1)); ++cuts) {
    Json root = tiny_json();
    std::vector<TokenId> ids;
    for (std::size_t begin = 0, i = 1; i <= text.size(); ++i) {
      if (i < text.size() && ((cuts >> (i - 1)) & 1) == 0) continue;
      Json& vocab = root["model"]["vocab"];
      const std::string key = spelled(text.substr(begin, i - begin));
      if (!vocab.contains(key)) vocab[key] = vocab.size();
      ids.push_back(static_cast<TokenId>(vocab[key].get<int>()));
      begin = i;
    }
    ASSERT_EQ(stream(make(root), ids, false), text) << cuts;
  }
}

TEST(StreamDecoder, SkipsSpecialTokensOnRequest) {
  const auto ids = tokens({'a', 256, 257, 'b'});
  EXPECT_EQ(stream(byte_tokenizer(), ids, true), "a<think>b");
  EXPECT_EQ(stream(byte_tokenizer(), ids, false), "a<|end|><think>b");
}

TEST(StreamDecoder, AnUnknownIdChangesNothing) {
  StreamDecoder d(byte_tokenizer(), true);
  EXPECT_EQ(d.push(TokenId{0xC3}), "");
  expect_error([&] { d.push(TokenId{5000}); }, ErrorCode::InvalidArgument, {"5000"});
  EXPECT_EQ(d.push(TokenId{0xA9}), "\u00E9");
}

TEST(StreamDecoder, RandomBytesGiveWhatDecodeGives) {
  std::mt19937 random(11);
  // Bytes that begin, continue and break sequences, so that most of them are nearly right.
  const std::string bytes = "a\x80\x9F\xA0\xBF\xC2\xE0\xE4\xED\xF0\xF4\xFF";
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (std::size_t n = random() % 12; n > 0; --n) text.push_back(bytes[random() % bytes.size()]);
    ASSERT_EQ(stream(byte_tokenizer(), ids_of(text), false), replace_invalid_utf8(text));
  }
}

}  // namespace
}  // namespace moeflux::text
