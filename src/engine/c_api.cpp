// The C interface, written against the public C++ API alone.
#include <moeflux/engine.h>
#include <moeflux/error.h>
#include <moeflux/moeflux.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

struct mf_engine {
  std::unique_ptr<moeflux::Engine> engine;
};

struct mf_session {
  std::unique_ptr<moeflux::Session> session;
};

namespace {

using moeflux::Error;
using moeflux::ErrorCode;
using moeflux::TokenId;

constexpr mf_status status_of(ErrorCode code) { return static_cast<mf_status>(code) + 1; }
static_assert(status_of(ErrorCode::InvalidArgument) == MF_INVALID_ARGUMENT);
static_assert(status_of(ErrorCode::InvalidModel) == MF_INVALID_MODEL);
static_assert(status_of(ErrorCode::Unsupported) == MF_UNSUPPORTED);
static_assert(status_of(ErrorCode::Io) == MF_IO);
static_assert(status_of(ErrorCode::OutOfMemory) == MF_OUT_OF_MEMORY);
static_assert(status_of(ErrorCode::Cancelled) == MF_CANCELLED);
static_assert(status_of(ErrorCode::Internal) == MF_INTERNAL);
static_assert(static_cast<int>(moeflux::Precision::Exact) == MF_PRECISION_EXACT);
static_assert(static_cast<int>(moeflux::Precision::Fast) == MF_PRECISION_FAST);
static_assert(static_cast<int>(moeflux::KvType::F32) == MF_KV_F32);
static_assert(static_cast<int>(moeflux::KvType::F16) == MF_KV_F16);
static_assert(static_cast<int>(moeflux::LogLevel::Debug) == MF_LOG_DEBUG);
static_assert(static_cast<int>(moeflux::LogLevel::Info) == MF_LOG_INFO);
static_assert(static_cast<int>(moeflux::LogLevel::Warning) == MF_LOG_WARNING);
static_assert(static_cast<int>(moeflux::LogLevel::Error) == MF_LOG_ERROR);
static_assert(static_cast<int>(moeflux::StopReason::MaxTokens) == MF_STOP_MAX_TOKENS);
static_assert(static_cast<int>(moeflux::StopReason::StopToken) == MF_STOP_STOP_TOKEN);
static_assert(static_cast<int>(moeflux::StopReason::ContextFull) == MF_STOP_CONTEXT_FULL);
static_assert(static_cast<int>(moeflux::StopReason::Cancelled) == MF_STOP_CANCELLED);
static_assert(static_cast<int>(moeflux::StopReason::Callback) == MF_STOP_CALLBACK);

mf_status report(mf_error* error, mf_status code, std::string_view message) noexcept {
  if (error == nullptr) return code;
  error->code = code;
  std::size_t n = std::min(message.size(), sizeof(error->message) - 1);
  // A cut never leaves half a UTF-8 sequence.
  if (n < message.size())
    while (n > 0 && (static_cast<unsigned char>(message[n]) & 0xc0U) == 0x80) --n;
  std::copy_n(message.begin(), n, error->message);
  error->message[n] = '\0';
  return code;
}

// Runs `f` and turns whatever it throws into a status.
template <class F>
mf_status guarded(mf_error* error, F&& f) noexcept {
  try {
    f();
    return report(error, MF_OK, "");
  } catch (const Error& e) {
    return report(error, status_of(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return report(error, MF_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return report(error, MF_INTERNAL, e.what());
  } catch (...) {
    return report(error, MF_INTERNAL, "an exception of an unknown type");
  }
}

template <class T>
T& need(T* pointer, const char* name) {
  if (pointer == nullptr) throw Error(ErrorCode::InvalidArgument, std::string(name) + " is NULL");
  return *pointer;
}

// NULL is fine for an empty array.
template <class T>
void need_array(const T* pointer, std::size_t n, const char* name) {
  if (n > 0) need(pointer, name);
}

template <class Enum>
Enum checked_enum(std::int32_t value, Enum last, const char* name) {
  if (value < 0 || value > static_cast<std::int32_t>(last))
    throw Error(ErrorCode::InvalidArgument, std::string(name) + " has no value " + std::to_string(value));
  return static_cast<Enum>(value);
}

const moeflux::Tokenizer& tokenizer_of(const mf_engine* engine) {
  const moeflux::Engine& opened = *need(engine, "engine").engine;
  if (opened.tokenizer() == nullptr)
    throw Error(ErrorCode::Unsupported, opened.info().path.string() + ": no tokenizer.json");
  return *opened.tokenizer();
}

std::vector<TokenId> token_ids(const std::int32_t* tokens, std::size_t n) {
  need_array(tokens, n, "tokens");
  std::vector<TokenId> ids(n);
  std::transform(tokens, tokens + n, ids.begin(), [](std::int32_t token) { return TokenId{token}; });
  return ids;
}

void copy_text(std::string_view from, char* text, std::size_t capacity, std::size_t* n_bytes) {
  need_array(text, capacity, "text");
  need(n_bytes, "n_bytes") = from.size();
  if (capacity == 0) return;
  std::memcpy(text, from.data(), std::min(from.size(), capacity));
  if (from.size() < capacity) text[from.size()] = '\0';
}

moeflux::EngineOptions engine_options(const mf_engine_params& params) {
  moeflux::EngineOptions options;
  options.model = &need(params.model, "model");
  options.n_threads = params.n_threads;
  options.isa = params.isa == nullptr ? "" : params.isa;
  options.precision = checked_enum(params.precision, moeflux::Precision::Fast, "precision");
  void* user_data = params.user_data;
  if (mf_log_callback log = params.on_log; log != nullptr) {
    options.log = [log, user_data](moeflux::LogLevel level, std::string_view text) {
      log(user_data, static_cast<std::int32_t>(level), std::string(text).c_str());
    };
  }
  if (mf_progress_callback progress = params.on_progress; progress != nullptr) {
    options.progress = [progress, user_data](std::string_view what, std::uint64_t done, std::uint64_t total) {
      progress(user_data, std::string(what).c_str(), done, total);
    };
  }
  return options;
}

mf_sampling_params to_c(const moeflux::SamplingParams& sampling) {
  mf_sampling_params params{};
  params.temperature = sampling.temperature;
  params.top_p = sampling.top_p;
  params.min_p = sampling.min_p;
  params.repeat_penalty = sampling.repeat_penalty;
  params.frequency_penalty = sampling.frequency_penalty;
  params.presence_penalty = sampling.presence_penalty;
  params.top_k = sampling.top_k;
  params.repeat_last_n = sampling.repeat_last_n;
  params.seed = sampling.seed;
  return params;
}

moeflux::SamplingParams from_c(const mf_sampling_params& params) {
  moeflux::SamplingParams sampling;
  sampling.temperature = params.temperature;
  sampling.top_p = params.top_p;
  sampling.min_p = params.min_p;
  sampling.repeat_penalty = params.repeat_penalty;
  sampling.frequency_penalty = params.frequency_penalty;
  sampling.presence_penalty = params.presence_penalty;
  sampling.top_k = params.top_k;
  sampling.repeat_last_n = params.repeat_last_n;
  sampling.seed = params.seed;
  return sampling;
}

moeflux::GenerateOptions generate_options(const mf_generate_params& params) {
  moeflux::GenerateOptions options;
  options.max_tokens = params.max_tokens;
  options.sampling = from_c(params.sampling);
  options.ignore_stop = params.ignore_stop;
  if (mf_token_callback on_token = params.on_token; on_token != nullptr) {
    options.on_token = [on_token, user_data = params.user_data](TokenId token, std::string_view text) {
      // An empty view may have no address; C callers expect one.
      return on_token(user_data, moeflux::raw(token), text.empty() ? "" : text.data(), text.size());
    };
  }
  return options;
}

}  // namespace

extern "C" {

const char* mf_version(void) { return moeflux::version(); }

const char* mf_status_name(mf_status status) {
  if (status == MF_OK) return "ok";
  if (status < MF_OK || status > MF_INTERNAL) return "unknown status";
  return moeflux::error_code_name(static_cast<ErrorCode>(status - 1));
}

mf_engine_params mf_engine_params_default(void) {
  mf_engine_params params{};
  params.precision = MF_PRECISION_FAST;
  return params;
}

mf_session_params mf_session_params_default(void) { return mf_session_params{}; }

mf_sampling_params mf_sampling_params_default(void) { return to_c(moeflux::SamplingParams{}); }

mf_generate_params mf_generate_params_default(void) {
  mf_generate_params params{};
  params.max_tokens = -1;
  params.sampling = mf_sampling_params_default();
  return params;
}

mf_status mf_engine_open(const mf_engine_params* params, mf_engine** engine, mf_error* error) {
  if (engine != nullptr) *engine = nullptr;
  return guarded(error, [&] {
    mf_engine*& out = need(engine, "engine");
    auto opened = std::make_unique<mf_engine>();
    opened->engine = moeflux::Engine::open(engine_options(need(params, "params")));
    out = opened.release();
  });
}

void mf_engine_free(mf_engine* engine) { delete engine; }

int64_t mf_engine_vocab_size(const mf_engine* engine) {
  return engine == nullptr ? 0 : engine->engine->info().vocab_size;
}

int64_t mf_engine_n_layers(const mf_engine* engine) {
  return engine == nullptr ? 0 : engine->engine->info().n_layers;
}

int64_t mf_engine_max_context(const mf_engine* engine) {
  return engine == nullptr ? 0 : engine->engine->info().max_context;
}

bool mf_engine_has_tokenizer(const mf_engine* engine) {
  return engine != nullptr && engine->engine->tokenizer() != nullptr;
}

bool mf_engine_is_stop_token(const mf_engine* engine, int32_t token) {
  if (engine == nullptr) return false;
  const std::vector<TokenId>& stop = engine->engine->stop_tokens();
  return std::find(stop.begin(), stop.end(), TokenId{token}) != stop.end();
}

mf_sampling_params mf_engine_default_sampling(const mf_engine* engine) {
  return engine == nullptr ? mf_sampling_params_default() : to_c(engine->engine->default_sampling());
}

mf_status mf_tokenize(const mf_engine* engine, const char* text, size_t n_bytes, bool parse_special,
                      int32_t* tokens, size_t capacity, size_t* n_tokens, mf_error* error) {
  if (n_tokens != nullptr) *n_tokens = 0;
  return guarded(error, [&] {
    need_array(text, n_bytes, "text");
    need_array(tokens, capacity, "tokens");
    const std::string_view view = n_bytes == 0 ? std::string_view() : std::string_view(text, n_bytes);
    const std::vector<TokenId> ids = tokenizer_of(engine).encode(view, parse_special);
    need(n_tokens, "n_tokens") = ids.size();
    for (std::size_t i = 0; i < std::min(ids.size(), capacity); ++i) tokens[i] = moeflux::raw(ids[i]);
  });
}

mf_status mf_detokenize(const mf_engine* engine, const int32_t* tokens, size_t n_tokens, bool skip_special,
                        char* text, size_t capacity, size_t* n_bytes, mf_error* error) {
  if (n_bytes != nullptr) *n_bytes = 0;
  return guarded(error, [&] {
    copy_text(tokenizer_of(engine).decode(token_ids(tokens, n_tokens), skip_special), text, capacity,
              n_bytes);
  });
}

mf_status mf_token_to_text(const mf_engine* engine, int32_t token, char* text, size_t capacity,
                           size_t* n_bytes, mf_error* error) {
  if (n_bytes != nullptr) *n_bytes = 0;
  return guarded(
      error, [&] { copy_text(tokenizer_of(engine).token_text(TokenId{token}), text, capacity, n_bytes); });
}

mf_status mf_session_create(mf_engine* engine, const mf_session_params* params, mf_session** session,
                            mf_error* error) {
  if (session != nullptr) *session = nullptr;
  return guarded(error, [&] {
    mf_session*& out = need(session, "session");
    const mf_session_params given = params == nullptr ? mf_session_params_default() : *params;
    moeflux::SessionOptions options;
    options.ctx_size = given.ctx_size;
    options.chunk_size = given.chunk_size;
    options.kv = checked_enum(given.kv, moeflux::KvType::F16, "kv");
    auto created = std::make_unique<mf_session>();
    created->session = need(engine, "engine").engine->create_session(options);
    out = created.release();
  });
}

void mf_session_free(mf_session* session) { delete session; }

mf_status mf_session_prefill(mf_session* session, const int32_t* tokens, size_t n_tokens, mf_error* error) {
  return guarded(error, [&] { need(session, "session").session->prefill(token_ids(tokens, n_tokens)); });
}

mf_status mf_session_step(mf_session* session, int32_t token, mf_error* error) {
  return guarded(error, [&] { need(session, "session").session->step(TokenId{token}); });
}

const float* mf_session_logits(const mf_session* session, size_t* n_logits) {
  const std::span<const float> logits =
      session == nullptr ? std::span<const float>() : session->session->logits();
  if (n_logits != nullptr) *n_logits = logits.size();
  return logits.empty() ? nullptr : logits.data();
}

mf_status mf_session_generate(mf_session* session, const int32_t* prompt, size_t n_prompt,
                              const mf_generate_params* params, mf_generate_result* result, mf_error* error) {
  if (result != nullptr) *result = mf_generate_result{};
  return guarded(error, [&] {
    const mf_generate_params given = params == nullptr ? mf_generate_params_default() : *params;
    const moeflux::GenerateResult generated =
        need(session, "session").session->generate(token_ids(prompt, n_prompt), generate_options(given));
    if (result == nullptr) return;
    result->n_tokens = generated.n_tokens;
    result->reason = static_cast<std::int32_t>(generated.reason);
  });
}

int64_t mf_session_position(const mf_session* session) {
  return session == nullptr ? 0 : session->session->position();
}

int64_t mf_session_ctx_size(const mf_session* session) {
  return session == nullptr ? 0 : session->session->ctx_size();
}

mf_status mf_session_reset(mf_session* session, mf_error* error) {
  return guarded(error, [&] { need(session, "session").session->reset(); });
}

void mf_session_cancel(mf_session* session) {
  if (session != nullptr) session->session->cancel();
}

void mf_session_reset_cancel(mf_session* session) {
  if (session != nullptr) session->session->reset_cancel();
}

mf_stats mf_session_stats(const mf_session* session) {
  mf_stats out{};
  if (session == nullptr) return out;
  const moeflux::SessionStats& stats = session->session->stats();
  out.prefill_tokens = stats.prefill_tokens;
  out.decode_tokens = stats.decode_tokens;
  out.prefill_ns = stats.prefill_ns;
  out.decode_ns = stats.decode_ns;
  out.expert_requests = stats.expert_requests;
  out.expert_hits = stats.expert_hits;
  out.bytes_read = stats.bytes_read;
  out.stall_ns = stats.stall_ns;
  out.logits_hash = stats.logits_hash;
  return out;
}

}  // extern "C"
