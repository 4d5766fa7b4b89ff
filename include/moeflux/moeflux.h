/* The C interface of moeflux.
 *
 * An engine is a loaded model, a session one sequence on it. Engines may be shared between threads; a session
 * belongs to one thread at a time, except for mf_session_cancel(). Free sessions before their engine.
 *
 * Calls that can fail return a status (MF_OK is 0) and describe the failure in an mf_error when one is given.
 * NULL where an object or a result is needed is MF_INVALID_ARGUMENT, or an empty answer where there is no
 * status. Nothing is printed, nothing ends the process, no exception passes. Strings are UTF-8.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t mf_status;
enum {
  MF_OK = 0,
  MF_INVALID_ARGUMENT = 1, /* the caller's input */
  MF_INVALID_MODEL = 2,    /* a file that breaks its format's rules or does not fit its config */
  MF_UNSUPPORTED = 3,      /* well-formed, but not implemented by this build */
  MF_IO = 4,               /* the operating system refused */
  MF_OUT_OF_MEMORY = 5,
  MF_CANCELLED = 6, /* by mf_session_cancel() */
  MF_INTERNAL = 7   /* a bug in moeflux */
};

/* Filled by the call it was given to: MF_OK and "" on success. */
typedef struct mf_error {
  mf_status code;
  char message[512]; /* ends with 0; cut when longer */
} mf_error;

typedef struct mf_engine mf_engine;
typedef struct mf_session mf_session;

enum { MF_PRECISION_EXACT = 0, MF_PRECISION_FAST = 1 };
enum { MF_KV_F32 = 0, MF_KV_F16 = 1 };
enum { MF_LOG_DEBUG = 0, MF_LOG_INFO = 1, MF_LOG_WARNING = 2, MF_LOG_ERROR = 3 };
enum {
  MF_STOP_MAX_TOKENS = 0,
  MF_STOP_STOP_TOKEN = 1,
  MF_STOP_CONTEXT_FULL = 2,
  MF_STOP_CANCELLED = 3,
  MF_STOP_CALLBACK = 4
};

/* From any thread, one call at a time. */
typedef void (*mf_log_callback)(void* user_data, int32_t level, const char* message);
/* While an engine opens; done == total once at the end. */
typedef void (*mf_progress_callback)(void* user_data, const char* what, uint64_t done, uint64_t total);

/* Start from mf_engine_params_default(): fields may be added. */
typedef struct mf_engine_params {
  const char* model;                /* folder with config.json and safetensors */
  int32_t n_threads;                /* < 1: one per usable core */
  int32_t precision;                /* MF_PRECISION_.. */
  const char* isa;                  /* NULL or "": the best of this CPU; "avx512vnni", "avx2", .. force one */
  mf_log_callback on_log;           /* may be NULL; called as long as the engine lives */
  mf_progress_callback on_progress; /* may be NULL */
  void* user_data;                  /* for both */
} mf_engine_params;

typedef struct mf_session_params {
  int64_t ctx_size;   /* positions; 0: the model's limit, at most 4096 */
  int64_t chunk_size; /* prompt tokens computed together; 0: 512. Never changes a result. */
  int32_t kv;         /* MF_KV_.. */
} mf_session_params;

/* temperature 0 is greedy. Steps, in this order: repetition, frequency and presence penalties over the last
 * repeat_last_n tokens, top_k, top_p, min_p, temperature, one draw. */
typedef struct mf_sampling_params {
  double temperature;
  double top_p;          /* >= 1: off */
  double min_p;          /* <= 0: off */
  double repeat_penalty; /* > 0; 1: off */
  double frequency_penalty;
  double presence_penalty;
  int64_t top_k;         /* <= 0: off */
  int64_t repeat_last_n; /* 0: no penalties, -1: the whole context */
  uint64_t seed;         /* a seed gives the same text on every run and machine */
} mf_sampling_params;

/* Every token with the text that became complete: whole UTF-8 sequences, n_bytes of them (no 0 at the end),
 * possibly none. Return false to stop. */
typedef bool (*mf_token_callback)(void* user_data, int32_t token, const char* text, size_t n_bytes);

typedef struct mf_generate_params {
  int64_t max_tokens; /* < 0: until a stop token or the end of the context */
  mf_sampling_params sampling;
  mf_token_callback on_token; /* may be NULL */
  void* user_data;
  bool ignore_stop; /* go on past stop tokens */
} mf_generate_params;

