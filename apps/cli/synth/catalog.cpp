#include "cli/synth/catalog.h"

#include <algorithm>
#include <cctype>
#include <charconv>

#include "cli/fail.h"
#include "cli/suggest.h"
#include "cli/synth/shapes_data.h"

namespace moeflux::cli::synth {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

}  // namespace

Catalog::Catalog() : data_(Json::parse(kShapesJson)) {
  for (const Json& entry : data_.at("shapes")) {
    Shape& shape = shapes_.emplace_back();
    shape.name = entry.at("name");
    shape.short_names = entry.at("short").get<std::vector<std::string>>();
    shape.layout = data_.at("layouts").at(entry.at("layout").get<std::string>());
    shape.config = shape.layout.at("config");
    shape.config.update(entry.at("config"));
  }
}

const Shape& Catalog::find(std::string_view name) const {
  const std::string wanted = lower(name);
  std::vector<std::string> names;
  for (const Shape& shape : shapes_) {
    if (lower(shape.name) == wanted) return shape;
    names.push_back(lower(shape.name));
    for (const std::string& other : shape.short_names) {
      if (lower(other) == wanted) return shape;
      names.push_back(lower(other));
    }
  }
  const std::vector<std::string_view> views(names.begin(), names.end());
  const std::string_view near = nearest(wanted, views);
  fail(ErrorCode::InvalidArgument, "no shape is called {}\n{}", name,
       near.empty() ? "`moeflux synth --list` has the names." : fmt::format("Did you mean {}?", near));
}

const std::string& Catalog::symbol_key(const Json& config, std::string_view name) const {
  for (const Json& key : data_.at("symbols").at(std::string(name)))
    if (config.contains(key.get_ref<const std::string&>())) return key.get_ref<const std::string&>();
  fail(ErrorCode::Internal, "shapes: nothing gives {}", name);
}

std::int64_t Catalog::symbol(const Json& config, std::string_view name) const {
  return config.at(symbol_key(config, name)).get<std::int64_t>();
}

std::int64_t Catalog::evaluate(const Json& config, std::string_view expression) const {
  std::int64_t sum = 0;
  for (const std::string_view term : split(expression, '+')) {
    std::int64_t product = 1;
    for (const std::string_view factor : split(term, '*')) {
      std::int64_t value = 0;
      const auto [end, error] = std::from_chars(factor.data(), factor.data() + factor.size(), value);
      if (error != std::errc() || end != factor.data() + factor.size()) value = symbol(config, factor);
      product *= value;
    }
    sum += product;
  }
  return sum;
}

std::vector<Json> Catalog::layer_entries(const Json& layout) const {
  std::vector<Json> entries;
  for (const Json& entry : layout.at("layer")) {
    if (!entry.is_string()) {
      entries.push_back(entry);
      continue;
    }
    for (const Json& tensor : data_.at("blocks").at(entry.get<std::string>())) entries.push_back(tensor);
  }
  return entries;
}

}  // namespace moeflux::cli::synth
