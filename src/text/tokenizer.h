// Text to token ids and back, as a Hugging Face tokenizer.json describes it: byte-level BPE.
//
// Encoding: broken UTF-8 becomes U+FFFD; the text is cut at the added tokens that are looked for in
// the text as it came; each remaining part is normalized and cut at the added tokens that are looked
// for in normalized text; what is left goes through the pre-tokenizer and BPE. Reads no files: the
// caller brings their contents.
#pragma once

#include <moeflux/types.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moeflux::text {

struct EncodeOptions {
  // False: special tokens written in the text are plain text, as it must be for what a user typed.
  // Added tokens that are not special are found either way.
  bool parse_special = false;
  // True: put the tokens around the text that the file's template asks for; without a template, the
  // beginning-of-sequence token where tokenizer_config.json says "add_bos_token": true. For raw
  // completions; chat templates write these tokens themselves.
  bool add_bos = false;
};

// Immutable: one tokenizer may serve any number of threads. Movable; a moved-from one may only be
// assigned or destroyed.
class Tokenizer {
 public:
  // tokenizer_json: the contents of tokenizer.json. tokenizer_config_json: those of
  // tokenizer_config.json, empty where there is none; only eos_token, bos_token and add_bos_token
  // are read. `origin` (the folder) starts every message, the file and the JSON path follow.
  // InvalidModel: broken or contradictory contents. Unsupported: a normalizer, pre-tokenizer, model,
  // decoder or post-processor of another kind, which is named.
  static Tokenizer from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                             const std::string& origin);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // InvalidArgument: a text over 256 MiB, or one on which the file's regular expressions run away.
  // InvalidModel: a character for which the vocabulary has no token.
  std::vector<TokenId> encode(std::string_view text, const EncodeOptions& options) const;

  // The text of the ids; bytes that are not UTF-8 become U+FFFD. InvalidArgument for an id that does
  // not exist. For text that arrives token by token see StreamDecoder.
  std::string decode(std::span<const TokenId> ids, bool skip_special) const;

  // The bytes that a token stands for, not necessarily whole characters. InvalidArgument as above.
  std::string token_bytes(TokenId id) const;

  bool is_special(TokenId id) const;
  bool has_token(TokenId id) const;
  // By its string: the content of an added token or the spelling of a vocabulary entry (see
  // byte_alphabet.h).
  std::optional<TokenId> find(std::string_view token) const;

  // Highest id + 1; there may be gaps below.
  std::size_t vocab_size() const;

  std::optional<TokenId> eos() const;
  std::optional<TokenId> bos() const;

  // For people: "byte-level BPE, 3056 tokens, 2800 merges, 3 added, NFC".
  std::string description() const;

 private:
  struct Parts;
  explicit Tokenizer(std::unique_ptr<const Parts> parts);

  std::unique_ptr<const Parts> parts_;
};

}  // namespace moeflux::text
