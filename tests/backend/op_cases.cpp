#include "backend/op_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/view_walk.h"
#include "core/float_bits.h"

namespace moeflux::backend::cases {

std::byte* Memory::allocate(std::size_t bytes) {
  blocks_.push_back({std::vector<std::byte>(bytes), {}});
  return blocks_.back().now.data();
}

TensorView Memory::allocate_view(Dims dims, DType dtype, std::int64_t gap) {
  TensorView v = make_view(nullptr, dtype, dims);
  if (gap != 0 && v.rank >= 2) {
    v.strides[static_cast<std::size_t>(v.rank - 2)] += gap;
    for (int i = v.rank - 3; i >= 0; --i)
      v.strides[static_cast<std::size_t>(i)] = v.stride(i + 1) * v.dim(i + 1);
  }
  const std::size_t bytes = view_extent_bytes(v);
  if (bytes != 0) v.data = allocate(bytes);
  return v;
}

TensorView Memory::random_gaps(Dims dims, std::int64_t gap, double deviation) {
  const TensorView v = allocate_view(dims, DType::F32, gap);
  for (std::int64_t i = 0; i < view_extent(v); ++i) v.f32()[i] = static_cast<float>(normal() * deviation);
  return v;
}

TensorView Memory::random(Dims dims, double deviation) { return random_gaps(dims, 0, deviation); }

TensorView Memory::random_head_major(std::int64_t t, std::int64_t h, std::int64_t d, double deviation) {
  TensorView v = random({h, t, d}, deviation);
  std::swap(v.dims[0], v.dims[1]);
  std::swap(v.strides[0], v.strides[1]);
  return v;
}

TensorView Memory::random_interleaved(std::int64_t t, std::int64_t h, std::int64_t d, double deviation) {
  TensorView v = random({t, h, 2 * d}, deviation);
  v.dims[2] = d;
  return v;
}

TensorView Memory::values(Dims dims, std::span<const float> values) {
  const TensorView v = allocate_view(dims, DType::F32, 0);
  EXPECT_EQ(static_cast<std::size_t>(v.count()), values.size());
  std::copy(values.begin(), values.end(), v.f32());
  return v;
}

TensorView Memory::random_f16(Dims dims, double deviation) {
  const TensorView v = allocate_view(dims, DType::F16, 0);
  for (std::int64_t i = 0; i < view_extent(v); ++i)
    v.u16()[i] = f32_to_f16(static_cast<float>(normal() * deviation));
  return v;
}

TensorView Memory::ints(Dims dims) {
  const TensorView v = allocate_view(dims, DType::I32, 0);
  std::fill_n(v.i32(), view_extent(v), -7);
  return v;
}

TensorView Memory::output(Dims dims, std::int64_t gap) {
  const TensorView v = allocate_view(dims, DType::F32, gap);
  std::fill_n(v.f32(), view_extent(v), -12345.0f);
  return v;
}

const std::byte* Memory::keep(const std::vector<std::byte>& bytes, bool unaligned) {
  if (bytes.empty()) return nullptr;
  std::byte* p = allocate(bytes.size() + (unaligned ? 1 : 0)) + (unaligned ? 1 : 0);
  std::memcpy(p, bytes.data(), bytes.size());
  return p;
}

quant::MatrixView Memory::matrix(std::int64_t rows, std::int64_t cols, const quant::Format& format,
                                 bool unaligned) {
  std::vector<float> values(static_cast<std::size_t>(rows * cols));
  // Like trained weights: small, with a mean that affine groups must follow.
  for (float& v : values) v = static_cast<float>(0.02 + normal() * 0.1);
  const quant::EncodedMatrix m = quant::encode(values, rows, cols, format);
  quant::MatrixView v = m.view();
  v.data = keep(m.data, unaligned);
  v.scales = keep(m.scales, unaligned);
  v.biases = keep(m.biases, unaligned);
  return v;
}

std::span<const std::int32_t> Memory::indices(std::vector<std::int32_t> values) {
  indices_.push_back(std::move(values));
  return indices_.back();
}

void Memory::seal() {
  for (Block& b : blocks_)
    if (b.sealed.empty()) b.sealed = b.now;
}

void Memory::restore() {
  for (Block& b : blocks_) std::copy(b.sealed.begin(), b.sealed.end(), b.now.begin());
}

bool Memory::untouched_outside(std::span<const TensorView> views) const {
  for (const Block& b : blocks_) {
    std::vector<std::byte> expected;  // empty: as it was sealed
    for (const TensorView& v : views) {
      if (v.count() == 0) continue;
      const auto* begin = static_cast<const std::byte*>(v.data);
      if (begin < b.now.data() || begin >= b.now.data() + b.now.size()) continue;
      if (expected.empty()) expected = b.sealed;
      const std::size_t size = dtype_bits(v.dtype) / 8;
      each_element(v, [&](std::int64_t, std::int64_t offset) {
        const auto at =
            static_cast<std::size_t>(begin - b.now.data()) + static_cast<std::size_t>(offset) * size;
        std::memcpy(&expected[at], &b.now[at], size);
      });
    }
    const std::vector<std::byte>& want = expected.empty() ? b.sealed : expected;
    if (std::memcmp(want.data(), b.now.data(), want.size()) != 0) return false;
  }
  return true;
}

Result Case::collect() {
  Result result;
  std::vector<TensorView> views;
  for (const auto& [name, view] : outputs()) {
    views.push_back(view);
    result.names.push_back(name);
    std::vector<double>& values = result.values.emplace_back();
    std::vector<std::byte>& bytes = result.bytes.emplace_back();
    const std::size_t size = dtype_bits(view.dtype) / 8;
    each_element(view, [&, v = view](std::int64_t, std::int64_t offset) {
      values.push_back(element_value(v, offset));
      const auto* p = static_cast<const std::byte*>(v.data) + static_cast<std::size_t>(offset) * size;
      bytes.insert(bytes.end(), p, p + size);
    });
  }
  EXPECT_TRUE(memory.untouched_outside(views)) << label << ": memory outside of the outputs was written";
  return result;
}

Result Case::run(Backend& backend) {
  memory.seal();
  memory.restore();
  const auto stream = backend.create_stream();
  execute(backend, *stream);
  backend.synchronize(*stream);
  return collect();
}

Result Case::run_in_chunks(Backend& backend, std::span<const std::int64_t> chunks) {
  memory.seal();
  memory.restore();
  const auto stream = backend.create_stream();
  std::size_t next = 0;
  for (std::int64_t begin = 0, n = 0; begin < n_tokens(); begin += n) {
    n = std::min(chunks[next++ % chunks.size()], n_tokens() - begin);
    execute_slice(backend, *stream, begin, n);
  }
  backend.synchronize(*stream);
  return collect();
}

Bounds Case::bounds(Backend& reference, const Result& reference_result) {
  memory.seal();
  memory.restore();
  return compute_bounds(reference, reference_result);
}

double roundings(double n) { return 1.01 * kU * std::min(n, 8.0 * std::sqrt(n)); }

double dot16_roundings(std::int64_t n) { return static_cast<double>((n + 15) / 16 + 4); }

std::vector<double> relative(const Result& result, std::size_t index, double factor) {
  std::vector<double> bounds;
  for (const double y : result.values[index]) bounds.push_back(std::fabs(y) * factor + kTiny);
  return bounds;
}

std::vector<quant::Format> all_formats() {
  std::vector<quant::Format> formats{quant::Format::f32(), quant::Format::f16(), quant::Format::bf16(),
                                     quant::Format::mxfp4(), quant::Format::fp8()};
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const int group : {32, 64, 128})
      for (const DType dtype : {DType::BF16, DType::F16, DType::F32})
        formats.push_back(quant::Format::affine(bits, group, dtype));
  return formats;
}

