// An expert in memory: one 4 KiB-aligned record with gate, up, down and their scales, and where its bytes lie on disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <moeflux/types.h>

#include "core/buffer.h"
#include "core/checked.h"
#include "core/tensor_view.h"
#include "format/model_folder.h"
#include "quant/format.h"
#include "store/piece_transform.h"
#include "store/record_check.h"

namespace moeflux::store {

// Records start and end at this alignment: direct reads and huge pages ask for it.
inline constexpr std::uint64_t kRecordAlign = 4096;
// Every component starts at this alignment inside its record: a cache line.
inline constexpr std::uint64_t kComponentAlign = 64;

// One matrix inside a record.
struct RecordMatrix {
  quant::Format format;
  std::int64_t rows = 0, cols = 0;
  std::uint64_t data_at = 0, scales_at = 0, biases_at = 0;  // offsets in the record
  quant::Order order = quant::Order::Rows;                  // bands: all of it from data_at on

  std::uint64_t data_bytes() const noexcept { return static_cast<std::uint64_t>(rows) * format.row_bytes(static_cast<std::uint64_t>(cols)); }
  std::uint64_t scale_bytes() const noexcept { return static_cast<std::uint64_t>(rows) * format.scale_row_bytes(static_cast<std::uint64_t>(cols)); }
  std::uint64_t bytes() const noexcept { return data_bytes() + scale_bytes() * (format.has_biases() ? 2 : 1); }
  std::uint64_t n_params() const noexcept { return static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(cols); }
};

// An additive bias inside a record, as f32. count == 0: there is none.
struct RecordVector {
  std::int64_t count = 0;
  std::uint64_t at = 0;

  std::uint64_t bytes() const noexcept { return static_cast<std::uint64_t>(count) * 4; }
};

// Where everything is in the records of one layer (all its experts are alike).
struct RecordLayout {
  RecordMatrix gate, up, down;
  std::uint64_t bytes = 0;  // a multiple of kRecordAlign
  RecordVector gate_bias, up_bias, down_bias;

  // Gate and up before down, each matrix followed by its scales and biases; additive biases last.
  static RecordLayout plan(const RecordMatrix& gate, const RecordMatrix& up, const RecordMatrix& down, bool additive_biases = false);
};

// A run of file bytes and its place in the record. With a transform the bytes read are not those of the record: whoever
// reads takes them into scratch memory and calls place_piece(). Pieces with the same source stand next to each other, so
// that it can be read once.
struct RecordPiece {
  format::Extent source;
  std::uint64_t record_offset = 0;
  PieceTransform transform = {};

  bool direct() const noexcept { return !transform.active(); }
  std::uint64_t record_bytes() const noexcept { return direct() ? source.bytes : transform.result_bytes(); }
};

// The record's bytes of a piece from the bytes of its source.
void place_piece(const RecordPiece& piece, std::span<const std::byte> source, std::span<std::byte> record);

// The experts of one layer on disk. Empty (no experts) for a dense layer.
struct ExpertLayer {
  RecordLayout layout;
  std::int64_t n_experts = 0;
  std::size_t pieces_per_expert = 0;
  std::vector<RecordPiece> pieces;  // [n_experts, pieces_per_expert]
  std::vector<RecordCheck> checks;  // [n_experts] in a pack, where a record is one piece as it is; else none

  std::span<const RecordPiece> expert(ExpertIdx e) const noexcept {
    return {pieces.data() + static_cast<std::size_t>(raw(e)) * pieces_per_expert, pieces_per_expert};
  }
  std::optional<RecordCheck> check(ExpertIdx e) const noexcept {
    return checks.empty() ? std::nullopt : std::optional(checks[static_cast<std::size_t>(raw(e))]);
  }
};

// All routed experts of a model, by layer.
struct ExpertCatalog {
  std::vector<ExpertLayer> layers;
  const ExpertLayer& layer(LayerIdx l) const noexcept { return layers[static_cast<std::size_t>(raw(l))]; }
};

// The matrices of a record in memory. Valid while the lease that gave it lives.
struct ExpertView {
  quant::MatrixView gate, up, down;
  TensorView gate_bias, up_bias, down_bias;  // additive, f32, or empty
};

ExpertView view_record(const RecordLayout& layout, const std::byte* record) noexcept;

// The layout of the same records once to_bands() has brought what has bands into them.
RecordLayout with_bands(RecordLayout layout) noexcept;
// `layout` is that of `record` as it was read. `scratch`: see quant::to_bands.
void to_bands(const RecordLayout& layout, std::byte* record, Allocator& scratch);

// Checks what only the data can tell: an MXFP4 scale of 255 has no value. InvalidModel naming `what`.
void check_scales(const quant::MatrixView& matrix, std::string_view what);

}  // namespace moeflux::store
