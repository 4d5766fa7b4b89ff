// Token ids to text, one at a time: what can be shown so far and no half character.
#pragma once

#include <moeflux/types.h>

#include <string>

#include "text/tokenizer.h"

namespace moeflux::text {

// All that push() and finish() return, put together, is what Tokenizer::decode() gives for the same
// ids. Each part is valid UTF-8. For one stream and one thread; the tokenizer must outlive it and
// stay where it is.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special);

  // The text that the token completes, often empty: bytes of an unfinished character (3 at most)
  // wait for the next token. InvalidArgument for an id that does not exist; the stream is then as
  // it was before the call.
  std::string push(TokenId id);

  // U+FFFD for an unfinished character, else empty. The decoder can then start a new stream.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string pending_;
};

}  // namespace moeflux::text
