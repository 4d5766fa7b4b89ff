// Tokenizers for tests: the bundled demo model's, and small ones made to order.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "text/byte_alphabet.h"
#include "text/json_node.h"
#include "text/pretokenizer.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace moeflux::text {

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return std::string(std::istreambuf_iterator<char>(in), {});
}

inline std::filesystem::path source_dir() { return MOEFLUX_SOURCE_DIR; }

inline const std::string& demo_json() {
  static const std::string text = read_file(source_dir() / "models/demo/tokenizer.json");
  return text;
}

inline const Tokenizer& demo_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::from_json(demo_json(), "", "models/demo");
  return tokenizer;
}

inline std::string spelled(std::string_view bytes) {
  std::string out;
  append_spelled(out, bytes);
  return out;
}

// A complete tokenizer.json: the 256 bytes as tokens 0..255, no merges, one piece per text.
inline Json tiny_json() {
  Json vocab = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[spelled(std::string(1, static_cast<char>(byte)))] = byte;
  Json root;
  root["added_tokens"] = Json::array();
  root["normalizer"] = nullptr;
  root["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  root["post_processor"] = nullptr;
  root["decoder"] = {{"type", "ByteLevel"}};
  root["model"] = {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}};
  return root;
}

// Adds a merge and, under the next free id, its result.
inline void add_merge(Json& root, const std::string& left, const std::string& right) {
  Json& model = root["model"];
  if (!model["vocab"].contains(left + right)) model["vocab"][left + right] = model["vocab"].size();
  model["merges"].push_back({left, right});
}

inline Json added_token(int id, const std::string& content, bool special) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

inline Tokenizer make(const Json& root, const std::string& config = "") {
  return Tokenizer::from_json(root.dump(), config, "test");
}

inline std::vector<int> numbers(const std::vector<TokenId>& ids) {
  std::vector<int> out;
  for (const TokenId id : ids) out.push_back(raw(id));
  return out;
}

inline std::vector<TokenId> tokens(std::initializer_list<int> ids) {
  std::vector<TokenId> out;
  for (const int id : ids) out.push_back(static_cast<TokenId>(id));
  return out;
}

inline std::vector<std::string> pieces_of(const PreTokenizer& pre, std::string_view text) {
  MatchBudget budget(text.size());
  const PreTokens result = pre.run(text, budget);
  std::vector<std::string> out;
  for (std::size_t i = 0; i < result.pieces.size(); ++i) out.emplace_back(result.piece(i));
  return out;
}

inline PreTokenizer make_pre_tokenizer(const Json& description) {
  const JsonDocument document(description.dump(), "test");
  return PreTokenizer::parse(document.root());
}

// Processor time of this process: bounds on it hold on a busy machine too.
inline double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Runs the function, which must throw moeflux::Error with this code and a message that holds all of
// the words.
template <class F>
void expect_error(F&& f, ErrorCode code, std::initializer_list<std::string_view> words) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(error_code_name(e.code()), std::string(error_code_name(code))) << e.what();
    for (const std::string_view word : words)
      EXPECT_NE(std::string_view(e.what()).find(word), std::string_view::npos)
          << "no \"" << word << "\" in: " << e.what();
    return;
  }
  ADD_FAILURE() << "no error, expected " << error_code_name(code);
}

}  // namespace moeflux::text
