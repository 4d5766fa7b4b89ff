#include "store/slot_layout.h"

#include <algorithm>

#include "core/error.h"
#include "io/async_reader.h"

namespace moeflux::store {
namespace {

// Room for the largest window that any expert's piece p needs.
std::uint64_t window_bytes(const ExpertLayer& layer, std::size_t piece) {
  std::uint64_t most = 0;
  for (std::int64_t e = 0; e < layer.n_experts; ++e) {
    const format::Extent& x = layer.expert(ExpertIdx(static_cast<std::int32_t>(e)))[piece].source;
    most = std::max(most, io::aligned_window(x.offset, x.bytes).bytes);
  }
  return most;
}

}  // namespace

SlotLayout::SlotLayout(const ExpertCatalog& catalog) {
  for (const ExpertLayer& layer : catalog.layers) {
    Layer& out = layers_.emplace_back();
    if (layer.n_experts == 0) continue;
    if (layer.pieces_per_expert > kMaxPieces) fail(ErrorCode::InvalidModel, "an expert in {} pieces", layer.pieces_per_expert);
    std::uint64_t at = 0;
    const auto pieces = layer.expert(ExpertIdx(0));
    for (std::size_t p = 0; p < layer.pieces_per_expert; ++p) {
      const bool read = needs_read(pieces, p);
      out.windows.push_back(read ? at : out.windows.back());
      if (read) at += window_bytes(layer, p);
    }
    for (const RecordPiece& piece : pieces) {
      out.changed.push_back(at);
      if (!piece.direct()) at = round_up(at + piece.record_bytes(), kComponentAlign);
    }
    at = round_up(at, kRecordAlign);
    slot_bytes_ = std::max(slot_bytes_, at);
    const auto place = [&](std::uint64_t record_offset) -> Place {
      for (std::size_t p = 0; p < pieces.size(); ++p)
        if (record_offset >= pieces[p].record_offset && record_offset < pieces[p].record_offset + pieces[p].record_bytes())
          return {p, record_offset - pieces[p].record_offset};
      fail(ErrorCode::Internal, "no piece holds byte {} of a record", record_offset);
    };
    std::size_t i = 0;
    for (const RecordMatrix* m : {&layer.layout.gate, &layer.layout.up, &layer.layout.down}) {
      out.places[i++] = place(m->data_at);
      out.places[i++] = m->format.quantized() ? place(m->scales_at) : Place{};
      out.places[i++] = m->format.has_biases() ? place(m->biases_at) : Place{};
    }
    for (const RecordVector* v : {&layer.layout.gate_bias, &layer.layout.up_bias, &layer.layout.down_bias})
      out.places[i++] = v->count > 0 ? place(v->at) : Place{};
  }
}

void SlotLayout::transform(const ExpertCatalog& catalog, LayerIdx layer, ExpertIdx expert, std::byte* slot) const {
  const Layer& at = layers_[static_cast<std::size_t>(raw(layer))];
  const auto pieces = catalog.layer(layer).expert(expert);
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    if (pieces[p].direct()) continue;
    const format::Extent& source = pieces[p].source;
    apply(pieces[p].transform, {slot + at.windows[p] + source.offset % io::kDirectAlign, source.bytes},
          {slot + at.changed[p], pieces[p].record_bytes()});
  }
}

const std::byte* SlotLayout::piece(const ExpertCatalog& catalog, LayerIdx layer, ExpertIdx expert, std::size_t p, const std::byte* slot) const noexcept {
  const Layer& at = layers_[static_cast<std::size_t>(raw(layer))];
  const RecordPiece& piece = catalog.layer(layer).expert(expert)[p];
  return piece.direct() ? slot + at.windows[p] + piece.source.offset % io::kDirectAlign : slot + at.changed[p];
}

ExpertView SlotLayout::view(const ExpertCatalog& catalog, LayerIdx layer, ExpertIdx expert, const std::byte* slot) const noexcept {
  const ExpertLayer& source = catalog.layer(layer);
  const Layer& at = layers_[static_cast<std::size_t>(raw(layer))];
  const auto pieces = source.expert(expert);
  const auto pointer = [&](std::size_t component) {
    const Place& p = at.places[component];
    if (!pieces[p.piece].direct()) return slot + at.changed[p.piece] + p.delta;
    return slot + at.windows[p.piece] + pieces[p.piece].source.offset % io::kDirectAlign + p.delta;
  };
  const auto matrix = [&](const RecordMatrix& m, std::size_t first) {
    quant::MatrixView v;
    v.format = m.format;
    v.rows = m.rows;
    v.cols = m.cols;
    v.data = pointer(first);
    if (m.format.quantized()) v.scales = pointer(first + 1);
    if (m.format.has_biases()) v.biases = pointer(first + 2);
    return v;
  };
  const auto vector = [&](const RecordVector& v, std::size_t component) {
    return v.count == 0 ? TensorView{} : view_f32(reinterpret_cast<const float*>(pointer(component)), {v.count});
  };
  const RecordLayout& l = source.layout;
  return {matrix(l.gate, 0), matrix(l.up, 3), matrix(l.down, 6), vector(l.gate_bias, 9), vector(l.up_bias, 10), vector(l.down_bias, 11)};
}

}  // namespace moeflux::store
