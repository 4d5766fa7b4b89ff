#include "cli/synth/plan.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "cli/fail.h"
#include "cli/synth/tokenizer_files.h"

namespace moeflux::cli::synth {
namespace {

constexpr std::uint64_t kGroupSize = 64;
constexpr std::uint64_t kMxGroupSize = 32;
constexpr double kEmbeddingCommon = 0.2;
constexpr double kPopularity = 1.4;
constexpr double kHeadGain = 2.5;

class Builder {
 public:
  Builder(const Catalog& catalog, const Shape& shape, const SynthOptions& options)
      : catalog_(catalog), shape_(shape), options_(options), config_(shape.config) {}

  Plan build() {
    cut();
    check_routing();
    add_top();
    const std::vector<Json> entries = catalog_.layer_entries(shape_.layout);
    for (std::int64_t i = 0; i < plan_.n_layers; ++i) add_layer(i, entries);
    plan_.config = finished_config();
    for (const PlannedTensor& tensor : plan_.tensors) plan_.tensor_bytes += tensor.bytes;
    return std::move(plan_);
  }

 private:
  void cut() {
    const std::int64_t layers = catalog_.symbol(config_, "L"), experts = catalog_.symbol(config_, "E");
    plan_.n_layers = options_.n_layers > 0 ? options_.n_layers : layers;
    plan_.n_experts = options_.n_experts > 0 ? options_.n_experts : experts;
    std::int64_t n_dense = config_.value("first_k_dense_replace", std::int64_t{0});
    if (options_.n_dense > n_dense) fail(ErrorCode::InvalidArgument, "--dense {}: {} has {}", options_.n_dense, shape_.name, n_dense);
    if (options_.n_dense >= 0 && n_dense > 0) config_["first_k_dense_replace"] = n_dense = options_.n_dense;
    if (plan_.n_layers > layers || plan_.n_layers <= n_dense)
      fail(ErrorCode::InvalidArgument, "--layers {}: {} has {} layers, and at least {} are needed",
           plan_.n_layers, shape_.name, layers, n_dense + 1);
    if (plan_.n_experts > experts)
      fail(ErrorCode::InvalidArgument, "--experts {}: {} has {}", plan_.n_experts, shape_.name, experts);
    full_layers_ = static_cast<double>(layers);
    output_gain_ = std::sqrt(2.0 / full_layers_);
    config_[catalog_.symbol_key(config_, "L")] = plan_.n_layers;
    config_[catalog_.symbol_key(config_, "E")] = plan_.n_experts;
    if (shape_.layout.contains("pattern")) {
      const Json& pattern = shape_.layout.at("pattern");
      Json types = Json::array();
      for (std::int64_t i = 0; i < plan_.n_layers; ++i)
        types.push_back(pattern.at(static_cast<std::size_t>(i) % pattern.size()));
      config_["layer_types"] = types;
    }
  }

  void check_routing() const {
    const std::int64_t k = catalog_.symbol(config_, "k");
    const std::int64_t groups = config_.value("n_group", std::int64_t{1});
    const std::int64_t kept = config_.value("topk_group", std::int64_t{1});
    if (plan_.n_experts < k)
      fail(ErrorCode::InvalidArgument, "--experts {}: {} uses {} per token", plan_.n_experts, shape_.name, k);
    const std::int64_t per_group = plan_.n_experts / groups;
    if (groups > 1 && (plan_.n_experts % groups != 0 || per_group < 2 || per_group * kept < k))
      fail(ErrorCode::InvalidArgument,
           "--experts {}: {} routes in {} groups of equal size, of which {} must hold the {} experts of a "
           "token",
           plan_.n_experts, shape_.name, groups, kept, k);
  }

