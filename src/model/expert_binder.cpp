#include "model/expert_binder.h"

#include <array>

#include "core/error.h"
#include "model/pack_binder.h"

namespace moeflux::model {
namespace {

using store::ExpertLayer;
using store::PieceTransform;
using store::RecordMatrix;
using store::RecordPiece;
using store::RecordVector;

// The bytes of one expert in a tensor that holds n of them.
format::Extent share(const format::FolderTensor& t, std::uint64_t index, std::uint64_t n) {
  const std::uint64_t bytes = t.info.bytes / n;
  return {t.file, t.info.offset + index * bytes, bytes};
}

// One matrix of every expert: rows first_row, first_row + row_step, .. of the expert's share of the tensors.
struct Stack {
  FoundMatrix found;
  std::int64_t first_row = 0, row_step = 1;
  std::int64_t rows_stored = 0;
  bool transposed = false;  // stored [inputs, outputs]
};

// An additive bias of every expert: entries first, first + step, .. of the expert's share.
struct BiasStack {
  const format::FolderTensor* tensor = nullptr;
  std::int64_t first = 0, step = 1;
};

// All matrices of a layer's experts.
struct Stacks {
  std::array<Stack, 3> matrices;  // gate, up, down
  std::array<BiasStack, 3> biases;
  bool has_biases() const noexcept { return biases[0].tensor != nullptr; }
};

RecordMatrix record_matrix(const FoundMatrix& m, std::int64_t rows, std::int64_t cols) { return {m.format, rows, cols, 0, 0, 0}; }

// Whole rows of row_bytes.
RecordPiece row_piece(const Stack& s, const format::Extent& all, std::int64_t rows, std::uint64_t row_bytes, std::uint64_t at) {
  if (s.row_step == 1)
    return {{all.file, all.offset + static_cast<std::uint64_t>(s.first_row) * row_bytes, static_cast<std::uint64_t>(rows) * row_bytes}, at};
  PieceTransform t{.rows = rows, .cols = 1, .first = s.first_row, .row_stride = s.row_step, .unit_bytes = static_cast<std::uint32_t>(row_bytes)};
  return {all, at, t};
}

RecordPiece data_piece(const Stack& s, const RecordMatrix& m, const format::Extent& all) {
  const std::uint64_t row_bytes = m.format.row_bytes(static_cast<std::uint64_t>(m.cols));
  if (!s.transposed) return row_piece(s, all, m.rows, row_bytes, m.data_at);
  PieceTransform t{.rows = m.rows, .cols = m.cols, .first = s.first_row, .row_stride = s.row_step, .col_stride = s.rows_stored,
                   .unit_bytes = m.format.bits / 8u};
  return {all, m.data_at, t};
}

RecordPiece scale_piece(const Stack& s, const RecordMatrix& m, const format::Extent& all) {
  if (s.found.rows_per_scale == 1) return row_piece(s, all, m.rows, m.format.scale_row_bytes(static_cast<std::uint64_t>(m.cols)), m.scales_at);
  const auto groups = static_cast<std::int64_t>(m.format.n_groups(static_cast<std::uint64_t>(m.cols)));
  PieceTransform t{.rows = m.rows, .cols = groups, .first = s.first_row / s.found.rows_per_scale * groups, .row_stride = groups, .col_stride = 1,
                   .row_repeat = s.found.rows_per_scale, .value = PieceTransform::Value::ToF32, .dtype = s.found.scales->info.dtype};
  return {all, m.scales_at, t};
}

// Biases that are a multiple of the scales.
RecordPiece derived_bias_piece(const Stack& s, const RecordMatrix& m, const format::Extent& all) {
  RecordPiece p = row_piece(s, all, m.rows, m.format.scale_row_bytes(static_cast<std::uint64_t>(m.cols)), m.biases_at);
  const auto groups = static_cast<std::int64_t>(m.format.n_groups(static_cast<std::uint64_t>(m.cols)));
  p.source = all;
  p.transform = {.rows = m.rows, .cols = groups, .first = s.first_row * groups, .row_stride = s.row_step * groups, .col_stride = 1,
                 .value = PieceTransform::Value::Times, .dtype = m.format.scale_dtype, .factor = s.found.bias_per_scale};
  return p;
}

// Data first, then scales, then biases, so that pieces of one source stand together.
void add_pieces(std::vector<RecordPiece>& out, const Stacks& stacks, const store::RecordLayout& layout, std::uint64_t index, std::uint64_t n) {
  const std::array<const RecordMatrix*, 3> matrices{&layout.gate, &layout.up, &layout.down};
  for (std::size_t i = 0; i < 3; ++i) out.push_back(data_piece(stacks.matrices[i], *matrices[i], share(*stacks.matrices[i].found.data, index, n)));
  for (std::size_t i = 0; i < 3; ++i) {
    const Stack& s = stacks.matrices[i];
    if (s.found.scales == nullptr) continue;
    const format::Extent scales = share(*s.found.scales, index, n);
    out.push_back(scale_piece(s, *matrices[i], scales));
    if (s.found.bias_per_scale != 0.0f) out.push_back(derived_bias_piece(s, *matrices[i], scales));
    if (s.found.biases != nullptr)
      out.push_back(row_piece(s, share(*s.found.biases, index, n), matrices[i]->rows,
                              matrices[i]->format.scale_row_bytes(static_cast<std::uint64_t>(matrices[i]->cols)), matrices[i]->biases_at));
  }
  if (!stacks.has_biases()) return;
  const std::array<const RecordVector*, 3> vectors{&layout.gate_bias, &layout.up_bias, &layout.down_bias};
  for (std::size_t i = 0; i < 3; ++i) {
    const BiasStack& b = stacks.biases[i];
    PieceTransform t{.rows = 1, .cols = vectors[i]->count, .first = b.first, .col_stride = b.step, .value = PieceTransform::Value::ToF32,
                     .dtype = b.tensor->info.dtype};
    out.push_back({share(*b.tensor, index, n), vectors[i]->at, t});
  }
}

store::RecordLayout plan_layout(const Stacks& s, const MoeSpec& moe, std::int64_t d) {
  return store::RecordLayout::plan(record_matrix(s.matrices[0].found, moe.inner_dim, d), record_matrix(s.matrices[1].found, moe.inner_dim, d),
                                   record_matrix(s.matrices[2].found, d, moe.inner_dim), s.has_biases());
}

ExpertLayer from_stacks(const Stacks& stacks, const MoeSpec& moe, std::int64_t d) {
  ExpertLayer layer;
  layer.layout = plan_layout(stacks, moe, d);
  layer.n_experts = moe.n_experts;
  const auto n = static_cast<std::uint64_t>(moe.n_experts);
  for (std::uint64_t e = 0; e < n; ++e) {
    add_pieces(layer.pieces, stacks, layer.layout, e, n);
    if (e == 0) layer.pieces_per_expert = layer.pieces.size();
  }
  return layer;
}

// Tensors "<base>.gate_proj.weight" [E, ..] and, where the experts have biases, "<base>.gate_proj.bias" [E, I].
ExpertLayer bind_stacked(TensorFinder& finder, const TensorNames& names, const std::string& base, const MoeSpec& moe, std::int64_t d) {
  const auto n = static_cast<std::uint64_t>(moe.n_experts);
  Stacks stacks;
  bool complete = true;
  const std::array<const std::string*, 3> parts{&names.gate, &names.up, &names.down};
  for (std::size_t i = 0; i < 3; ++i) {
    const std::int64_t rows = i < 2 ? moe.inner_dim : d, cols = i < 2 ? d : moe.inner_dim;
    const auto found = finder.find_matrix(base + "." + *parts[i], ".weight", {n}, rows, cols);
    complete = complete && found;
    if (found) stacks.matrices[i] = {*found, 0, 1, rows, false};
    if (!moe.expert_bias) continue;
    stacks.biases[i].tensor = finder.find_floats(base + "." + *parts[i] + ".bias", {n, static_cast<std::uint64_t>(rows)});
    complete = complete && stacks.biases[i].tensor != nullptr;
  }
  return complete ? from_stacks(stacks, moe, d) : ExpertLayer{};
}

// Rows 0 .. I-1 of an expert's share are the gate, I .. 2I-1 the up projection.
ExpertLayer bind_fused(TensorFinder& finder, const std::string& base, const std::string& down_name, const MoeSpec& moe, std::int64_t d) {
  const std::vector<std::uint64_t> leading{static_cast<std::uint64_t>(moe.n_experts)};
  const auto both = finder.find_matrix(base + ".gate_up_proj", "", leading, 2 * moe.inner_dim, d);
  const auto down = finder.find_matrix(base + "." + down_name, "", leading, d, moe.inner_dim);
  if (!both || !down) return {};
  const std::int64_t inner = moe.inner_dim;
  return from_stacks({{Stack{*both, 0, 1, 2 * inner, false}, Stack{*both, inner, 1, 2 * inner, false}, Stack{*down, 0, 1, d, false}}, {}}, moe, d);
}

// Even rows of an expert's share are the gate, odd ones the up projection.
ExpertLayer bind_interleaved(TensorFinder& finder, const std::string& base, const std::string& down_name, const MoeSpec& moe, std::int64_t d) {
  const auto n = static_cast<std::uint64_t>(moe.n_experts);
  const std::int64_t inner = moe.inner_dim;
  const std::string both_name = base + ".gate_up_proj", last_name = base + "." + down_name;
  const bool blocks = finder.exists(both_name + "_blocks");
  const auto find = [&](const std::string& name, std::int64_t rows, std::int64_t cols) {
    return blocks ? finder.find_blocks(name, {n}, rows, cols) : finder.find_matrix(name, "", {n}, cols, rows);
  };
  const auto both = find(both_name, 2 * inner, d), down = find(last_name, d, inner);
  Stacks stacks;
  if (moe.expert_bias) {
    const auto* both_bias = finder.find_floats(both_name + "_bias", {n, 2 * static_cast<std::uint64_t>(inner)});
    const auto* down_bias = finder.find_floats(last_name + "_bias", {n, static_cast<std::uint64_t>(d)});
    if (both_bias == nullptr || down_bias == nullptr) return {};
    stacks.biases = {BiasStack{both_bias, 0, 2}, BiasStack{both_bias, 1, 2}, BiasStack{down_bias, 0, 1}};
  }
  if (!both || !down) return {};
  stacks.matrices = {Stack{*both, 0, 2, 2 * inner, !blocks}, Stack{*both, 1, 2, 2 * inner, !blocks}, Stack{*down, 0, 1, d, !blocks}};
  return from_stacks(stacks, moe, d);
}

ExpertLayer bind_single(TensorFinder& finder, const TensorNames& names, const std::string& base, const MoeSpec& moe, std::int64_t d) {
  ExpertLayer layer;
  for (std::int64_t e = 0; e < moe.n_experts; ++e) {
    const std::string expert = fmt::format("{}.{}.", base, e);
    const auto gate = finder.find_matrix(expert + names.single_gate, ".weight", {}, moe.inner_dim, d);
    const auto up = finder.find_matrix(expert + names.single_up, ".weight", {}, moe.inner_dim, d);
    const auto down = finder.find_matrix(expert + names.single_down, ".weight", {}, d, moe.inner_dim);
    if (!gate || !up || !down) continue;
    const Stacks stacks{{Stack{*gate, 0, 1, moe.inner_dim, false}, Stack{*up, 0, 1, moe.inner_dim, false}, Stack{*down, 0, 1, d, false}}, {}};
    const auto layout = plan_layout(stacks, moe, d);
    if (layer.n_experts == 0) layer.layout = layout;
    if (layout.gate.format != layer.layout.gate.format || layout.up.format != layer.layout.up.format || layout.down.format != layer.layout.down.format)
      fail(ErrorCode::Unsupported, "{}: its format differs from that of the layer's first expert", finder.where(*gate->data));
    add_pieces(layer.pieces, stacks, layout, 0, 1);
    if (++layer.n_experts == 1) layer.pieces_per_expert = layer.pieces.size();
  }
  return layer.n_experts == moe.n_experts ? layer : ExpertLayer{};
}

}  // namespace

ExpertLayer bind_experts(TensorFinder& finder, const TensorNames& names, std::int64_t layer, const MoeSpec& moe, std::int64_t d) {
  if (finder.folder().pack() != nullptr) return bind_packed_experts(finder.folder(), layer, moe, d);
  const std::string stacked = names.layer(layer, names.experts_stacked);
  const std::string fused = names.layer(layer, names.experts_fused);
  const std::string single = names.layer(layer, names.experts_single);
  if (finder.exists(stacked + "." + names.gate + ".weight")) return bind_stacked(finder, names, stacked, moe, d);
  if (names.experts_interleaved) return bind_interleaved(finder, fused, names.down, moe, d);
  if (finder.exists(fused + ".gate_up_proj")) return bind_fused(finder, fused, names.down, moe, d);
  return bind_single(finder, names, single, moe, d);
}

}  // namespace moeflux::model
