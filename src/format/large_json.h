// Large JSON documents inside files (safetensors headers, shard indexes), parsed strictly.
#pragma once

#include <simdjson.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "io/file.h"

namespace moeflux::format {

// Owns the text and the parsed tree; elements and string views point into it. For one thread.
class LargeJson {
 public:
  // Reads [offset, offset + bytes) of the file; the caller has checked that it lies inside and is not
  // absurd. `what` ("header") names the document in messages.
  LargeJson(const io::File& file, std::uint64_t offset, std::uint64_t bytes, std::string what);
  LargeJson(const LargeJson&) = delete;
  LargeJson& operator=(const LargeJson&) = delete;

  std::string_view text() const noexcept { return {text_.get(), bytes_}; }

  // Once. InvalidModel: not UTF-8, a syntax error, an integer beyond 64 bits, deeper than max_depth
  // levels, not an object. Equal keys are all kept: looking for them is the caller's part.
  simdjson::dom::object parse_object(std::size_t max_depth);

 private:
  std::string origin_;
  std::size_t bytes_;
  std::unique_ptr<char[]> text_;  // with the padding the parser asks for
  simdjson::dom::parser parser_;
};

// True for UTF-8 as the standard defines it. An escape such as \udc00 can smuggle other bytes into a
// string of a document that is valid itself.
bool is_utf8(std::string_view text) noexcept;

}  // namespace moeflux::format
