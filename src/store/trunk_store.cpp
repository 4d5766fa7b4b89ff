#include "store/trunk_store.h"

#include <cmath>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "quant/bands.h"
#include "quant/decode.h"
#include "store/expert_record.h"
#include "store/piece_transform.h"

namespace moeflux::store {
namespace {

constexpr std::size_t kTensorAlign = 64;
// Tensors share blocks of this size, so that small ones (scales, norms) lie on huge pages, too; larger ones have their own.
constexpr std::uint64_t kBlockBytes = 16u << 20;

}  // namespace

std::byte* TrunkStore::take(std::uint64_t bytes) {
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

TrunkStore::Coming& TrunkStore::add(const MatrixSource& s, bool bands) {
  Coming& c = coming_.emplace_back();
  quant::MatrixView& v = c.view;
  v.format = s.format;
  v.rows = s.rows;
  v.cols = s.cols;
  const std::uint64_t codes = round_up(static_cast<std::uint64_t>(s.rows) * v.row_bytes(), kTensorAlign);
  const std::uint64_t scales = round_up(static_cast<std::uint64_t>(s.rows) * v.scale_row_bytes(), kTensorAlign);
  c.memory = take(codes + scales * (s.format.has_biases() ? 2 : 1));
  c.bands = bands && quant::has_bands(s.format, s.rows, s.cols);
  v.data = c.memory;
  if (s.format.quantized()) v.scales = c.memory + codes;
  if (s.format.has_biases()) v.biases = c.memory + codes + scales;
  bytes_ += s.bytes();
  return c;
}

quant::MatrixView TrunkStore::finished(const Coming& c) { return c.bands ? quant::to_bands(c.view, c.memory, allocator_) : c.view; }

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

void TrunkStore::load_rows(const format::Extent& extent, std::uint64_t row_bytes, const MatrixSource& s, const std::byte* dest, Coming& coming) {
  std::byte* const to = coming.memory + (dest - coming.memory);
  const Digest* want = folder_.digest(extent);
  // A checksum is that of the whole tensor: where only some rows are wanted, all are read at once.
  const std::vector<std::byte> whole = want != nullptr && !s.runs.empty() ? read_whole(extent, s.name) : std::vector<std::byte>();
  std::uint64_t at = 0;
  const auto copy = [&](std::uint64_t offset, std::uint64_t n) {
    if (!whole.empty())
      copier_.to_device(to + at, whole.data() + offset, n);
    else if (n > 0) {
      put_off_.push_back({{extent.file, extent.offset + offset, n}, to + at, put_off_for_.size(), want == nullptr ? std::nullopt : std::optional(RecordCheck{*want, 0})});
      ++coming.n_reads;
    }
    at += n;
  };
  if (s.runs.empty()) copy(0, extent.bytes);
  for (const MatrixSource::RowRun& run : s.runs)
    copy(static_cast<std::uint64_t>(run.begin) * row_bytes, static_cast<std::uint64_t>(run.n) * row_bytes);
  put_off_for_.emplace_back(s.name, &coming);
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

void TrunkStore::upload(const std::byte* to, std::span<const std::byte> bytes) {
  if (!bytes.empty()) copier_.to_device(const_cast<std::byte*>(to), bytes.data(), bytes.size());
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

void TrunkStore::load_changed(const MatrixSource& s, const quant::MatrixView& v) {
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
  upload(v.data, data);
  upload(v.scales, scales);
  upload(v.biases, biases);
}

quant::MatrixView TrunkStore::load(const MatrixSource& s, bool bands) {
  if (s.rows == 0) return {};
  Coming& c = add(s, bands);
  if (s.rows_per_scale > 1 || s.bias_per_scale != 0.0f) {
    load_changed(s, c.view);
    return finished(c);
  }
  load_rows(s.data, c.view.row_bytes(), s, c.view.data, c);
  if (s.format.quantized()) load_rows(s.scales, c.view.scale_row_bytes(), s, c.view.scales, c);
  if (s.format.has_biases()) load_rows(s.biases, c.view.scale_row_bytes(), s, c.view.biases, c);
  if (s.format.kind == quant::FormatKind::Mxfp4) to_check_.emplace_back(c.view, s.name);
  if (c.n_reads == 0) return finished(c);  // all of it was small or checked as a whole
  return c.bands ? quant::as_bands(c.view) : c.view;
}

void TrunkStore::finish(const std::function<void(std::uint64_t)>& progress) {
  std::uint64_t missing = 0;
  for (const BulkRead& r : put_off_) missing += r.source.bytes;
  BulkHooks hooks;
  if (progress) hooks.progress = [&](std::uint64_t done) { progress(bytes_ - missing + done); };
  hooks.arrived = [&](std::uint64_t id) {
    Coming& c = *put_off_for_[id].second;
    if (c.n_reads.fetch_sub(1) == 1) finished(c);
  };
  hooks.describe = [&](std::uint64_t id) { return fmt::format("tensor {}: ", put_off_for_[id].first); };
  bulk_load(folder_, put_off_, copier_, hooks);
  put_off_.clear();
  put_off_for_.clear();
  coming_.clear();
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
  std::byte* const to = take(values.size_bytes());
  bytes_ += values.size_bytes();
  copier_.to_device(to, reinterpret_cast<const std::byte*>(values.data()), values.size_bytes());
  return view_f32(reinterpret_cast<float*>(to), {static_cast<std::int64_t>(values.size())});
}

}  // namespace moeflux::store
