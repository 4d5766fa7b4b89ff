#include "text/json_node.h"

namespace moeflux::text {
namespace {

constexpr std::size_t kMaxDepth = 64;                // tokenizer files nest seven or eight deep
constexpr std::size_t kMaxDocumentBytes = 1u << 28;  // the largest published files are below 40 MB

}  // namespace

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  simdjson::dom::element value;
  if (object().at_key(key).get(value) != simdjson::SUCCESS || value.is_null()) return std::nullopt;
  return JsonNode(value, *origin_, path_ + "." + std::string(key));
}

JsonNode JsonNode::at(std::string_view key) const {
  auto node = find(key);
  if (!node) reject(ErrorCode::InvalidModel, "\"{}\" is missing", key);
  return *node;
}

std::vector<JsonNode> JsonNode::elements() const {
  std::vector<JsonNode> nodes;
  for (const simdjson::dom::element element : array())
    nodes.emplace_back(element, *origin_, fmt::format("{}[{}]", path_, nodes.size()));
  return nodes;
}

std::string_view JsonNode::string() const {
  std::string_view value;
  if (element_.get_string().get(value) != simdjson::SUCCESS)
    reject(ErrorCode::InvalidModel, "must be a string");
  return value;
}

bool JsonNode::boolean() const {
  bool value = false;
  if (element_.get_bool().get(value) != simdjson::SUCCESS)
    reject(ErrorCode::InvalidModel, "must be true or false");
  return value;
}

std::int64_t JsonNode::integer() const {
  std::int64_t value = 0;
  if (element_.get_int64().get(value) != simdjson::SUCCESS)
    reject(ErrorCode::InvalidModel, "must be an integer");
  return value;
}

double JsonNode::number() const {
  double value = 0;
  if (element_.get_double().get(value) != simdjson::SUCCESS)
    reject(ErrorCode::InvalidModel, "must be a number");
  return value;
}

simdjson::dom::object JsonNode::object() const {
  simdjson::dom::object value;
  if (element_.get_object().get(value) != simdjson::SUCCESS)
    reject(ErrorCode::InvalidModel, "must be an object");
  return value;
}

simdjson::dom::array JsonNode::array() const {
  simdjson::dom::array value;
  if (element_.get_array().get(value) != simdjson::SUCCESS)
    reject(ErrorCode::InvalidModel, "must be an array");
  return value;
}

bool JsonNode::boolean_or(std::string_view key, bool fallback) const {
  const auto node = find(key);
  return node ? node->boolean() : fallback;
}

JsonDocument::JsonDocument(std::string_view text, std::string origin)
    : origin_(std::make_unique<std::string>(std::move(origin))),
      parser_(std::make_unique<simdjson::dom::parser>(kMaxDocumentBytes)) {
  if (text.size() > kMaxDocumentBytes)
    fail(ErrorCode::InvalidModel, "{}: {} bytes, more than the {} a tokenizer file may have", *origin_,
         text.size(), kMaxDocumentBytes);
  auto error = parser_->allocate(text.size(), kMaxDepth);
  if (error == simdjson::SUCCESS) error = parser_->parse(text.data(), text.size(), true).get(root_);
  if (error == simdjson::MEMALLOC)
    fail(ErrorCode::OutOfMemory, "{}: no memory to parse {} bytes", *origin_, text.size());
  if (error != simdjson::SUCCESS)
    fail(ErrorCode::InvalidModel, "{}: not valid JSON ({})", *origin_, simdjson::error_message(error));
}

}  // namespace moeflux::text
