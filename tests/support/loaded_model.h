// A model without an engine: tests bring their own store and reader.
#pragma once

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "io/async_reader.h"
#include "model/binder.h"
#include "model/family.h"
#include "model/model.h"
#include "session/session.h"
#include "store/resident_store.h"
#include "store/streaming_store.h"
#include "support/evaluate.h"
#include "support/tensor_file.h"

namespace moeflux::test {

// On the cpu.
struct Loaded {
  explicit Loaded(const std::filesystem::path& path, Precision p = Precision::Fast)
      : folder(format::ModelFolder::open(path)),
        parsed(model::parse_model(folder)),
        binding(model::bind(folder, parsed.spec, parsed.names)),
        backend(backend::make_cpu_backend({.n_threads = 1, .isa = ""})),
        model(parsed.spec, binding, folder, *backend, {}),
        precision(p) {
    for (std::uint32_t i = 0; i < folder.n_files(); ++i) files.push_back(folder.file(i).path());
  }

  std::size_t n_experts() const {  // of all layers
    std::size_t n = 0;
    for (const auto& l : binding.experts.layers) n += static_cast<std::size_t>(l.n_experts);
    return n;
  }
  std::size_t top_k() const {  // the largest
    std::size_t k = 1;
    for (const auto& l : parsed.spec.layers)
      if (const auto* moe = std::get_if<model::MoeSpec>(&l.ffn)) k = std::max(k, static_cast<std::size_t>(moe->top_k));
    return k;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const std::filesystem::path& f : files) out.push_back(f.string());
    return out;
  }

  std::vector<float> logits(store::ExpertStore& experts, std::span<const TokenId> tokens, std::int64_t chunk, std::size_t prefill,
                            Prefetch prefetch = Prefetch::Off, SessionStats* stats = nullptr) const {
    session::Parts parts{model, experts, *backend, precision};
    parts.prefetch = prefetch;
    SessionOptions options;
    options.ctx_size = 256;
    options.chunk_size = chunk;
    session::Session s(parts, options);
    std::vector<float> out;
    EvaluateOptions e;
    e.on_logits = [&](std::int64_t, std::span<const float> l) { out.insert(out.end(), l.begin(), l.end()); };
    s.evaluate(tokens.first(prefill), e);
    for (TokenId t : tokens.subspan(prefill)) s.evaluate({&t, 1}, e);
    if (stats != nullptr) *stats = s.stats();
    return out;
  }

  std::vector<float> resident(std::span<const TokenId> tokens) const {
    HostAllocator allocator;
    HostCopier copier;
    store::ResidentStore experts(binding.experts, folder, allocator, copier, {});
    return logits(experts, tokens, 0, tokens.size());
  }

  store::StreamingOptions streaming(std::size_t n_slots, std::size_t max_lease) const {
    store::StreamingOptions o;
    o.n_slots = n_slots;
    o.max_lease = max_lease;
    o.make_reader = [this](const io::MemoryRegions& regions) { return io::make_reader(files, regions, {}); };
    return o;
  }

  format::ModelFolder folder;
  model::ParsedModel parsed;
  model::Binding binding;
  std::unique_ptr<backend::Backend> backend;
  model::Model model;
  Precision precision;
  std::vector<std::filesystem::path> files;
};

inline std::vector<TokenId> golden_tokens(const std::string& fixture) {
  return to_tokens(TensorFile::load(fixtures() / fixture / "golden.safetensors").ints("tokens"));
}

// Slots that stay busy when nobody holds a lease: reads nobody waits for any more are given time to end.
inline std::size_t leaked_slots(store::StreamingStore& s) {
  for (int i = 0; i < 500 && s.busy_slots() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return s.busy_slots();
}

}  // namespace moeflux::test
