// The post-processor of a tokenizer file: tokens put around the encoding of a raw text.
//
// Known types: ByteLevel (adds nothing), TemplateProcessing (its "single" form) and Sequence of
// these. Immutable.
#pragma once

#include <moeflux/types.h>

#include <vector>

#include "text/json_node.h"

namespace moeflux::text {

struct PostProcessor {
  std::vector<TokenId> prefix;
  std::vector<TokenId> suffix;

  // InvalidModel for a broken description, Unsupported for another type (named). Whether the ids
  // exist is for the caller to see.
  static PostProcessor parse(const JsonNode& node);
};

}  // namespace moeflux::text
