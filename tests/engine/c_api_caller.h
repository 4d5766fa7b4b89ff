/* A C program's view of the library, as a function. */
#pragma once

#include <moeflux/moeflux.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opens the model, generates n_tokens greedily from the text and frees everything again. The generated text
 * goes into out (ends with 0). */
mf_status c_generate(const char* model, const char* prompt, int64_t n_tokens, char* out, size_t capacity,
                     mf_error* error);

#ifdef __cplusplus
}
#endif
