// Running a model through the public API and keeping everything it says.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <moeflux/engine.h>

namespace moeflux::test {

struct RunOptions {
  Precision precision = Precision::Exact;
  int n_threads = 2;
  std::int64_t chunk = 0;
  bool decode = false;
  bool hidden = false;
  KvType kv = KvType::F32;
  std::string isa = {};
};

struct RunResult {
  std::vector<float> logits;                            // [T, V]
  std::map<std::int64_t, std::vector<float>> hidden;    // by layer: [T, D]
};

inline std::vector<TokenId> to_tokens(std::span<const std::int32_t> ids) {
  std::vector<TokenId> out;
  for (std::int32_t id : ids) out.push_back(TokenId(id));
  return out;
}

inline std::unique_ptr<Engine> open_engine(const std::filesystem::path& model, const RunOptions& o) {
  EngineOptions options;
  options.model = model;
  options.n_threads = o.n_threads;
  options.precision = o.precision;
  options.isa = o.isa;
  return Engine::open(options);
}

inline RunResult run(Engine& engine, std::span<const TokenId> tokens, const RunOptions& o) {
  SessionOptions session_options;
  session_options.ctx_size = static_cast<std::int64_t>(tokens.size());
  session_options.chunk_size = o.chunk;
  session_options.kv = o.kv;
  const auto session = engine.create_session(session_options);
  RunResult out;
  EvaluateOptions e;
  e.one_at_a_time = o.decode;
  e.on_logits = [&](std::int64_t, std::span<const float> l) { out.logits.insert(out.logits.end(), l.begin(), l.end()); };
  if (o.hidden)
    e.on_hidden = [&](std::int64_t layer, std::int64_t, std::span<const float> h) {
      auto& rows = out.hidden[layer];
      rows.insert(rows.end(), h.begin(), h.end());
    };
  session->evaluate(tokens, e);
  return out;
}

inline RunResult run(const std::filesystem::path& model, std::span<const TokenId> tokens, const RunOptions& o) {
  return run(*open_engine(model, o), tokens, o);
}

inline double max_abs_difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(d <= worst)) worst = d;  // NaN counts as a difference
  }
  return worst;
}

inline double relative_difference(std::span<const float> a, std::span<const float> b) {
  double error = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return a.size() == b.size() ? std::sqrt(error / norm) : INFINITY;
}

inline double cosine(std::span<const float> a, std::span<const float> b) {
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    aa += static_cast<double>(a[i]) * static_cast<double>(a[i]);
    bb += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return ab / std::sqrt(aa * bb);
}

}  // namespace moeflux::test
