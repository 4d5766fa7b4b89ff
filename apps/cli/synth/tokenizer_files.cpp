#include "cli/synth/tokenizer_files.h"

#include <string>

namespace moeflux::cli::synth {
namespace {

using Json = nlohmann::ordered_json;

std::string utf8(unsigned code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
}

// The printable stand-ins of byte-level vocabularies: bytes that print stand for themselves, the others for
// U+0100 on.
std::string stand_in(unsigned byte, unsigned& next) {
  const bool prints = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
  return utf8(prints ? byte : 0x100 + next++);
}

Json special(int id, const char* text) {
  return {{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

}  // namespace

Json tokenizer_json() {
  Json vocabulary = Json::object();
  unsigned next = 0;
  for (unsigned byte = 0; byte < 256; ++byte) vocabulary[stand_in(byte, next)] = byte;
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  return {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", Json::array({special(kEndOfText, "<|endoftext|>"), special(kTurnStart, "<|im_start|>"),
                                    special(kTurnEnd, "<|im_end|>")})},
      {"normalizer", nullptr},
      {"pre_tokenizer", byte_level},
      {"post_processor", nullptr},
      {"decoder", byte_level},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"ignore_merges", false},
        {"vocab", vocabulary},
        {"merges", Json::array()}}}};
}

Json generation_config_json() {
  return {{"eos_token_id", Json::array({kEndOfText, kTurnEnd})},
          {"temperature", 0.8},
          {"top_p", 0.95},
          {"top_k", 40}};
}

}  // namespace moeflux::cli::synth
