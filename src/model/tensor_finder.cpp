#include "model/tensor_finder.h"

#include <algorithm>

#include "core/error.h"

namespace moeflux::model {
namespace {

std::string shape_text(const std::vector<std::uint64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

bool is_float(DType d) { return d == DType::F32 || d == DType::F16 || d == DType::BF16; }

}  // namespace

std::string TensorFinder::where(const format::FolderTensor& t) const {
  return fmt::format("{}: tensor {}", folder_.file(t.file).path().string(), t.info.name);
}

const format::FolderTensor* TensorFinder::use(const std::string& name) {
  const format::FolderTensor* t = folder_.find(name);
  if (t != nullptr) used_.insert(t);
  return t;
}

void TensorFinder::expect_shape(const format::FolderTensor& t, const std::vector<std::uint64_t>& shape) const {
  if (t.info.shape != shape)
    fail(ErrorCode::InvalidModel, "{} has shape {}, expected {}", where(t), shape_text(t.info.shape), shape_text(shape));
}

quant::Format TensorFinder::plain_format(const format::FolderTensor& t) const {
  switch (t.info.dtype) {
    case DType::F32: return quant::Format::f32();
    case DType::F16: return quant::Format::f16();
    case DType::BF16: return quant::Format::bf16();
    default: fail(ErrorCode::Unsupported, "{} has dtype {}, which is not supported for a matrix without scales", where(t), dtype_name(t.info.dtype));
  }
}

// The shapes decide; the config is a cross-check, because files and configs from different tools get mixed.
quant::Format TensorFinder::quantized_format(const std::string& module, const FoundMatrix& m, std::int64_t cols) const {
  const format::TensorInfo& w = m.data->info;
  const format::TensorInfo& s = m.scales->info;
  if (w.dtype != DType::U32) fail(ErrorCode::InvalidModel, "{} has scales, so it must be U32, not {}", where(*m.data), dtype_name(w.dtype));
  if (w.shape.empty() || s.shape.size() != w.shape.size() || s.shape.back() == 0 || static_cast<std::uint64_t>(cols) % s.shape.back() != 0)
    fail(ErrorCode::InvalidModel, "{} has shape {}, which does not divide {} inputs into groups", where(*m.scales), shape_text(s.shape), cols);
  const std::uint64_t group = static_cast<std::uint64_t>(cols) / s.shape.back();
  const std::uint64_t words = w.shape.back();
  if (words > UINT64_MAX / 32 || words * 32 % static_cast<std::uint64_t>(cols) != 0)
    fail(ErrorCode::InvalidModel, "{} has shape {}: {} words a row do not hold {} codes of one width", where(*m.data), shape_text(w.shape), words, cols);
  const std::uint64_t bits = words * 32 / static_cast<std::uint64_t>(cols);
  const auto stated = quant_.lookup(module);
  if (stated && (static_cast<std::uint64_t>(stated->bits) != bits || static_cast<std::uint64_t>(stated->group_size) != group))
    fail(ErrorCode::InvalidModel, "{}: its shape says {} bits in groups of {}, config.json says {} bits in groups of {}", where(*m.data), bits, group,
         stated->bits, stated->group_size);
  const std::string mode = stated ? stated->mode : (s.dtype == DType::U8 ? "mxfp4" : "affine");
  if (mode == "mxfp4") {
    if (s.dtype != DType::U8 || bits != 4 || group != 32)
      fail(ErrorCode::InvalidModel, "{}: mxfp4 needs 4 bits, groups of 32 and U8 scales", where(*m.data));
    return quant::Format::mxfp4();
  }
  if (mode != "affine") fail(ErrorCode::Unsupported, "{}: quantization mode \"{}\" is not supported", where(*m.data), mode);
  if (!is_float(s.dtype)) fail(ErrorCode::InvalidModel, "{} has dtype {}, expected a float", where(*m.scales), dtype_name(s.dtype));
  try {
    return quant::Format::affine(static_cast<std::int64_t>(bits), static_cast<std::int64_t>(group), s.dtype);
  } catch (const Error& e) {
    fail(e.code(), "{}: {}", where(*m.data), e.what());
  }
}

// One scale for every block of 128 x 128; blocks at the edges are cut. `shape` is that of the codes.
std::optional<FoundMatrix> TensorFinder::find_fp8(const std::string& module, FoundMatrix m, std::vector<std::uint64_t> shape) {
  if (quant_.quant_method() != "fp8")
    fail(ErrorCode::Unsupported, "{} has dtype {}, but config.json states no fp8 quantization", where(*m.data), dtype_name(m.data->info.dtype));
  m.format = quant::Format::fp8();
  m.rows_per_scale = m.format.group;
  expect_shape(*m.data, shape);
  const std::string name = module + ".weight_scale_inv";
  for (std::size_t i = shape.size() - 2; i < shape.size(); ++i) shape[i] = m.format.n_groups(shape[i]);
  m.scales = find_floats(name, shape);
  if (m.scales == nullptr) return std::nullopt;
  return m;
}

// Symmetric 4-bit codes in groups of 32, offset by 8: the affine format with a bias of -8 scales.
std::optional<FoundMatrix> TensorFinder::find_packed(const std::string& module, std::vector<std::uint64_t> shape) {
  FoundMatrix m;
  m.data = use(module + ".weight_packed");
  use(module + ".weight_shape");  // says again what the shapes say
  if (quant_.quant_method() != "compressed-tensors")
    fail(ErrorCode::Unsupported, "{}: config.json states no compressed-tensors quantization", where(*m.data));
  if (m.data->info.dtype != DType::I32) fail(ErrorCode::InvalidModel, "{} has dtype {}, expected I32", where(*m.data), dtype_name(m.data->info.dtype));
  const std::uint64_t cols = shape.back();
  if (cols % 32 != 0) fail(ErrorCode::Unsupported, "{}: {} inputs are no multiple of 32", where(*m.data), cols);
  shape.back() = cols / 8;
  expect_shape(*m.data, shape);
  shape.back() = cols / 32;
  m.scales = find_floats(module + ".weight_scale", shape);
  if (m.scales == nullptr) return std::nullopt;
  m.format = quant::Format::affine(4, 32, m.scales->info.dtype);
  m.bias_per_scale = -8.0f;
  return m;
}

const format::FolderTensor* TensorFinder::find_floats(const std::string& name, const std::vector<std::uint64_t>& shape) {
  const format::FolderTensor* t = use(name);
  if (t == nullptr) {
    note_missing(name);
    return nullptr;
  }
  expect_shape(*t, shape);
  if (!is_float(t->info.dtype)) fail(ErrorCode::InvalidModel, "{} has dtype {}, expected F32, F16 or BF16", where(*t), dtype_name(t->info.dtype));
  return t;
}

std::optional<FoundMatrix> TensorFinder::find_blocks(const std::string& name, std::vector<std::uint64_t> leading, std::int64_t rows,
                                                     std::int64_t cols) {
  FoundMatrix m;
  m.format = quant::Format::mxfp4();
  auto shape = std::move(leading);
  shape.push_back(static_cast<std::uint64_t>(rows));
  shape.push_back(static_cast<std::uint64_t>(cols) / 32);
  for (const auto& [suffix, slot] : {std::pair{"_scales", &m.scales}, std::pair{"_blocks", &m.data}}) {
    *slot = use(name + suffix);
    if (*slot == nullptr) {
      note_missing(name + suffix);
      continue;
    }
    if (cols % 32 != 0) fail(ErrorCode::InvalidModel, "{}: {} inputs are no multiple of 32", where(**slot), cols);
    if (slot == &m.data) shape.push_back(16);
    expect_shape(**slot, shape);
    if ((*slot)->info.dtype != DType::U8)
      fail(ErrorCode::InvalidModel, "{} has dtype {}, expected U8", where(**slot), dtype_name((*slot)->info.dtype));
  }
  if (m.data == nullptr || m.scales == nullptr) return std::nullopt;
  return m;
}

std::optional<FoundMatrix> TensorFinder::find_matrix(const std::string& module, std::string_view suffix,
                                                     std::vector<std::uint64_t> leading, std::int64_t rows, std::int64_t cols) {
  FoundMatrix m;
  auto shape = std::move(leading);
  shape.push_back(static_cast<std::uint64_t>(rows));
  shape.push_back(static_cast<std::uint64_t>(cols));
  m.data = use(module + std::string(suffix));
  if (m.data == nullptr) {
    if (exists(module + ".weight_packed")) return find_packed(module, std::move(shape));
    note_missing(module + std::string(suffix));
    return std::nullopt;
  }
  if (m.data->info.dtype == DType::F8E4M3) return find_fp8(module, m, std::move(shape));
  m.scales = use(module + ".scales");
  if (m.scales == nullptr) {
    m.format = plain_format(*m.data);
    expect_shape(*m.data, shape);
    return m;
  }
  shape.pop_back();
  m.format = quantized_format(module, m, cols);
  shape.push_back(m.format.row_bytes(static_cast<std::uint64_t>(cols)) / 4);
  expect_shape(*m.data, shape);
  shape.back() = static_cast<std::uint64_t>(cols) / m.format.group;
  expect_shape(*m.scales, shape);
  if (m.format.has_biases()) {
    m.biases = use(module + ".biases");
    if (m.biases == nullptr) {
      note_missing(module + ".biases");
      return std::nullopt;
    }
    expect_shape(*m.biases, shape);
    if (m.biases->info.dtype != m.scales->info.dtype)
      fail(ErrorCode::InvalidModel, "{} has dtype {}, its scales {}", where(*m.biases), dtype_name(m.biases->info.dtype), dtype_name(m.scales->info.dtype));
  }
  return m;
}

store::MatrixSource TensorFinder::matrix(const std::string& name, std::int64_t rows, std::int64_t cols, std::vector<std::uint64_t> leading) {
  store::MatrixSource out;
  out.name = name;
  std::int64_t n_leading = 1;
  for (const std::uint64_t n : leading) n_leading *= static_cast<std::int64_t>(n);
  const auto m = find_matrix(name, ".weight", std::move(leading), rows, cols);
  if (!m) return out;
  out.format = m->format;
  out.rows = n_leading * rows;
  out.cols = cols;
  out.rows_per_scale = m->rows_per_scale;
  if (m->scales != nullptr) out.scale_dtype = m->scales->info.dtype;
  out.bias_per_scale = m->bias_per_scale;
  out.data = m->data->extent();
  if (m->scales != nullptr) out.scales = m->scales->extent();
  if (m->biases != nullptr) out.biases = m->biases->extent();
  return out;
}

store::VectorSource TensorFinder::vector(const std::string& name, const std::vector<std::vector<std::uint64_t>>& shapes,
                                         store::VectorSource::Transform transform) {
  store::VectorSource out;
  out.name = name;
  const format::FolderTensor* t = use(name);
  if (t == nullptr) {
    note_missing(name);
    return out;
  }
  if (std::find(shapes.begin(), shapes.end(), t->info.shape) == shapes.end()) expect_shape(*t, shapes.front());
  if (!is_float(t->info.dtype)) fail(ErrorCode::InvalidModel, "{} has dtype {}, expected F32, F16 or BF16", where(*t), dtype_name(t->info.dtype));
  out.dtype = t->info.dtype;
  out.data = t->extent();
  out.count = static_cast<std::int64_t>(t->info.bytes * 8 / dtype_bits(t->info.dtype));
  out.transform = transform;
  return out;
}

std::vector<std::string> TensorFinder::unused(const std::vector<std::string>& ignored) const {
  std::vector<std::string> names;
  for (const format::FolderTensor& t : folder_.tensors()) {
    if (used_.contains(&t)) continue;
    const bool known = std::any_of(ignored.begin(), ignored.end(), [&](const std::string& p) {
      return p.starts_with('*') ? t.info.name.ends_with(p.substr(1)) : t.info.name.starts_with(p);
    });
    if (!known) names.push_back(t.info.name);
  }
  return names;
}

}  // namespace moeflux::model
