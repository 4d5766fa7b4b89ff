#include "backend/trace_backend.h"

#include <cmath>
#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include "backend/view_walk.h"

namespace moeflux::backend {
namespace {

std::string matrix_text(const char* name, const quant::MatrixView& m) {
  return fmt::format(" {} {} [{}, {}]", name, m.format.name(), m.rows, m.cols);
}

// Weights are no tensors of each_tensor().
template <class Op>
std::string weights_text(const Op&) {
  return {};
}
std::string weights_text(const Embed& op) { return matrix_text("table", op.table); }
std::string weights_text(const MatMul& op) {
  std::string text;
  for (const MatMulPart& part : op.parts) text += matrix_text("w", part.w);
  return text;
}
std::string weights_text(const HeadMatMul& op) { return matrix_text("w", op.w); }
std::string weights_text(const ExpertFfn& op) {
  std::size_t n_rows = 0;
  for (const ExpertWork& work : op.works) n_rows += work.rows.size();
  std::string text = fmt::format(" {} works, {} rows", op.works.size(), n_rows);
  if (!op.works.empty())
    text += matrix_text("gate", op.works[0].m.gate) + matrix_text("down", op.works[0].m.down);
  return text;
}

// FNV-1a over the elements in row-major order, gaps left out; mean absolute value beside it.
std::string contents_text(const TensorView& v) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  double sum = 0.0;
  const std::int64_t size = dtype_bits(v.dtype) / 8;
  each_element(v, [&](std::int64_t, std::int64_t offset) {
    const auto* bytes = static_cast<const unsigned char*>(v.data) + offset * size;
    for (std::int64_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    sum += std::fabs(element_value(v, offset));
  });
  const double mean = v.count() == 0 ? 0.0 : sum / static_cast<double>(v.count());
  return fmt::format("{{|{:.6g}| {:016x}}}", mean, hash);
}

}  // namespace

TraceBackend::TraceBackend(Backend& inner, LogSink sink, TraceOptions options)
    : inner_(inner), sink_(std::move(sink)), options_(options) {}

std::string TraceBackend::name() const { return fmt::format("trace of {}", inner_.name()); }
std::unique_ptr<Stream> TraceBackend::create_stream() { return inner_.create_stream(); }
void TraceBackend::synchronize(Stream& stream) { inner_.synchronize(stream); }
Allocator& TraceBackend::allocator() noexcept { return inner_.allocator(); }
Copier& TraceBackend::copier() noexcept { return inner_.copier(); }

template <class Op>
void TraceBackend::trace(Stream& stream, const Op& op) {
  const std::uint64_t number = n_ops_.fetch_add(1, std::memory_order_relaxed);
  forward_to(inner_, stream, op);
  if (!sink_) return;
  if (options_.outputs) inner_.synchronize(stream);
  std::string line = fmt::format("{} {}", number, Op::kName);
  Op copy = op;
  copy.each_tensor([&](const char* name, TensorView& v, Access access) {
    line += fmt::format(" {}{}", name, shape_text(v));
    if (options_.outputs && access != Access::In) line += contents_text(v);
  });
  line += weights_text(op);
  const std::lock_guard lock(sink_mutex_);
  sink_(LogLevel::Debug, line);
}

#define MOEFLUX_TRACE_OP(Op) \
  void TraceBackend::execute(Stream& stream, const Op& op) { trace(stream, op); }
MOEFLUX_FOR_EACH_OP(MOEFLUX_TRACE_OP)
#undef MOEFLUX_TRACE_OP

}  // namespace moeflux::backend
