#include "session/sequence_state.h"

#include <algorithm>

#include "core/checked.h"

namespace moeflux::session {

SequenceState::SequenceState(const model::ModelSpec& spec, std::int64_t ctx, KvType kv, Allocator& allocator, Copier& copier) : copier_(copier) {
  const std::uint64_t room = lay_out(spec, ctx, kv, nullptr);
  memory_ = allocator.allocate(room, 64);
  lay_out(spec, ctx, kv, memory_.data());
}

// Everything behind each other in one block, so that short caches lie on huge pages, too. Returns its size; `memory` null: nothing else.
std::uint64_t SequenceState::lay_out(const model::ModelSpec& spec, std::int64_t ctx, KvType kv, std::byte* memory) {
  layers_.clear(), recurrent_.clear();
  bytes_ = 0;
  std::uint64_t end = 0;
  const auto place = [&](std::uint64_t bytes) {
    std::byte* const at = memory == nullptr ? nullptr : memory + end;
    bytes_ = add_or_fail(bytes_, bytes, "sequence state");
    end = add_or_fail(end, round_up(bytes, 64), "sequence state");
    return at;
  };
  const DType dtype = kv == KvType::F16 ? DType::F16 : DType::F32;
  for (const model::LayerSpec& layer : spec.layers) {
    model::LayerState& s = layers_.emplace_back();
    if (const auto* gqa = std::get_if<model::GqaSpec>(&layer.mixer)) {
      const std::uint64_t half = model::kv_bytes(layer, ctx, kv) / 2;
      s.k = make_view(place(half), dtype, {ctx, gqa->n_kv_heads, gqa->head_dim});
      s.v = make_view(place(half), dtype, {ctx, gqa->n_kv_heads, gqa->head_dim});
    } else if (const auto* mla = std::get_if<model::MlaSpec>(&layer.mixer)) {
      s.k = make_view(place(model::kv_bytes(layer, ctx, kv)), dtype, {ctx, 1, mla->cache_dim()});
      s.v = s.k;
      s.v.dims[2] = mla->kv_rank;
    } else {
      const auto& delta = std::get<model::GatedDeltaSpec>(layer.mixer);
      const auto conv_bytes = static_cast<std::uint64_t>(delta.n_taps - 1) * static_cast<std::uint64_t>(delta.conv_width()) * 4;
      s.conv = view_f32(reinterpret_cast<float*>(place(conv_bytes)), {delta.n_taps - 1, delta.conv_width()});
      s.delta = view_f32(reinterpret_cast<float*>(place(model::recurrent_bytes(layer) - conv_bytes)), {delta.n_v_heads, delta.v_dim, delta.k_dim});
      recurrent_.push_back(s.conv);
      recurrent_.push_back(s.delta);
    }
  }
  return end;
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
