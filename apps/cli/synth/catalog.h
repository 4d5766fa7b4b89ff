// The shapes `synth` knows: names, configurations and tensor lists, all of it data (shapes.json, built into
// the command).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace moeflux::cli::synth {

using Json = nlohmann::ordered_json;

struct Shape {
  std::string name;
  std::vector<std::string> short_names;
  Json layout;  // as in shapes.json
  Json config;  // the model keys of config.json, complete but for what --layers and --experts change
};

class Catalog {
 public:
  Catalog();

  const std::vector<Shape>& shapes() const noexcept { return shapes_; }
  // By name or short name, upper and lower case alike. InvalidArgument, with a suggestion, when there is
  // none.
  const Shape& find(std::string_view name) const;

  // The value of a symbol ("D", "H", ..) in a configuration; Internal when the data is wrong.
  std::int64_t symbol(const Json& config, std::string_view name) const;
  // The key of config.json that holds it: the first of its aliases that is there.
  const std::string& symbol_key(const Json& config, std::string_view name) const;
  // A sum of products of symbols and numbers: "2*Hk*dk+Hv*dv".
  std::int64_t evaluate(const Json& config, std::string_view expression) const;
  // The tensor entries of one layer, blocks expanded.
  std::vector<Json> layer_entries(const Json& layout) const;

 private:
  Json data_;
  std::vector<Shape> shapes_;
};

}  // namespace moeflux::cli::synth
