#include "core/json.h"

#include <set>
#include <vector>

#include "core/error.h"

namespace moeflux {
namespace {

// An object that keeps its order is searched from the front for every key it takes: this many stay instant, while published
// configs have some thousands at most (one quantization override a module).
constexpr std::size_t kMaxKeys = 8192;
constexpr int kMaxDepth = 64;  // configs nest four or five deep; deeper input only serves to exhaust a stack

// Line and column (from 1) of a byte offset, for people with an editor.
std::pair<std::size_t, std::size_t> line_column(std::string_view text, std::size_t offset) {
  std::size_t line = 1, column = 1;
  for (std::size_t i = 0; i < offset && i < text.size(); ++i) {
    if (text[i] == '\n') {
      ++line;
      column = 1;
    } else {
      ++column;
    }
  }
  return {line, column};
}

// nlohmann keeps the last of two equal keys; a hostile file could show one value to us and another
// to a checker, so both are an error. Runs as a parser callback.
class StrictCallback {
 public:
  explicit StrictCallback(std::string_view origin) : origin_(origin) {}

  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth) fail(ErrorCode::InvalidModel, "{}: JSON nested deeper than {} levels", origin_, kMaxDepth);
    switch (event) {
      case Json::parse_event_t::object_start: keys_.emplace_back(); break;
      case Json::parse_event_t::object_end: keys_.pop_back(); break;
      case Json::parse_event_t::key: {
        const std::string key = parsed.get<std::string>();
        if (!keys_.back().insert(key).second) fail(ErrorCode::InvalidModel, "{}: key \"{}\" appears twice", origin_, key);
        if (keys_.back().size() > kMaxKeys) fail(ErrorCode::InvalidModel, "{}: an object has more than {} keys", origin_, kMaxKeys);
        break;
      }
      default: break;
    }
    return true;
  }

 private:
  std::string_view origin_;
  std::vector<std::set<std::string>> keys_;
};

[[noreturn]] void wrong_type(std::string_view origin, std::string_view key, const char* want, const Json& got) {
  std::string shown = got.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (shown.size() > 60) shown = shown.substr(0, 60) + "..";
  fail(ErrorCode::InvalidModel, "{}: \"{}\" must be {}, found {}", origin, key, want, shown);
}

}  // namespace

Json parse_json(std::string_view text, std::string_view origin) {
  StrictCallback strict(origin);
  try {
    return Json::parse(text.begin(), text.end(), [&](int depth, Json::parse_event_t event, Json& parsed) {
      return strict(depth, event, parsed);
    });
  } catch (const Json::parse_error& e) {
    const auto [line, column] = line_column(text, e.byte == 0 ? 0 : e.byte - 1);
    fail(ErrorCode::InvalidModel, "{}: not valid JSON at line {}, column {}", origin, line, column);
  } catch (const Json::exception& e) {
    fail(ErrorCode::InvalidModel, "{}: not valid JSON ({})", origin, e.what());
  }
}

const Json* json_find(const Json& object, std::string_view key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(std::string(key));
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::optional<std::int64_t> json_int(const Json& object, std::string_view key, std::string_view origin) {
  const Json* v = json_find(object, key);
  if (v == nullptr) return std::nullopt;
  if (!v->is_number_integer()) wrong_type(origin, key, "an integer", *v);
  if (v->is_number_unsigned() && v->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX))
    wrong_type(origin, key, "an integer that fits 63 bits", *v);
  return v->get<std::int64_t>();
}

std::optional<double> json_number(const Json& object, std::string_view key, std::string_view origin) {
  const Json* v = json_find(object, key);
  if (v == nullptr) return std::nullopt;
  if (!v->is_number()) wrong_type(origin, key, "a number", *v);
  return v->get<double>();
}

std::optional<bool> json_bool(const Json& object, std::string_view key, std::string_view origin) {
  const Json* v = json_find(object, key);
  if (v == nullptr) return std::nullopt;
  if (!v->is_boolean()) wrong_type(origin, key, "true or false", *v);
  return v->get<bool>();
}

std::optional<std::string> json_string(const Json& object, std::string_view key, std::string_view origin) {
  const Json* v = json_find(object, key);
  if (v == nullptr) return std::nullopt;
  if (!v->is_string()) wrong_type(origin, key, "a string", *v);
  return v->get<std::string>();
}

}  // namespace moeflux