  void add_top() {
    const std::string prefix = shape_.layout.at("prefix");
    Json embedding = {{"name", "embed_tokens"}, {"shape", Json::array({"V", "D"})}, {"kind", "embedding"}};
    Json norm = {{"name", "norm.weight"},
                 {"shape", Json::array({"D"})},
                 {"kind", "values"},
                 {"range", Json::array({0.9, 1.1})}};
    Json head = {{"name", shape_.layout.at("head")}, {"shape", Json::array({"V", "D"})}, {"gain", kHeadGain}};
    add_entry(prefix, embedding);
    add_entry(prefix, norm);
    add_entry("", head);
  }

  void add_layer(std::int64_t layer, const std::vector<Json>& entries) {
    stream_size_ = std::sqrt(1.0 + (static_cast<double>(layer) + 0.5) / full_layers_);
    std::set<std::string> tags;
    const bool dense = layer < config_.value("first_k_dense_replace", std::int64_t{0});
    tags.insert(dense ? "dense" : "moe");
    if (config_.contains("layer_types"))
      tags.insert(config_.at("layer_types").at(static_cast<std::size_t>(layer)).get<std::string>());
    for (const auto& [key, value] : config_.items())
      if (value.is_boolean() && value.get<bool>()) tags.insert(key);
    const std::string prefix =
        fmt::format("{}layers.{}.", shape_.layout.at("prefix").get<std::string>(), layer);
    for (const Json& entry : entries) {
      const Json conditions = entry.value("when", Json::array());
      if (std::all_of(conditions.begin(), conditions.end(),
                      [&](const Json& tag) { return tags.contains(tag.get<std::string>()); }))
        add_entry(prefix, entry);
    }
  }

  void add_entry(const std::string& prefix, const Json& entry) {
    const std::string name = prefix + entry.at("name").get<std::string>();
    std::vector<std::uint64_t> shape;
    for (const Json& dim : entry.at("shape"))
      shape.push_back(static_cast<std::uint64_t>(catalog_.evaluate(config_, dim.get<std::string>())));
    const std::string kind = entry.value("kind", "matrix");
    if (kind == "values") return add_values(name, shape, entry);
    const double gain = entry.value("gain", 1.0) * (entry.value("output", false) ? output_gain_ : 1.0);
    if (kind == "mxfp4") return add_mxfp4(name, shape, gain);
    const int bits = entry.value("bits", 4);
    if (bits == 16) return add_plain_router(name, shape);
    add_affine(name, shape, kind, bits, gain);
  }

  void add(std::string name, const char* dtype, std::vector<std::uint64_t> shape, std::uint64_t element_bytes,
           const Fill& fill) {
    std::uint64_t bytes = element_bytes;
    for (const std::uint64_t dim : shape) bytes *= dim;
    plan_.tensors.push_back({std::move(name), dtype, std::move(shape), bytes, fill});
  }

  void add_values(const std::string& name, const std::vector<std::uint64_t>& shape, const Json& entry) {
    const bool f32 = entry.value("dtype", "BF16") == "F32";
    Fill fill;
    fill.kind = f32 ? FillKind::ValuesF32 : FillKind::ValuesBf16;
    fill.stream = stream_key(options_.seed, name);
    fill.low = entry.at("range").at(0);
    fill.high = entry.at("range").at(1);
    add(name, f32 ? "F32" : "BF16", shape, f32 ? 4 : 2, fill);
  }

  // The part that all rows share, and the part that follows an expert's popularity.
  void add_direction(Fill& fill, bool embedding, std::uint64_t columns) const {
    fill.direction = stream_key(options_.seed, "common direction");
    fill.groups_per_row = columns / kGroupSize;
    if (embedding)
      fill.common = kEmbeddingCommon;
    else
      fill.popular = kPopularity * options_.skew * stream_size_ / static_cast<double>(columns);
  }

  void add_plain_router(const std::string& name, const std::vector<std::uint64_t>& shape) {
    Fill fill;
    fill.kind = FillKind::ValuesBf16;
    fill.stream = stream_key(options_.seed, name);
    fill.high = std::sqrt(3.0 / static_cast<double>(shape.back()));  // deviation 1 / sqrt(columns)
    fill.low = -fill.high;
    add_direction(fill, false, shape.back());
    add(name, "BF16", shape, 2, fill);
  }

