// The tensors of a model, once as sources on disk and once as views in memory: the same structs over two pairs of types.
#pragma once

#include <utility>
#include <variant>
#include <vector>

#include "core/tensor_view.h"
#include "quant/format.h"
#include "store/trunk_store.h"

namespace moeflux::model {

// M is a matrix, V a vector. map(f) gives the same struct with f applied to every member; for matmul_only(matrix) see below.
template <class M, class V>
struct GqaTensors {
  M q, k, v, o;
  V q_norm, k_norm;                  // [head_dim], [projection] or none
  V q_bias, k_bias, v_bias, o_bias;  // or none
  V sinks;                           // [n_heads] or none
  template <class F>
  auto map(F&& f) const {
    using R = GqaTensors<decltype(f(q)), decltype(f(q_norm))>;
    return R{f(q), f(k), f(v), f(o), f(q_norm), f(k_norm), f(q_bias), f(k_bias), f(v_bias), f(o_bias), f(sinks)};
  }
};

template <class M, class V>
struct MlaTensors {
  M q_a;          // [q_rank, D] or none
  M q;            // [q_dim, q_rank or D]
  M kv_a;         // [kv_rank + rope_dim, D]
  M k_b;          // [n_heads * nope_dim, kv_rank]: takes the latent to a head's key, and the query to the latent
  M embed_q;      // [n_heads * kv_rank, nope_dim]: the same transposed; one of the two is there
  M v_b;          // [n_heads * v_dim, kv_rank]: takes the latent to a head's value
  M o;            // [D, out_dim]
  V q_norm;       // [q_rank] or none
  V kv_norm;      // [kv_rank]
  template <class F>
  auto map(F&& f) const {
    using R = MlaTensors<decltype(f(q)), decltype(f(kv_norm))>;
    return R{f(q_a), f(q), f(kv_a), f(k_b), f(embed_q), f(v_b), f(o), f(q_norm), f(kv_norm)};
  }
  bool matmul_only(const M& m) const noexcept { return &m != &k_b && &m != &embed_q && &m != &v_b; }
};

template <class M, class V>
struct GatedDeltaTensors {
  M qkv, z, b, a, out;
  V conv;       // [conv_width * n_taps], channel-major
  V neg_exp_a;  // [n_v_heads]
  V dt_bias;    // [n_v_heads]
  V norm;       // [v_dim]
  template <class F>
  auto map(F&& f) const {
    using R = GatedDeltaTensors<decltype(f(qkv)), decltype(f(conv))>;
    return R{f(qkv), f(z), f(b), f(a), f(out), f(conv), f(neg_exp_a), f(dt_bias), f(norm)};
  }
};

template <class M, class V>
struct FfnTensors {
  M gate, up, down;
  template <class F>
  auto map(F&& f) const {
    using R = FfnTensors<decltype(f(gate)), decltype(f(std::declval<const V&>()))>;
    return R{f(gate), f(up), f(down)};
  }
};

template <class M, class V>
struct MoeTensors {
  M router;
  M shared_gate;                // [1, D] or none
  FfnTensors<M, V> shared;      // or none
  V router_bias, select_bias;   // [E] or none
  template <class F>
  auto map(F&& f) const {
    using R = MoeTensors<decltype(f(router)), decltype(f(std::declval<const V&>()))>;
    return R{f(router), f(shared_gate), shared.map(f), f(router_bias), f(select_bias)};
  }
  bool matmul_only(const M& m) const noexcept { return &m != &router && &m != &shared_gate; }
};

// Whether a matrix of the struct meets nothing but matmuls of the model's own precision: those may have it in any order
// (quant::Order). Others are read by rows, or in exact precision whatever the model's is.
template <class Tensors, class M>
bool matmul_only(const Tensors& tensors, const M& m) noexcept {
  if constexpr (requires { tensors.matmul_only(m); }) return tensors.matmul_only(m);
  return true;
}

template <class M, class V>
struct LayerTensors {
  V input_norm, post_norm;  // [D]
  std::variant<GqaTensors<M, V>, MlaTensors<M, V>, GatedDeltaTensors<M, V>> mixer;
  std::variant<FfnTensors<M, V>, MoeTensors<M, V>> ffn;
};

template <class M, class V>
struct ModelTensors {
  M embed;  // [vocab, D]
  M head;   // none when tied
  V final_norm;
  std::vector<LayerTensors<M, V>> layers;
};

// f(matrix) and f(vector) for every tensor of the model, also those that are not there.
template <class M, class V, class F>
void for_each_tensor(const ModelTensors<M, V>& model, F&& f) {
  const auto visit = [&](const auto& tensor) {
    f(tensor);
    return 0;
  };
  visit(model.embed), visit(model.head), visit(model.final_norm);
  for (const auto& layer : model.layers) {
    visit(layer.input_norm), visit(layer.post_norm);
    std::visit([&](const auto& t) { t.map(visit); }, layer.mixer);
    std::visit([&](const auto& t) { t.map(visit); }, layer.ffn);
  }
}

using ModelSources = ModelTensors<store::MatrixSource, store::VectorSource>;
using ModelWeights = ModelTensors<quant::MatrixView, TensorView>;
using GqaWeights = GqaTensors<quant::MatrixView, TensorView>;
using MlaWeights = MlaTensors<quant::MatrixView, TensorView>;
using GatedDeltaWeights = GatedDeltaTensors<quant::MatrixView, TensorView>;
using FfnWeights = FfnTensors<quant::MatrixView, TensorView>;
using MoeWeights = MoeTensors<quant::MatrixView, TensorView>;
using LayerWeights = LayerTensors<quant::MatrixView, TensorView>;

}  // namespace moeflux::model
