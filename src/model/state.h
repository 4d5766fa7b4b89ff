// What a sequence keeps per layer, as views: the session owns the memory.
#pragma once

#include <cstdint>
#include <vector>

#include <moeflux/types.h>

#include "core/tensor_view.h"
#include "model/spec.h"

namespace moeflux::model {

// A layer uses one pair or the other, by its mixer.
struct LayerState {
  // Attention: [ctx, n_kv_heads, head_dim], F32 or F16. Latent attention: k is [ctx, 1, kv_rank + rope_dim] and v its front.
  TensorView k, v;
  TensorView conv, delta;  // delta-net: [n_taps - 1, conv_width], [n_v_heads, v_dim, k_dim], f32
};

// Bytes of one layer's cache for `ctx` positions, and of its recurrent state.
std::uint64_t kv_bytes(const LayerSpec& layer, std::int64_t ctx, KvType type);
std::uint64_t recurrent_bytes(const LayerSpec& layer);

}  // namespace moeflux::model
