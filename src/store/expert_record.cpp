#include "store/expert_record.h"

#include <cstring>

#include "core/error.h"
#include "quant/bands.h"

namespace moeflux::store {
namespace {

std::uint64_t place(RecordMatrix& m, std::uint64_t at) {
  m.data_at = at;
  at = round_up(at + m.data_bytes(), kComponentAlign);
  if (m.format.quantized()) {
    m.scales_at = at;
    at = round_up(at + m.scale_bytes(), kComponentAlign);
  }
  if (m.format.has_biases()) {
    m.biases_at = at;
    at = round_up(at + m.scale_bytes(), kComponentAlign);
  }
  return at;
}

std::uint64_t place(RecordVector& v, std::int64_t count, std::uint64_t at) {
  v = {count, at};
  return round_up(at + static_cast<std::uint64_t>(count) * 4, kComponentAlign);
}

TensorView view_vector(const RecordVector& v, const std::byte* record) noexcept {
  return v.count == 0 ? TensorView{} : view_f32(reinterpret_cast<const float*>(record + v.at), {v.count});
}

quant::MatrixView view_matrix(const RecordMatrix& m, const std::byte* record) noexcept {
  quant::MatrixView v;
  v.format = m.format;
  v.rows = m.rows;
  v.cols = m.cols;
  v.order = m.order;
  v.data = record + m.data_at;
  if (m.order == quant::Order::Bands) return v;
  if (m.format.quantized()) v.scales = record + m.scales_at;
  if (m.format.has_biases()) v.biases = record + m.biases_at;
  return v;
}

}  // namespace

RecordLayout RecordLayout::plan(const RecordMatrix& gate, const RecordMatrix& up, const RecordMatrix& down, bool additive_biases) {
  RecordLayout layout{gate, up, down, 0, {}, {}, {}};
  std::uint64_t at = place(layout.gate, 0);
  at = place(layout.up, at);
  at = place(layout.down, at);
  if (additive_biases) {
    at = place(layout.gate_bias, gate.rows, at);
    at = place(layout.up_bias, up.rows, at);
    at = place(layout.down_bias, down.rows, at);
  }
  layout.bytes = round_up(at, kRecordAlign);
  return layout;
}

ExpertView view_record(const RecordLayout& layout, const std::byte* record) noexcept {
  return {view_matrix(layout.gate, record),      view_matrix(layout.up, record),      view_matrix(layout.down, record),
          view_vector(layout.gate_bias, record), view_vector(layout.up_bias, record), view_vector(layout.down_bias, record)};
}

RecordLayout with_bands(RecordLayout layout) noexcept {
  for (RecordMatrix* m : {&layout.gate, &layout.up, &layout.down})
    if (quant::has_bands(m->format, m->rows, m->cols)) m->order = quant::Order::Bands;
  return layout;
}

void to_bands(const RecordLayout& layout, std::byte* record, Allocator& scratch) {
  for (const RecordMatrix* m : {&layout.gate, &layout.up, &layout.down})
    if (quant::has_bands(m->format, m->rows, m->cols)) quant::to_bands(view_matrix(*m, record), record + m->data_at, scratch);
}

void place_piece(const RecordPiece& piece, std::span<const std::byte> source, std::span<std::byte> record) {
  const std::span<std::byte> to = record.subspan(piece.record_offset, piece.record_bytes());
  if (piece.direct())
    std::memcpy(to.data(), source.data(), to.size());
  else
    apply(piece.transform, source, to);
}

void check_scales(const quant::MatrixView& m, std::string_view what) {
  if (m.format.kind != quant::FormatKind::Mxfp4) return;
  const std::uint64_t n = static_cast<std::uint64_t>(m.rows) * m.scale_row_bytes();
  for (std::uint64_t i = 0; i < n; ++i)
    if (m.scales[i] == std::byte{255}) fail(ErrorCode::InvalidModel, "{}: scale {} is 255, which e8m0 does not define", what, i);
}

}  // namespace moeflux::store
