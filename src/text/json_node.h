// A value of a large, untrusted JSON document together with where it stands, so that every complaint
// names the file and the path: "tokenizer.json: $.model.merges[17]: ..".
//
// Nodes are cheap views: the document and the origin string must outlive them.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace moeflux::text {

inline constexpr int kMaxSequenceNesting = 8;  // of normalizers, pre-tokenizers or post-processors that are a Sequence inside a Sequence

class JsonNode {
 public:
  JsonNode(simdjson::dom::element element, const std::string& origin, std::string path)
      : element_(element), origin_(&origin), path_(std::move(path)) {}

  // A member of an object; absent or null: nullopt. Not an object: InvalidModel.
  std::optional<JsonNode> find(std::string_view key) const;
  // As above; absent or null is InvalidModel.
  JsonNode at(std::string_view key) const;
  // The elements of an array, InvalidModel where it is none.
  std::vector<JsonNode> elements() const;

  // InvalidModel where the value is of another type. Strings live as long as the document.
  std::string_view string() const;
  bool boolean() const;
  std::int64_t integer() const;
  double number() const;
  simdjson::dom::object object() const;
  simdjson::dom::array array() const;

  // Members with a default for absent or null.
  bool boolean_or(std::string_view key, bool fallback) const;
  // The member "type", which names what an object is.
  std::string_view type() const { return at("type").string(); }

  bool is_string() const { return element_.is_string(); }
  bool is_object() const { return element_.is_object(); }

  // "file: $.path"
  std::string where() const { return *origin_ + ": " + path_; }

  template <class... Args>
  [[noreturn]] void reject(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) const {
    throw Error(code, where() + ": " + fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  simdjson::dom::element element_;
  const std::string* origin_;
  std::string path_;
};

// Owns a parsed document. Movable; nodes stay valid when it moves.
class JsonDocument {
 public:
  // InvalidModel: text that is not JSON or not UTF-8, or nested deeper than 64 levels.
  JsonDocument(std::string_view text, std::string origin);
  JsonNode root() const { return JsonNode(root_, *origin_, "$"); }

 private:
  std::unique_ptr<std::string> origin_;
  std::unique_ptr<simdjson::dom::parser> parser_;
  simdjson::dom::element root_;
};

}  // namespace moeflux::text
