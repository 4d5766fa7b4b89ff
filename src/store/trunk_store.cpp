#include "store/trunk_store.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"
#include "core/error.h"
#include "quant/decode.h"
#include "store/expert_record.h"

namespace moeflux::store {
namespace {

constexpr std::uint64_t kStagingBytes = 8u << 20;  // large enough for full disk speed, small beside any trunk
constexpr std::size_t kTensorAlign = 64;

}  // namespace

Buffer& TrunkStore::add(std::uint64_t bytes) {
  buffers_.push_back(allocator_.allocate(bytes, kTensorAlign));
  bytes_ += bytes;
  return buffers_.back();
}

const std::byte* TrunkStore::load_rows(const format::Extent& extent, std::uint64_t row_bytes,
                                       const std::vector<MatrixSource::RowRun>& runs) {
  Buffer& buffer = add(extent.bytes);
  std::uint64_t at = 0;
  const auto copy = [&](std::uint64_t offset, std::uint64_t n) {
    for (std::uint64_t done = 0; done < n;) {
      const std::uint64_t piece = std::min(kStagingBytes, n - done);
      staging_.resize(std::max<std::size_t>(staging_.size(), piece));
      folder_.file(extent.file).read_exact(extent.offset + offset + done, {staging_.data(), piece});
      copier_.to_device(buffer.data() + at, staging_.data(), piece);
      done += piece;
      at += piece;
    }
  };
  if (runs.empty()) copy(0, extent.bytes);
  for (const MatrixSource::RowRun& run : runs)
    copy(static_cast<std::uint64_t>(run.begin) * row_bytes, static_cast<std::uint64_t>(run.n) * row_bytes);
  return buffer.data();
}

quant::MatrixView TrunkStore::load(const MatrixSource& s) {
  if (s.rows == 0) return {};
  quant::MatrixView v;
  v.format = s.format;
  v.rows = s.rows;
  v.cols = s.cols;
  v.data = load_rows(s.data, v.row_bytes(), s.runs);
  if (s.format.quantized()) v.scales = load_rows(s.scales, v.scale_row_bytes(), s.runs);
  if (s.format.has_biases()) v.biases = load_rows(s.biases, v.scale_row_bytes(), s.runs);
  if (s.format.kind == quant::FormatKind::Mxfp4) {
    std::vector<std::byte> host(s.scales.bytes);
    copier_.to_host(host.data(), v.scales, host.size());
    quant::MatrixView checked = v;
    checked.scales = host.data();
    check_scales(checked, s.name);
  }
  return v;
}

TensorView TrunkStore::load(const VectorSource& s) {
  if (s.count == 0) return {};
  std::vector<std::byte> stored(s.data.bytes);
  folder_.file(s.data.file).read_exact(s.data.offset, stored);
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
  Buffer& buffer = add(values.size_bytes());
  copier_.to_device(buffer.data(), reinterpret_cast<const std::byte*>(values.data()), values.size_bytes());
  return view_f32(buffer.as<float>(), {static_cast<std::int64_t>(values.size())});
}

}  // namespace moeflux::store
