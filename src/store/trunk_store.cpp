#include "store/trunk_store.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"
#include "core/error.h"
#include "quant/decode.h"
#include "store/expert_record.h"
#include "store/piece_transform.h"

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

void TrunkStore::fail_damaged(const format::Extent& extent, const std::string& name) const {
  fail(ErrorCode::InvalidModel, "{}: tensor {}: {} bytes at offset {} do not match their checksum", folder_.file(extent.file).path().string(), name,
       extent.bytes, extent.offset);
}

std::vector<std::byte> TrunkStore::read_whole(const format::Extent& extent, const std::string& name) const {
  std::vector<std::byte> out(extent.bytes);
  const Digest* want = folder_.digest(extent);
  for (int attempt = 0; attempt < 2; ++attempt) {
    folder_.file(extent.file).read_exact(extent.offset, out);
    if (want == nullptr || digest_bytes(out) == *want) return out;
  }
  fail_damaged(extent, name);
}

void TrunkStore::stream(const format::Extent& part, std::byte* to, DigestStream* digest) {
  for (std::uint64_t done = 0; done < part.bytes;) {
    const std::uint64_t piece = std::min(kStagingBytes, part.bytes - done);
    staging_.resize(std::max<std::size_t>(staging_.size(), piece));
    folder_.file(part.file).read_exact(part.offset + done, {staging_.data(), piece});
    if (digest != nullptr) digest->add({staging_.data(), piece});
    copier_.to_device(to + done, staging_.data(), piece);
    done += piece;
  }
}

const std::byte* TrunkStore::load_rows(const format::Extent& extent, std::uint64_t row_bytes, const MatrixSource& s) {
  Buffer& buffer = add(static_cast<std::uint64_t>(s.rows) * row_bytes);
  const Digest* want = folder_.digest(extent);
  if (s.runs.empty()) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      DigestStream digest;
      stream(extent, buffer.data(), want == nullptr ? nullptr : &digest);
      if (want == nullptr || digest.digest() == *want) return buffer.data();
    }
    fail_damaged(extent, s.name);
  }
  // A checksum is that of the whole tensor, so all of it is read where there is one.
  const std::vector<std::byte> whole = want == nullptr ? std::vector<std::byte>() : read_whole(extent, s.name);
  std::uint64_t at = 0;
  for (const MatrixSource::RowRun& run : s.runs) {
    const std::uint64_t first = static_cast<std::uint64_t>(run.begin) * row_bytes, n = static_cast<std::uint64_t>(run.n) * row_bytes;
    if (want != nullptr)
      copier_.to_device(buffer.data() + at, whole.data() + first, n);
    else
      stream({extent.file, extent.offset + first, n}, buffer.data() + at, nullptr);
    at += n;
  }
  return buffer.data();
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
  Buffer& buffer = add(bytes.size());
  copier_.to_device(buffer.data(), bytes.data(), bytes.size());
  return buffer.data();
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
  if (s.format.kind == quant::FormatKind::Mxfp4) {
    std::vector<std::byte> host(static_cast<std::uint64_t>(s.rows) * v.scale_row_bytes());
    copier_.to_host(host.data(), v.scales, host.size());
    quant::MatrixView checked = v;
    checked.scales = host.data();
    check_scales(checked, s.name);
  }
  return v;
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
  Buffer& buffer = add(values.size_bytes());
  copier_.to_device(buffer.data(), reinterpret_cast<const std::byte*>(values.data()), values.size_bytes());
  return view_f32(buffer.as<float>(), {static_cast<std::int64_t>(values.size())});
}

}  // namespace moeflux::store
