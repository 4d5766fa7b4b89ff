#include "engine/c_api_caller.h"

#include <stdlib.h>
#include <string.h>

struct buffer {
  char* text;
  size_t capacity;
  size_t used;
};

static bool append(void* user_data, int32_t token, const char* text, size_t n_bytes) {
  struct buffer* out = user_data;
  (void)token;
  if (out->used + n_bytes >= out->capacity) return false;
  memcpy(out->text + out->used, text, n_bytes);
  out->used += n_bytes;
  out->text[out->used] = '\0';
  return true;
}

static mf_status generate(mf_engine* engine, const int32_t* tokens, size_t n_prompt, int64_t n_tokens,
                          struct buffer* out, mf_error* error) {
  mf_session* session = NULL;
  mf_session_params session_params = mf_session_params_default();
  mf_generate_params params = mf_generate_params_default();
  mf_generate_result result;
  mf_status status;

  session_params.ctx_size = 256;
  status = mf_session_create(engine, &session_params, &session, error);
  if (status != MF_OK) return status;
  params.max_tokens = n_tokens;
  params.sampling = mf_engine_default_sampling(engine);
  params.sampling.temperature = 0;
  params.on_token = append;
  params.user_data = out;
  status = mf_session_generate(session, tokens, n_prompt, &params, &result, error);
  mf_session_free(session);
  return status;
}

mf_status c_generate(const char* model, const char* prompt, int64_t n_tokens, char* out, size_t capacity,
                     mf_error* error) {
  mf_engine_params params = mf_engine_params_default();
  mf_engine* engine = NULL;
  int32_t* tokens = NULL;
  size_t n_prompt = 0;
  struct buffer buffer = {out, capacity, 0};
  mf_status status;

  params.model = model;
  params.n_threads = 1;
  status = mf_engine_open(&params, &engine, error);
  if (status == MF_OK) status = mf_tokenize(engine, prompt, strlen(prompt), false, NULL, 0, &n_prompt, error);
  if (status == MF_OK) {
    tokens = malloc(n_prompt * sizeof *tokens);
    status = mf_tokenize(engine, prompt, strlen(prompt), false, tokens, n_prompt, &n_prompt, error);
  }
  if (status == MF_OK) status = generate(engine, tokens, n_prompt, n_tokens, &buffer, error);
  free(tokens);
  mf_engine_free(engine);
  return status;
}