  void add_affine(const std::string& module, std::vector<std::uint64_t> shape, const std::string& kind,
                  int bits, double gain) {
    const std::uint64_t columns = shape.back();
    if (columns % kGroupSize != 0) fail(ErrorCode::Internal, "shapes: {} has {} columns", module, columns);
    const bool embedding = kind == "embedding";
    const double deviation = embedding ? std::sqrt(1 - kEmbeddingCommon * kEmbeddingCommon)
                                       : gain / std::sqrt(static_cast<double>(columns));
    Fill fill;
    fill.stream = stream_key(options_.seed, module + ".weight");
    shape.back() = columns * static_cast<std::uint64_t>(bits) / 32;
    add(module + ".weight", "U32", shape, 4, fill);
    fill.stream = stream_key(options_.seed, module + ".scales");
    fill.scale = deviation / code_deviation(bits);
    fill.mid = (std::ldexp(1.0, bits) - 1) / 2;
    if (embedding || kind == "router") add_direction(fill, embedding, columns);
    shape.back() = columns / kGroupSize;
    fill.kind = FillKind::Scales;
    add(module + ".scales", "BF16", shape, 2, fill);
    fill.kind = FillKind::Biases;
    add(module + ".biases", "BF16", shape, 2, fill);
    if (mx_default() || bits != 4) overrides_[module] = {{"bits", bits}, {"group_size", kGroupSize}};
  }

  void add_mxfp4(const std::string& module, std::vector<std::uint64_t> shape, double gain) {
    const std::uint64_t columns = shape.back();
    Fill fill;
    fill.stream = stream_key(options_.seed, module + ".weight");
    shape.back() = columns / 8;
    add(module + ".weight", "U32", shape, 4, fill);
    fill.kind = FillKind::MxScales;
    fill.stream = stream_key(options_.seed, module + ".scales");
    fill.scale = gain / std::sqrt(static_cast<double>(columns)) / mxfp4_deviation();
    shape.back() = columns / kMxGroupSize;
    add(module + ".scales", "U8", shape, 1, fill);
  }

  bool mx_default() const { return shape_.layout.value("mode", "affine") == "mxfp4"; }

  Json finished_config() {
    Json quantization = {{"bits", 4},
                         {"group_size", mx_default() ? kMxGroupSize : kGroupSize},
                         {"mode", mx_default() ? "mxfp4" : "affine"}};
    quantization.update(overrides_);
    config_["bos_token_id"] = nullptr;
    config_["eos_token_id"] = kEndOfText;
    config_["pad_token_id"] = kEndOfText;
    config_["tie_word_embeddings"] = false;
    if (!shape_.layout.value("nested", false)) {
      config_["quantization"] = quantization;
      config_["quantization_config"] = quantization;
      return config_;
    }
    Json root = shape_.layout.at("root");
    root["quantization"] = quantization;
    root["quantization_config"] = quantization;
    root["text_config"] = config_;
    root["tie_word_embeddings"] = false;
    return root;
  }

  const Catalog& catalog_;
  const Shape& shape_;
  const SynthOptions& options_;
  Json config_;
  Json overrides_ = Json::object();
  double full_layers_ = 1.0, output_gain_ = 1.0;
  double stream_size_ = 1.0;  // of the residual stream at the current layer
  Plan plan_;
};

}  // namespace

std::int64_t few_layers(const Shape& shape) {
  const auto pattern = static_cast<std::int64_t>(shape.layout.value("pattern", Json::array()).size());
  return std::max(pattern, shape.config.value("first_k_dense_replace", std::int64_t{0}) + 1);
}

Plan make_plan(const Catalog& catalog, const Shape& shape, const SynthOptions& options) {
  return Builder(catalog, shape, options).build();
}

}  // namespace moeflux::cli::synth