std::vector<Generator> all_generators() {
  return {{"Embed", embed_cases},
          {"Add", add_cases},
          {"RmsNorm", rms_norm_cases},
          {"AddRmsNorm", add_rms_norm_cases},
          {"MatMul", matmul_cases},
          {"HeadMatMul", head_matmul_cases},
          {"Rope", rope_cases},
          {"CacheWrite", cache_write_cases},
          {"Attention", attention_cases},
          {"Clamp", clamp_cases},
          {"SigmoidGate", sigmoid_gate_cases},
          {"Glu", glu_cases},
          {"Route", route_cases},
          {"ExpertFfn", expert_ffn_cases},
          {"Combine", combine_cases},
          {"CausalConv", causal_conv_cases},
          {"L2Norm", l2_norm_cases},
          {"DeltaGates", delta_gates_cases},
          {"GatedDelta", gated_delta_cases},
          {"GatedRmsNorm", gated_rms_norm_cases}};
}

// ---- Slices
// ----------------------------------------------------------------------------------------------------

namespace {
void cut(std::int64_t begin, std::int64_t n, std::initializer_list<TensorView*> views) {
  for (TensorView* v : views)
    if (!v->empty()) *v = v->slice(begin, n);
}
}  // namespace

Embed slice_tokens(Embed op, std::int64_t begin, std::int64_t n) {
  op.tokens = op.tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n));
  cut(begin, n, {&op.y});
  return op;
}
Add slice_tokens(Add op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.a, &op.b, &op.y});
  return op;
}
RmsNorm slice_tokens(RmsNorm op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.x, &op.y});
  return op;
}
AddRmsNorm slice_tokens(AddRmsNorm op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.h, &op.delta, &op.y});
  return op;
}
Rope slice_tokens(Rope op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.x});
  op.pos0 += begin;
  return op;
}
CacheWrite slice_tokens(CacheWrite op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.x});
  op.pos0 += begin;
  return op;
}
Attention slice_tokens(Attention op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.q, &op.y});
  op.pos0 += begin;
  return op;
}
HeadMatMul slice_tokens(HeadMatMul op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.x, &op.y});
  return op;
}

