#include "store/trunk_store.h"

#include <cmath>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "quant/decode.h"
#include "store/expert_record.h"
#include "store/piece_transform.h"

namespace moeflux::store {
namespace {

constexpr std::size_t kTensorAlign = 64;
// Tensors share blocks of this size, so that small ones (scales, norms) lie on huge pages, too; larger ones have their own.
constexpr std::uint64_t kBlockBytes = 16u << 20;

}  // namespace

std::byte* TrunkStore::add(std::uint64_t bytes) {
  bytes_ += bytes;
  if (bytes >= kBlockBytes) {
    buffers_.push_back(allocator_.allocate(bytes, kTensorAlign));
    return buffers_.back().data();
  }
  const std::uint64_t room = round_up(bytes, kTensorAlign);
  if (room > free_bytes_) {
    buffers_.push_back(allocator_.allocate(kBlockBytes, kTensorAlign));
    free_ = buffers_.back().data();
    free_bytes_ = kBlockBytes;
  }
  free_bytes_ -= room;
  return std::exchange(free_, free_ + room);
}

std::vector<std::byte> TrunkStore::read_whole(const format::Extent& extent, const std::string& name) const {
  std::vector<std::byte> out(extent.bytes);
  const Digest* want = folder_.digest(extent);
  for (int attempt = 0; attempt < 2; ++attempt) {
    folder_.file(extent.file).read_exact(extent.offset, out);
    if (want == nullptr || digest_bytes(out) == *want) return out;
  }
  fail(ErrorCode::InvalidModel, "{}: tensor {}: what is at offset {} ({} bytes) {}", folder_.file(extent.file).path().string(), name, extent.offset,
       extent.bytes, kDamaged);
}

const std::byte* TrunkStore::load_rows(const format::Extent& extent, std::uint64_t row_bytes, const MatrixSource& s) {
  std::byte* const to = add(static_cast<std::uint64_t>(s.rows) * row_bytes);
  const Digest* want = folder_.digest(extent);
  // A checksum is that of the whole tensor: where only some rows are wanted, all are read at once.
  const std::vector<std::byte> whole = want != nullptr && !s.runs.empty() ? read_whole(extent, s.name) : std::vector<std::byte>();
  std::uint64_t at = 0;
  const auto copy = [&](std::uint64_t offset, std::uint64_t n) {
    if (!whole.empty())
      copier_.to_device(to + at, whole.data() + offset, n);
    else
      put_off_.push_back({{extent.file, extent.offset + offset, n}, to + at, names_.size(), want == nullptr ? std::nullopt : std::optional(RecordCheck{*want, 0})});
    at += n;
  };
  if (s.runs.empty()) copy(0, extent.bytes);
  for (const MatrixSource::RowRun& run : s.runs)
    copy(static_cast<std::uint64_t>(run.begin) * row_bytes, static_cast<std::uint64_t>(run.n) * row_bytes);
  names_.push_back(s.name);
  return to;
}

// The wanted rows one after another; a stored row may stand for several.
std::vector<std::byte> TrunkStore::read_rows(const format::Extent& extent, std::uint64_t row_bytes, const MatrixSource& s,
                                             std::int64_t rows_per_row) const {
  const std::vector<std::byte> stored = read_whole(extent, s.name);
  std::vector<std::byte> out;
  out.reserve(static_cast<std::uint64_t>(s.rows) * row_bytes);
  const std::vector<MatrixSource::RowRun> all{{0, s.rows}};
  for (const MatrixSource::RowRun& run : s.runs.empty() ? all : s.runs)
    for (std::int64_t r = run.begin; r < run.begin + run.n; ++r) {
      const auto at = stored.begin() + static_cast<std::ptrdiff_t>(static_cast<std::uint64_t>(r / rows_per_row) * row_bytes);
      out.insert(out.end(), at, at + static_cast<std::ptrdiff_t>(row_bytes));
    }
  return out;
}

const std::byte* TrunkStore::upload(std::span<const std::byte> bytes) {
  std::byte* const to = add(bytes.size());
  copier_.to_device(to, bytes.data(), bytes.size());
  return to;
}

namespace {

std::vector<std::byte> times(std::span<const std::byte> scales, DType dtype, float factor) {
  const auto n = static_cast<std::int64_t>(scales.size() * 8 / dtype_bits(dtype));
  std::vector<std::byte> out(scales.size());
  PieceTransform t{.rows = 1, .cols = n, .col_stride = 1, .value = PieceTransform::Value::Times, .dtype = dtype, .factor = factor};
  if (n > 0) apply(t, scales, out);
  return out;
}

std::vector<std::byte> as_f32(std::span<const std::byte> values, DType dtype) {
  std::vector<float> floats(values.size() * 8 / dtype_bits(dtype));
  quant::decode_floats(values.data(), dtype, floats);
  const auto bytes = std::as_bytes(std::span(floats));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

quant::MatrixView TrunkStore::load_changed(const MatrixSource& s) {
  quant::MatrixView v;
  v.format = s.format;
  v.rows = s.rows;
  v.cols = s.cols;
  const std::vector<std::byte> data = read_rows(s.data, v.row_bytes(), s, 1);
  std::vector<std::byte> scales, biases;
  if (s.format.quantized()) {
    const std::uint64_t groups = s.format.n_groups(static_cast<std::uint64_t>(s.cols));
    const bool shared = s.rows_per_scale > 1;
    scales = read_rows(s.scales, shared ? groups * dtype_bits(s.scale_dtype) / 8 : v.scale_row_bytes(), s, s.rows_per_scale);
    if (shared) scales = as_f32(scales, s.scale_dtype);
  }
  if (s.format.has_biases())
    biases = s.bias_per_scale != 0.0f ? times(scales, s.format.scale_dtype, s.bias_per_scale) : read_rows(s.biases, v.scale_row_bytes(), s, 1);
  v.data = upload(data);
  if (!scales.empty()) v.scales = upload(scales);
  if (!biases.empty()) v.biases = upload(biases);
  return v;
}

quant::MatrixView TrunkStore::load(const MatrixSource& s) {
  if (s.rows == 0) return {};
  if (s.rows_per_scale > 1 || s.bias_per_scale != 0.0f) return load_changed(s);
  quant::MatrixView v;
  v.format = s.format;
  v.rows = s.rows;
  v.cols = s.cols;
  v.data = load_rows(s.data, v.row_bytes(), s);
  if (s.format.quantized()) v.scales = load_rows(s.scales, v.scale_row_bytes(), s);
  if (s.format.has_biases()) v.biases = load_rows(s.biases, v.scale_row_bytes(), s);
  if (s.format.kind == quant::FormatKind::Mxfp4) to_check_.emplace_back(v, s.name);
  return v;
}

void TrunkStore::finish(const std::function<void(std::uint64_t)>& progress) {
  std::uint64_t missing = 0;
  for (const BulkRead& r : put_off_) missing += r.source.bytes;
  BulkHooks hooks;
  if (progress) hooks.progress = [&](std::uint64_t done) { progress(bytes_ - missing + done); };
  hooks.describe = [&](std::uint64_t id) { return fmt::format("tensor {}: ", names_[id]); };
  bulk_load(folder_, put_off_, copier_, hooks);
  put_off_.clear();
  names_.clear();
  for (auto& [view, name] : to_check_) {
    std::vector<std::byte> host(static_cast<std::uint64_t>(view.rows) * view.scale_row_bytes());
    copier_.to_host(host.data(), view.scales, host.size());
    view.scales = host.data();
    check_scales(view, name);
  }
  to_check_.clear();
}

TensorView TrunkStore::load(const VectorSource& s) {
  if (s.count == 0) return {};
  const std::vector<std::byte> stored = read_whole(s.data, s.name);
  std::vector<float> values(static_cast<std::size_t>(s.count));
  quant::decode_floats(stored.data(), s.dtype, values);
  for (float& v : values) {
    if (s.transform == VectorSource::Transform::PlusOne) v = 1.0f + v;
    // In f64 and rounded once: this happens at load, outside every kernel.
    if (s.transform == VectorSource::Transform::NegExp) v = static_cast<float>(-std::exp(static_cast<double>(v)));
  }
  return load(values);
}

TensorView TrunkStore::load(std::span<const float> values) {
  if (values.empty()) return {};
  std::byte* const to = add(values.size_bytes());
  copier_.to_device(to, reinterpret_cast<const std::byte*>(values.data()), values.size_bytes());
  return view_f32(reinterpret_cast<float*>(to), {static_cast<std::int64_t>(values.size())});
}

}  // namespace moeflux::store