typedef struct mf_generate_result {
  int64_t n_tokens; /* generated, a stop token not counted */
  int32_t reason;   /* MF_STOP_.. */
} mf_generate_result;

typedef struct mf_stats {
  int64_t prefill_tokens;
  int64_t decode_tokens;
  uint64_t prefill_ns;
  uint64_t decode_ns;
  uint64_t expert_requests; /* routed experts asked for, once per layer and chunk */
  uint64_t expert_hits;     /* of them, how many were in memory */
  uint64_t bytes_read;      /* from disk for this session's experts */
  uint64_t stall_ns;        /* time spent waiting for experts */
  uint64_t logits_hash;     /* of the bytes of the last logits; 0 before there are any */
} mf_stats;

const char* mf_version(void);                 /* "0.1.0" */
const char* mf_status_name(mf_status status); /* "ok", "invalid argument", .. */

mf_engine_params mf_engine_params_default(void);
mf_session_params mf_session_params_default(void);
mf_sampling_params mf_sampling_params_default(void);
mf_generate_params mf_generate_params_default(void);

/* *engine is NULL after a failure. */
mf_status mf_engine_open(const mf_engine_params* params, mf_engine** engine, mf_error* error);
void mf_engine_free(mf_engine* engine); /* NULL is fine */

int64_t mf_engine_vocab_size(const mf_engine* engine);
int64_t mf_engine_n_layers(const mf_engine* engine);
int64_t mf_engine_max_context(const mf_engine* engine);
bool mf_engine_has_tokenizer(const mf_engine* engine);
bool mf_engine_is_stop_token(const mf_engine* engine, int32_t token);
/* What generation_config.json asks for; the library's defaults elsewhere. */
mf_sampling_params mf_engine_default_sampling(const mf_engine* engine);

/* Results of unknown size: the call writes what fits into the caller's buffer and sets *n_.. to the whole
 * size. Ask with NULL and 0 first, or again with a larger buffer when *n_.. exceeds the capacity.
 * MF_UNSUPPORTED: the model has no tokenizer. */

/* Special tokens in the text stay plain text unless parse_special. */
mf_status mf_tokenize(const mf_engine* engine, const char* text, size_t n_bytes, bool parse_special,
                      int32_t* tokens, size_t capacity, size_t* n_tokens, mf_error* error);
/* Bytes, followed by a 0 where there is room; *n_bytes does not count it. */
mf_status mf_detokenize(const mf_engine* engine, const int32_t* tokens, size_t n_tokens, bool skip_special,
                        char* text, size_t capacity, size_t* n_bytes, mf_error* error);
/* The bytes of one token: may be part of a UTF-8 sequence. */
mf_status mf_token_to_text(const mf_engine* engine, int32_t token, char* text, size_t capacity,
                           size_t* n_bytes, mf_error* error);

/* NULL params: the defaults. *session is NULL after a failure. */
mf_status mf_session_create(mf_engine* engine, const mf_session_params* params, mf_session** session,
                            mf_error* error);
void mf_session_free(mf_session* session); /* NULL is fine */

/* Appends tokens and computes the logits of the last one. */
mf_status mf_session_prefill(mf_session* session, const int32_t* tokens, size_t n_tokens, mf_error* error);
mf_status mf_session_step(mf_session* session, int32_t token, mf_error* error);
/* Of the last position: *n_logits floats, valid until the next call on the session. NULL before the first. */
const float* mf_session_logits(const mf_session* session, size_t* n_logits);
/* Prefills the prompt (may be empty when there are logits) and generates. NULL params: the defaults.
 * Cancellation is a reason in *result, not a failure; result may be NULL. */
mf_status mf_session_generate(mf_session* session, const int32_t* prompt, size_t n_prompt,
                              const mf_generate_params* params, mf_generate_result* result, mf_error* error);

int64_t mf_session_position(const mf_session* session); /* tokens so far */
int64_t mf_session_ctx_size(const mf_session* session);
mf_status mf_session_reset(mf_session* session,
                           mf_error* error); /* back to position 0; statistics are kept */

/* Stops the running call soon. From any thread and from a signal handler. Stays set until
 * mf_session_reset_cancel(). */
void mf_session_cancel(mf_session* session);
void mf_session_reset_cancel(mf_session* session);

mf_stats mf_session_stats(const mf_session* session); /* all 0 for NULL */

#ifdef __cplusplus
}
#endif