Clamp slice_tokens(Clamp op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.x, &op.y});
  return op;
}

SigmoidGate slice_tokens(SigmoidGate op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.x, &op.gate, &op.y});
  return op;
}
Glu slice_tokens(Glu op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.gate, &op.up, &op.y});
  return op;
}
Route slice_tokens(Route op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.logits, &op.ids, &op.weights});
  return op;
}
Combine slice_tokens(Combine op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.rows, &op.weights, &op.shared, &op.shared_gate, &op.h});
  return op;
}
CausalConv slice_tokens(CausalConv op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.u, &op.y});
  return op;
}
L2Norm slice_tokens(L2Norm op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.x, &op.y});
  return op;
}
DeltaGates slice_tokens(DeltaGates op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.a, &op.b, &op.decay, &op.beta});
  return op;
}
GatedDelta slice_tokens(GatedDelta op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.q, &op.k, &op.v, &op.decay, &op.beta, &op.y});
  return op;
}
GatedRmsNorm slice_tokens(GatedRmsNorm op, std::int64_t begin, std::int64_t n) {
  cut(begin, n, {&op.x, &op.gate, &op.y});
  return op;
}

void run_slice(Backend& backend, Stream& stream, const MatMul& op, std::int64_t begin, std::int64_t n) {
  std::vector<MatMulPart> parts(op.parts.begin(), op.parts.end());
  for (MatMulPart& part : parts) part.y = part.y.slice(begin, n);
  backend.run(stream, MatMul{op.x.slice(begin, n), parts, op.precision});
}

void run_slice(Backend& backend, Stream& stream, const ExpertFfn& op, std::int64_t begin, std::int64_t n) {
  std::vector<ExpertWork> works;
  for (ExpertWork work : op.works) {
    const auto from = static_cast<std::size_t>(begin);
    if (from >= work.rows.size()) continue;
    const std::size_t count = std::min(static_cast<std::size_t>(n), work.rows.size() - from);
    work.rows = work.rows.subspan(from, count);
    work.slots = work.slots.subspan(from, count);
    works.push_back(work);
  }
  ExpertFfn part = op;
  part.works = works;
  backend.run(stream, part);
}

}  // namespace moeflux::backend::cases
