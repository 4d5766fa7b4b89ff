#include "text/post_processor.h"

#include "text/utf8.h"
#include "text/vocab.h"

namespace moeflux::text {
namespace {

constexpr std::size_t kMaxTokens = 64;  // real templates add one or two

std::vector<TokenId> template_ids(const JsonNode& node, std::string_view name) {
  const JsonNode tokens = node.at("special_tokens");
  std::vector<TokenId> ids;
  for (const JsonNode& element : tokens.at(name).at("ids").elements()) {
    const std::int64_t id = element.integer();
    if (id < 0 || id >= kMaxTokenIds)
      element.reject(ErrorCode::InvalidModel, "must be an integer from 0 to {}", kMaxTokenIds - 1);
    ids.push_back(static_cast<TokenId>(id));
  }
  return ids;
}

// A template wraps what the processors before it have made.
void wrap_in_template(PostProcessor& out, const JsonNode& node) {
  std::vector<TokenId> before, after;
  int sequences = 0;
  for (const JsonNode& piece : node.at("single").elements()) {
    if (piece.find("Sequence")) {
      ++sequences;
      continue;
    }
    auto& side = sequences == 0 ? before : after;
    for (const TokenId id : template_ids(node, piece.at("SpecialToken").at("id").string()))
      side.push_back(id);
  }
  if (sequences != 1)
    node.reject(ErrorCode::Unsupported, "a template that uses its text {} times", sequences);
  out.prefix.insert(out.prefix.begin(), before.begin(), before.end());
  out.suffix.insert(out.suffix.end(), after.begin(), after.end());
  if (out.prefix.size() + out.suffix.size() > kMaxTokens)
    node.reject(ErrorCode::Unsupported, "a template that adds more than {} tokens", kMaxTokens);
}

void parse_into(PostProcessor& out, const JsonNode& node, int depth) {
  if (depth > kMaxSequenceNesting)
    node.reject(ErrorCode::Unsupported, "post-processors nested deeper than {}", kMaxSequenceNesting);
  const std::string_view type = node.type();
  if (type == "Sequence") {
    for (const JsonNode& child : node.at("processors").elements()) parse_into(out, child, depth + 1);
  } else if (type == "TemplateProcessing") {
    wrap_in_template(out, node);
  } else if (type != "ByteLevel") {
    node.reject(ErrorCode::Unsupported, "post-processor {} is not supported", shown(type));
  }
}

}  // namespace

PostProcessor PostProcessor::parse(const JsonNode& node) {
  PostProcessor out;
  parse_into(out, node, 0);
  return out;
}

}  // namespace moeflux::text
