#include "store/trace.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/json.h"
#include "io/file.h"

namespace moeflux::store {
namespace {

constexpr std::uint64_t kMaxBytes = std::uint64_t{2} << 30;
// The cache policy counts experts of a layer in 16 bits.
constexpr std::int64_t kMaxExperts = std::numeric_limits<std::uint16_t>::max();
constexpr std::int64_t kMaxLayers = 4096;
// Of all layers together: twenty times the largest model. A few bytes of a trace must not cost gigabytes.
constexpr std::uint64_t kMaxAllExperts = std::uint64_t{1} << 20;

std::int64_t count_in(const Json& object, std::string_view key, std::int64_t most, std::string_view origin) {
  const std::int64_t n = json_int(object, key, origin).value_or(0);
  if (n < 0 || n > most)
    fail(ErrorCode::InvalidModel, "{}: {} is {}, not within 0 to {}", origin, key, n, most);
  return n;
}

}  // namespace

void RoutingTrace::read_header(std::string_view line, const std::string& origin) {
  const Json header = parse_json(line, origin);
  if (!header.is_object()) fail(ErrorCode::InvalidModel, "{}: the header is no object", origin);
  n_experts_ = count_in(header, "n_experts", kMaxExperts, origin);
  if (n_experts_ == 0) fail(ErrorCode::InvalidModel, "{}: not a routing trace (no n_experts)", origin);
  n_layers_ = count_in(header, "n_layers", kMaxLayers, origin);
  model_ = json_string(header, "model", origin).value_or("");
}

void RoutingTrace::read_step(std::string_view line, const std::string& origin,
                             std::vector<std::uint8_t>& seen) {
  const Json step = parse_json(line, origin);
  if (!step.is_object()) fail(ErrorCode::InvalidModel, "{}: a step is no object", origin);
  const std::string phase = json_string(step, "phase", origin).value_or("decode");
  if (phase != "prefill" && phase != "decode")
    fail(ErrorCode::InvalidModel, "{}: the phase is neither prefill nor decode", origin);
  const Json* const layers = json_find(step, "layers");
  if (layers == nullptr || !layers->is_array() || layers->empty() || layers->size() > kMaxLayers)
    fail(ErrorCode::InvalidModel, "{}: layers is no list of 1 to {} lists", origin, kMaxLayers);
  for (const Json& layer : *layers) {
    if (!layer.is_array()) fail(ErrorCode::InvalidModel, "{}: layers is no list of lists", origin);
    std::fill(seen.begin(), seen.end(), std::uint8_t{0});
    for (const Json& expert : layer) {
      if (!expert.is_number_integer() || expert < 0 || expert >= n_experts_)
        fail(ErrorCode::InvalidModel, "{}: expert {} is not within 0 to {}", origin, expert.dump(),
             n_experts_ - 1);
      const auto e = expert.get<std::int32_t>();
      if (seen[static_cast<std::size_t>(e)]++ != 0)
        fail(ErrorCode::InvalidModel, "{}: expert {} twice in one layer", origin, e);
      experts_.push_back(ExpertIdx{e});
    }
    ends_.push_back(experts_.size());
  }
  steps_.push_back({ends_.size() - 1 - layers->size(), layers->size(),
                    phase == "prefill" ? TracePhase::Prefill : TracePhase::Decode});
  max_layers_ = std::max(max_layers_, layers->size());
}

RoutingTrace RoutingTrace::read(const std::filesystem::path& path) {
  const std::string text = io::read_text_file(path, kMaxBytes);
  RoutingTrace trace;
  std::vector<std::uint8_t> seen;
  std::size_t number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    ++number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    const std::string origin = fmt::format("{}:{}", path.string(), number);
    if (trace.n_experts_ == 0) {
      trace.read_header(line, origin);
      seen.resize(static_cast<std::size_t>(trace.n_experts_));
    } else {
      trace.read_step(line, origin, seen);
    }
  }
  if (trace.steps_.empty())
    fail(ErrorCode::InvalidModel, "{}: a routing trace without a single step", path.string());
  if (trace.max_layers_ * static_cast<std::uint64_t>(trace.n_experts_) > kMaxAllExperts)
    fail(ErrorCode::InvalidModel, "{}: {} layers of {} experts are more than {} experts", path.string(),
         trace.max_layers_, trace.n_experts_, kMaxAllExperts);
  if (trace.n_layers_ == 0) trace.n_layers_ = static_cast<std::int64_t>(trace.steps_[0].n_layers);
  return trace;
}

TraceWriter::TraceWriter(const std::filesystem::path& path, std::string_view model, std::int64_t n_layers,
                         std::int64_t n_experts)
    : file_(path) {
  const Json header = {{"model", model},
                       {"n_layers", n_layers},
                       {"n_experts", n_experts},
                       {"note", "one line per token step; layers in order; expert ids in rank order"}};
  // A folder's name may be no UTF-8.
  write(header.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void TraceWriter::write(std::string_view text) { file_.write(std::as_bytes(std::span(text))); }

void TraceWriter::routed(std::span<const ExpertIdx> experts, std::size_t n_tokens) {
  layers_.push_back({experts_.size(), n_tokens, n_tokens == 0 ? 0 : experts.size() / n_tokens});
  experts_.insert(experts_.end(), experts.begin(), experts.end());
}

void TraceWriter::end_pass(TracePhase phase) {
  std::size_t n_tokens = 0;
  for (const Layer& layer : layers_) n_tokens = std::max(n_tokens, layer.n_tokens);
  for (std::size_t token = 0; token < n_tokens; ++token) {
    line_ =
        phase == TracePhase::Prefill ? R"({"phase":"prefill","layers":[)" : R"({"phase":"decode","layers":[)";
    for (const Layer& layer : layers_) {
      const std::size_t missing = n_tokens - layer.n_tokens;
      if (token < missing) break;  // this layer, and those after it, saw the last tokens only
      if (line_.back() != '[') line_ += ',';
      line_ += '[';
      const ExpertIdx* const ids = experts_.data() + layer.first + (token - missing) * layer.top_k;
      for (std::size_t i = 0; i < layer.top_k; ++i)
        fmt::format_to(std::back_inserter(line_), "{}{}", i == 0 ? "" : ",", raw(ids[i]));
      line_ += ']';
    }
    line_ += "]}\n";
    write(line_);
  }
  layers_.clear();
  experts_.clear();
}

void TraceWriter::finish() { file_.commit(); }

}  // namespace moeflux::store
