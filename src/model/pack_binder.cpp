#include "model/pack_binder.h"

#include <algorithm>

#include "core/checked.h"
#include "core/error.h"

namespace moeflux::model {
namespace {

using format::PackLayer;
using format::PackMatrix;

struct Place {
  const std::string index;
  const std::int64_t layer;
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::InvalidModel, "{}: layer {}: {}", index, layer, fmt::format(format, std::forward<Args>(args)...));
  }
};

store::RecordMatrix checked(const PackMatrix& m, std::int64_t rows, std::int64_t cols, const PackLayer& in, const Place& place) {
  if (m.rows != rows || m.cols != cols)
    place.refuse("a matrix of [{}, {}], the config asks for [{}, {}]", m.rows, m.cols, rows, cols);
  const auto width = static_cast<std::uint64_t>(cols);
  if (m.format.quantized() && m.format.kind != quant::FormatKind::Fp8 && width % m.format.group != 0)
    place.refuse("{} inputs are no multiple of the groups of {}", cols, m.format.name());
  // Bounds the sizes before anything is planned with them.
  const auto data = checked_mul(static_cast<std::uint64_t>(rows), m.format.row_bytes(width));
  if (!data || *data > in.record_bytes) place.refuse("a matrix of [{}, {}] does not fit a record of {} bytes", rows, cols, in.record_bytes);
  return {m.format, rows, cols, 0, 0, 0};
}

}  // namespace

store::ExpertLayer bind_packed_experts(const format::ModelFolder& folder, std::int64_t layer, const MoeSpec& moe, std::int64_t d) {
  const format::PackIndex& pack = *folder.pack();
  const Place place{(folder.path() / format::kPackIndexName).string(), layer};
  const auto in = std::lower_bound(pack.layers.begin(), pack.layers.end(), layer, [](const PackLayer& l, std::int64_t n) { return l.layer < n; });
  if (in == pack.layers.end() || in->layer != layer) place.refuse("has no experts in the pack");
  if (static_cast<std::int64_t>(in->digests.size()) != moe.n_experts)
    place.refuse("{} experts, the config asks for {}", in->digests.size(), moe.n_experts);
  if (in->biases != moe.expert_bias) place.refuse("its experts have {}additive biases, the config says otherwise", in->biases ? "" : "no ");

  store::ExpertLayer out;
  out.layout = store::RecordLayout::plan(checked(in->gate, moe.inner_dim, d, *in, place), checked(in->up, moe.inner_dim, d, *in, place),
                                         checked(in->down, d, moe.inner_dim, *in, place), in->biases);
  if (out.layout.bytes != in->record_bytes) place.refuse("records of {} bytes, its matrices take {}", in->record_bytes, out.layout.bytes);
  out.n_experts = moe.n_experts;
  out.pieces_per_expert = 1;
  const Digest id = pack.model_id();
  for (std::size_t e = 0; e < in->digests.size(); ++e) {
    out.pieces.push_back({{format::ModelFolder::kPackExpertsFile, in->offset + e * in->record_bytes, in->record_bytes}, 0, {}});
    out.checks.push_back({in->digests[e], format::record_seed(id, in->layer, static_cast<std::int32_t>(e))});
  }
  return out;
}

}  // namespace moeflux::model
