#include "session/sequence_state.h"

#include <algorithm>

#include "core/error.h"
#include "core/units.h"

namespace moeflux::session {

Buffer& SequenceState::add(std::uint64_t bytes) {
  buffers_.push_back(allocator_.allocate(bytes, 64));
  bytes_ += bytes;
  return buffers_.back();
}

SequenceState::SequenceState(const model::ModelSpec& spec, std::int64_t ctx, KvType kv, Allocator& allocator, Copier& copier)
    : allocator_(allocator), copier_(copier) {
  const DType dtype = kv == KvType::F16 ? DType::F16 : DType::F32;
  for (const model::LayerSpec& layer : spec.layers) {
    model::LayerState& s = layers_.emplace_back();
    if (const auto* gqa = std::get_if<model::GqaSpec>(&layer.mixer)) {
      const std::uint64_t half = model::kv_bytes(layer, ctx, kv) / 2;
      s.k = make_view(add(half).data(), dtype, {ctx, gqa->n_kv_heads, gqa->head_dim});
      s.v = make_view(add(half).data(), dtype, {ctx, gqa->n_kv_heads, gqa->head_dim});
    } else if (const auto* mla = std::get_if<model::MlaSpec>(&layer.mixer)) {
      s.k = make_view(add(model::kv_bytes(layer, ctx, kv)).data(), dtype, {ctx, 1, mla->cache_dim()});
      s.v = s.k;
      s.v.dims[2] = mla->kv_rank;
    } else {
      const auto& delta = std::get<model::GatedDeltaSpec>(layer.mixer);
      const auto conv_bytes = static_cast<std::uint64_t>(delta.n_taps - 1) * static_cast<std::uint64_t>(delta.conv_width()) * 4;
      s.conv = view_f32(add(conv_bytes).as<float>(), {delta.n_taps - 1, delta.conv_width()});
      s.delta = view_f32(add(model::recurrent_bytes(layer) - conv_bytes).as<float>(), {delta.n_v_heads, delta.v_dim, delta.k_dim});
      recurrent_.push_back(s.conv);
      recurrent_.push_back(s.delta);
    }
  }
}

void SequenceState::reset() {
  std::vector<std::byte> zeros;
  for (const TensorView& t : recurrent_) {
    const auto bytes = static_cast<std::size_t>(t.count()) * 4;
    zeros.resize(std::max(zeros.size(), bytes));
    copier_.to_device(static_cast<std::byte*>(t.data), zeros.data(), bytes);
  }
}

}  // namespace moeflux::session
