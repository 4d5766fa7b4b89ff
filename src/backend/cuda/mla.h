// Attention over a latent cache on the tensor cores.
#pragma once

#include "backend/cuda/cuda_internal.h"

namespace moeflux::backend::cuda {

// Queues the op where it may be computed with 16-bit factors and has the shape for it: precision fast, one kv head for a multiple of 16
// query heads, keys of 513 to 576 values (a multiple of 16) whose first 512 are the value, a positive scale, no window, no sinks, on a
// device of compute capability 9.0. False: it has not, and nothing happened. A row's bytes depend on its query, its position and the
// cache, on nothing else.
bool run_latent_attention(CudaStream& s, const Attention& op);

}  // namespace moeflux::backend::cuda
