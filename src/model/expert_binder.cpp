#include "model/expert_binder.h"

#include <array>

#include "core/error.h"

namespace moeflux::model {
namespace {

using store::ExpertLayer;
using store::RecordMatrix;

// One matrix of every expert: expert e is the e-th of n equal parts of the tensors, starting `skip` parts of a part in.
struct Stack {
  FoundMatrix found;
  std::uint64_t first_row = 0;  // inside an expert's share (fused tensors)
  std::uint64_t rows_stored = 0;
};

RecordMatrix record_matrix(const FoundMatrix& m, std::int64_t rows, std::int64_t cols) { return {m.format, rows, cols, 0, 0, 0}; }

format::Extent part(const format::FolderTensor& t, std::uint64_t index, std::uint64_t n, std::uint64_t first_row, std::uint64_t rows_stored,
                    std::uint64_t rows) {
  const std::uint64_t share = t.info.bytes / n, row_bytes = share / rows_stored;
  return {t.file, t.info.offset + index * share + first_row * row_bytes, rows * row_bytes};
}

void add_pieces(std::vector<store::RecordPiece>& out, const Stack& s, const RecordMatrix& m, std::uint64_t index, std::uint64_t n) {
  const auto rows = static_cast<std::uint64_t>(m.rows);
  out.push_back({part(*s.found.data, index, n, s.first_row, s.rows_stored, rows), m.data_at});
  if (s.found.scales != nullptr) out.push_back({part(*s.found.scales, index, n, s.first_row, s.rows_stored, rows), m.scales_at});
  if (s.found.biases != nullptr) out.push_back({part(*s.found.biases, index, n, s.first_row, s.rows_stored, rows), m.biases_at});
}

ExpertLayer from_stacks(const std::array<Stack, 3>& stacks, const MoeSpec& moe, std::int64_t d) {
  ExpertLayer layer;
  layer.layout = store::RecordLayout::plan(record_matrix(stacks[0].found, moe.inner_dim, d), record_matrix(stacks[1].found, moe.inner_dim, d),
                                           record_matrix(stacks[2].found, d, moe.inner_dim));
  layer.n_experts = moe.n_experts;
  const auto n = static_cast<std::uint64_t>(moe.n_experts);
  for (std::uint64_t e = 0; e < n; ++e) {
    add_pieces(layer.pieces, stacks[0], layer.layout.gate, e, n);
    add_pieces(layer.pieces, stacks[1], layer.layout.up, e, n);
    add_pieces(layer.pieces, stacks[2], layer.layout.down, e, n);
    if (e == 0) layer.pieces_per_expert = layer.pieces.size();
  }
  return layer;
}

ExpertLayer bind_stacked(TensorFinder& finder, const TensorNames& names, const std::string& base, const MoeSpec& moe, std::int64_t d) {
  const std::vector<std::uint64_t> leading{static_cast<std::uint64_t>(moe.n_experts)};
  const auto inner = static_cast<std::uint64_t>(moe.inner_dim), hidden = static_cast<std::uint64_t>(d);
  const auto gate = finder.find_matrix(base + "." + names.gate, ".weight", leading, moe.inner_dim, d);
  const auto up = finder.find_matrix(base + "." + names.up, ".weight", leading, moe.inner_dim, d);
  const auto down = finder.find_matrix(base + "." + names.down, ".weight", leading, d, moe.inner_dim);
  if (!gate || !up || !down) return {};
  return from_stacks({Stack{*gate, 0, inner}, Stack{*up, 0, inner}, Stack{*down, 0, hidden}}, moe, d);
}

// Rows 0 .. I-1 of an expert's share are the gate, I .. 2I-1 the up projection.
ExpertLayer bind_fused(TensorFinder& finder, const std::string& base, const std::string& down_name, const MoeSpec& moe, std::int64_t d) {
  const std::vector<std::uint64_t> leading{static_cast<std::uint64_t>(moe.n_experts)};
  const auto inner = static_cast<std::uint64_t>(moe.inner_dim), hidden = static_cast<std::uint64_t>(d);
  const auto both = finder.find_matrix(base + ".gate_up_proj", "", leading, 2 * moe.inner_dim, d);
  const auto down = finder.find_matrix(base + "." + down_name, "", leading, d, moe.inner_dim);
  if (!both || !down) return {};
  return from_stacks({Stack{*both, 0, 2 * inner}, Stack{*both, inner, 2 * inner}, Stack{*down, 0, hidden}}, moe, d);
}

ExpertLayer bind_single(TensorFinder& finder, const TensorNames& names, const std::string& base, const MoeSpec& moe, std::int64_t d) {
  ExpertLayer layer;
  const auto inner = static_cast<std::uint64_t>(moe.inner_dim), hidden = static_cast<std::uint64_t>(d);
  for (std::int64_t e = 0; e < moe.n_experts; ++e) {
    const std::string expert = fmt::format("{}.{}.", base, e);
    const auto gate = finder.find_matrix(expert + names.gate, ".weight", {}, moe.inner_dim, d);
    const auto up = finder.find_matrix(expert + names.up, ".weight", {}, moe.inner_dim, d);
    const auto down = finder.find_matrix(expert + names.down, ".weight", {}, d, moe.inner_dim);
    if (!gate || !up || !down) continue;
    const auto layout = store::RecordLayout::plan(record_matrix(*gate, moe.inner_dim, d), record_matrix(*up, moe.inner_dim, d),
                                                  record_matrix(*down, d, moe.inner_dim));
    if (layer.n_experts == 0) layer.layout = layout;
    if (layout.gate.format != layer.layout.gate.format || layout.up.format != layer.layout.up.format || layout.down.format != layer.layout.down.format)
      fail(ErrorCode::Unsupported, "{}: its format differs from that of the layer's first expert", finder.where(*gate->data));
    add_pieces(layer.pieces, Stack{*gate, 0, inner}, layout.gate, 0, 1);
    add_pieces(layer.pieces, Stack{*up, 0, inner}, layout.up, 0, 1);
    add_pieces(layer.pieces, Stack{*down, 0, hidden}, layout.down, 0, 1);
    if (++layer.n_experts == 1) layer.pieces_per_expert = layer.pieces.size();
  }
  return layer.n_experts == moe.n_experts ? layer : ExpertLayer{};
}

}  // namespace

ExpertLayer bind_experts(TensorFinder& finder, const TensorNames& names, std::int64_t layer, const MoeSpec& moe, std::int64_t d) {
  const std::string stacked = names.layer(layer, names.experts_stacked);
  const std::string fused = names.layer(layer, names.experts_fused);
  const std::string single = names.layer(layer, names.experts_single);
  if (finder.exists(stacked + "." + names.gate + ".weight")) return bind_stacked(finder, names, stacked, moe, d);
  if (finder.exists(fused + ".gate_up_proj")) return bind_fused(finder, fused, names.down, moe, d);
  return bind_single(finder, names, single, moe, d);
}

}  // namespace moeflux::model
