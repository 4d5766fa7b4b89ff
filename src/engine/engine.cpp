#include <moeflux/engine.h>

#include <algorithm>

#include "core/error.h"
#include "core/json.h"
#include "engine/backend_setup.h"
#include "engine/engine_impl.h"
#include "engine/budget.h"
#include "engine/expert_setup.h"
#include "engine/inspect.h"
#include "format/model_config.h"
#include "model/binder.h"
#include "model/family.h"

namespace moeflux {
namespace {

void add_stop(std::vector<TokenId>& out, std::int64_t id, std::int64_t vocab) {
  if (id < 0 || id >= vocab) return;  // a padding or vision id of another vocabulary
  const auto token = TokenId(static_cast<std::int32_t>(id));
  if (std::find(out.begin(), out.end(), token) == out.end()) out.push_back(token);
}

void add_stops(std::vector<TokenId>& out, const Json& config, std::string_view origin, std::int64_t vocab) {
  const Json* eos = json_find(config, "eos_token_id");
  if (eos == nullptr) return;
  const Json list = eos->is_array() ? *eos : Json::array({*eos});
  for (const Json& id : list) {
    if (!id.is_number_integer()) fail(ErrorCode::InvalidModel, "{}: \"eos_token_id\" must be an integer or a list of them", origin);
    add_stop(out, id.get<std::int64_t>(), vocab);
  }
}

// The union of what the generation config, the model config and the tokenizer call an end.
std::vector<TokenId> collect_stops(const format::ModelFolder& folder, const text::Tokenizer* text, std::int64_t vocab) {
  std::vector<TokenId> out;
  const std::string origin = (folder.path() / "generation_config.json").string();
  for (std::int64_t id : format::parse_generation_config(folder.generation_config(), origin).eos_token_ids) add_stop(out, id, vocab);
  add_stops(out, folder.config(), folder.config_origin(), vocab);
  if (const Json* text_config = json_find(folder.config(), "text_config")) add_stops(out, *text_config, folder.config_origin(), vocab);
  if (text != nullptr && text->eos()) add_stop(out, raw(*text->eos()), vocab);
  return out;
}

SamplingParams read_sampling(const format::ModelFolder& folder) {
  const format::GenerationDefaults d = format::parse_generation_config(folder.generation_config(), (folder.path() / "generation_config.json").string());
  SamplingParams p;
  p.temperature = d.temperature.value_or(p.temperature);
  p.top_k = d.top_k.value_or(p.top_k);
  p.top_p = d.top_p.value_or(p.top_p);
  p.min_p = d.min_p.value_or(p.min_p);
  p.repeat_penalty = d.repetition_penalty.value_or(p.repeat_penalty);
  if (d.do_sample && !*d.do_sample) p.temperature = 0.0;
  return p;
}

std::vector<bool> allowed_ids(const text::Tokenizer& text, std::int64_t vocab) {
  std::vector<bool> allowed(static_cast<std::size_t>(vocab));
  for (std::size_t i = 0; i < allowed.size(); ++i) allowed[i] = text.has_token(TokenId(static_cast<std::int32_t>(i)));
  return allowed;
}

}  // namespace

void Engine::Impl::log(LogLevel level, std::string_view message) {
  if (!options.log) return;
  const std::lock_guard lock(log_mutex);
  options.log(level, message);
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

std::unique_ptr<Engine> Engine::open(const EngineOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  const format::ModelFolder folder = format::ModelFolder::open(options.model);
  const model::ParsedModel parsed = model::parse_model(folder);
  const model::Binding binding = model::bind(folder, parsed.spec, parsed.names);
  binding.require_complete(folder);
  impl->info = engine::describe(folder, parsed, binding);
  for (const std::string& w : impl->info.warnings) impl->log(LogLevel::Warning, w);

  if (auto text = engine::load_tokenizer(options.model)) {
    impl->info.tokenizer = text->description();
    impl->allowed = allowed_ids(*text, parsed.spec.vocab_size);
    impl->tokenizer = Tokenizer(std::make_shared<const Tokenizer::Impl>(Tokenizer::Impl{std::move(*text)}));
  } else {
    impl->info.missing.emplace_back("tokenizer.json");
    impl->log(LogLevel::Warning, fmt::format("{}: no tokenizer.json: tokens only, no text", options.model.string()));
  }
  impl->stop_tokens = collect_stops(folder, impl->tokenizer ? &impl->tokenizer->impl_->text : nullptr, parsed.spec.vocab_size);
  impl->sampling = read_sampling(folder);

  engine::BackendSetup chosen = engine::make_backend(options, parsed.spec, binding, impl->host_memory);
  if (!chosen.note.empty()) impl->log(LogLevel::Info, chosen.note);
  impl->backend = std::move(chosen.backend);
  impl->model = std::make_unique<model::Model>(parsed.spec, binding, folder, *impl->backend, options.progress, engine::use_bands(options, *impl->backend));
  engine::ExpertSetup experts = chosen.on_device ? engine::make_device_experts(options, parsed.spec, binding, folder, *impl->backend, chosen.device_bytes)
                                                 : engine::make_expert_store(options, parsed.spec, binding, folder, *impl->backend);
  if (chosen.on_device && !experts.memory.all_in_memory && options.cpu_experts != CpuExperts::Off) impl->processor = engine::make_processor(options, impl->host_memory);
  impl->experts = std::move(experts.store);
  impl->experts_description = std::move(experts.description);
  impl->memory = experts.memory;
  impl->log(LogLevel::Info, "memory " + engine::describe(impl->memory));
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

const ModelInfo& Engine::info() const noexcept { return impl_->info; }
std::string Engine::backend_name() const { return impl_->backend->name(); }
const std::string& Engine::experts_description() const noexcept { return impl_->experts_description; }
const MemorySplit& Engine::memory() const noexcept { return impl_->memory; }
Precision Engine::precision() const noexcept { return impl_->options.precision; }
const Tokenizer* Engine::tokenizer() const noexcept { return impl_->tokenizer ? &*impl_->tokenizer : nullptr; }
const std::vector<TokenId>& Engine::stop_tokens() const noexcept { return impl_->stop_tokens; }
const SamplingParams& Engine::default_sampling() const noexcept { return impl_->sampling; }

std::unique_ptr<Session> Engine::create_session(const SessionOptions& options) {
  session::Parts parts{*impl_->model, *impl_->experts, *impl_->backend, impl_->options.precision};
  // Routers foretell what they would choose themselves, not what a replayed trace does.
  parts.prefetch = options.replay.empty() ? impl_->options.prefetch : Prefetch::Off;
  parts.default_chunk = impl_->memory.chunk_size;
  std::unique_ptr<engine::RoutingFiles> routing;
  if (!options.trace.empty() || !options.replay.empty())
    routing = std::make_unique<engine::RoutingFiles>(options.trace, options.replay, impl_->info.path.filename().string(), impl_->model->spec());
  parts.routing = routing.get();
  parts.processor = impl_->processor.get();
  parts.cpu_experts = impl_->options.cpu_experts;
  const text::Tokenizer* text = impl_->tokenizer ? &impl_->tokenizer->impl_->text : nullptr;
  return std::unique_ptr<Session>(new Session(std::make_unique<Session::Impl>(std::move(routing), parts, options, this, text, &impl_->allowed)));
}

const char* version() noexcept { return MOEFLUX_VERSION; }

}  // namespace moeflux
