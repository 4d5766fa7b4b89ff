// What an engine owns, in the order in which it must be destroyed last to first.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <moeflux/engine.h>
#include <moeflux/plan.h>

#include "backend/backend.h"
#include "engine/routing_files.h"
#include "engine/tokenizer.h"
#include "format/model_folder.h"
#include "io/region_allocator.h"
#include "model/model.h"
#include "session/session.h"
#include "store/expert_store.h"

namespace moeflux {

struct Engine::Impl {
  EngineOptions options;
  ModelInfo info;
  io::RegionAllocator host_memory;  // of the CPU backend
  std::unique_ptr<backend::Backend> backend;
  std::unique_ptr<backend::Backend> processor;  // beside a device that has its experts in tiers; else null
  std::unique_ptr<model::Model> model;
  std::unique_ptr<store::ExpertStore> experts;
  std::string experts_description;
  MemorySplit memory;
  std::optional<Tokenizer> tokenizer;
  std::vector<TokenId> stop_tokens;
  SamplingParams sampling;
  std::vector<bool> allowed;  // ids that are tokens; empty without a tokenizer: all
  std::mutex log_mutex;

  void log(LogLevel level, std::string_view message);
};

struct Session::Impl {
  std::unique_ptr<engine::RoutingFiles> routing;  // may be null
  session::Session timeline;
  const Engine* engine;
  const text::Tokenizer* text;  // may be null
  const std::vector<bool>* allowed;

  // parts.routing is `files`.
  Impl(std::unique_ptr<engine::RoutingFiles> files, const session::Parts& parts, const SessionOptions& options, const Engine* owner,
       const text::Tokenizer* tokenizer, const std::vector<bool>* tokens)
      : routing(std::move(files)), timeline(parts, options), engine(owner), text(tokenizer), allowed(tokens) {}
};

}  // namespace moeflux
