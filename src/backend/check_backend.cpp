#include "backend/check_backend.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "backend/view_walk.h"
#include "core/error.h"

namespace moeflux::backend {
namespace {

struct PairStream final : Stream {
  std::unique_ptr<Stream> a, b;
};

// The part of an op's memory that it can change: a cache is large, its new rows are few.
template <class Op>
Op narrowed(const Op& op) {
  return op;
}
CacheWrite narrowed(const CacheWrite& op) { return {op.x, op.cache.slice(op.pos0, op.x.dim(0)), 0}; }

struct Range {
  const std::byte *begin, *end;
  explicit Range(const TensorView& v)
      : begin(static_cast<const std::byte*>(v.data)), end(begin + view_extent_bytes(v)) {}
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

// An op with its own copies of what it writes, taken at construction. Inputs that lie in the same memory as
// an output are copied too: the other backend is about to write there.
template <class Op>
class Shadow {
 public:
  explicit Shadow(const Op& original) : op(original) {
    op.each_tensor([&](const char*, TensorView& v, Access access) {
      if (access != Access::In) written_.emplace_back(v);
    });
    redirect();
  }
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;

  Op op;

 private:
  void redirect() {
    if constexpr (std::is_same_v<Op, MatMul>) {
      parts_.assign(op.parts.begin(), op.parts.end());
      for (MatMulPart& part : parts_) {
        take(part.y, Access::Out);
        if (!part.bias.empty()) take(part.bias, Access::In);
      }
      op.parts = parts_;
      take(op.x, Access::In);
    } else {
      op.each_tensor([&](const char*, TensorView& v, Access access) { take(v, access); });
    }
  }

  void take(TensorView& v, Access access) {
    const Range range(v);
    const bool copied = access != Access::In ||
                        std::ranges::any_of(written_, [&](const Range& w) { return w.overlaps(range); });
    if (!copied || range.begin == range.end) return;
    memory_.emplace_back(range.begin, range.end);
    v.data = memory_.back().data();
  }

  std::vector<Range> written_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<MatMulPart> parts_;
};

struct Named {
  const char* name;
  TensorView view;
};

template <class Op>
std::vector<Named> outputs_of(const Op& op) {
  std::vector<Named> outputs;
  Op copy = op;
  copy.each_tensor([&](const char* name, TensorView& v, Access access) {
    if (access != Access::In) outputs.push_back({name, v});
  });
  return outputs;
}

// The key by which Route chooses, up to what is common to all experts of a token.
double route_key(const Route& op, std::int64_t token, std::int64_t expert) {
  const float* logits = op.logits.row(token);
  double key = static_cast<double>(logits[expert]);
  if (op.score == RouterScore::Sigmoid) key = 1.0 / (1.0 + std::exp(-key));
  if (op.score == RouterScore::Softmax) {
    const float top = *std::max_element(logits, logits + op.logits.dim(1));
    double sum = 0.0;
    for (std::int64_t e = 0; e < op.logits.dim(1); ++e) sum += std::exp(static_cast<double>(logits[e] - top));
    key = std::exp(key - static_cast<double>(top)) / sum;
  }
  return op.select_bias.empty() ? key : key + static_cast<double>(op.select_bias.f32()[expert]);
}

}  // namespace

std::string Difference::text() const {
  return fmt::format(
      "op {} {}: {} differs at element {}: {:.9g} against {:.9g}; relative norm {:.3g}, max {:.3g}", op_index,
      op, tensor, element, a, b, relative_norm, max_abs);
}

CheckBackend::CheckBackend(Backend& a, Backend& b, CheckOptions options, LogSink sink)
    : a_(a), b_(b), options_(options), sink_(std::move(sink)) {}

std::string CheckBackend::name() const { return fmt::format("check of {} against {}", a_.name(), b_.name()); }

std::unique_ptr<Stream> CheckBackend::create_stream() {
  auto stream = std::make_unique<PairStream>();
  stream->a = a_.create_stream();
  stream->b = b_.create_stream();
  return stream;
}

void CheckBackend::synchronize(Stream& stream) {
  auto& pair = static_cast<PairStream&>(stream);
  a_.synchronize(*pair.a);
  b_.synchronize(*pair.b);
}

Allocator& CheckBackend::allocator() noexcept { return a_.allocator(); }
Copier& CheckBackend::copier() noexcept { return a_.copier(); }

std::optional<Difference> CheckBackend::first_difference() const {
  const std::lock_guard lock(mutex_);
  return first_;
}

template <class Op>
void CheckBackend::run_both(Stream& stream, const Op& op) {
  const std::uint64_t op_index = n_ops_.fetch_add(1, std::memory_order_relaxed);
  auto& pair = static_cast<PairStream&>(stream);
  synchronize(stream);
  const Op narrow = narrowed(op);
  Shadow<Op> shadow(narrow);
  forward_to(a_, *pair.a, op);
  forward_to(b_, *pair.b, shadow.op);
  synchronize(stream);
  if constexpr (std::is_same_v<Op, Route>) {
    compare_routes(op_index, narrow, shadow.op);
  } else {
    const std::vector<Named> a = outputs_of(narrow), b = outputs_of(shadow.op);
    for (std::size_t i = 0; i < a.size(); ++i) compare(op_index, Op::kName, a[i].name, a[i].view, b[i].view);
  }
}

void CheckBackend::compare(std::uint64_t op_index, const char* op, const char* tensor, const TensorView& a,
                           const TensorView& b) {
  double norm_b = 0.0, norm_diff = 0.0, max_b = 0.0;
  Difference d{op_index, op, tensor, 0, 0.0, 0.0, 0.0, -1.0};
  // Views of one shape and the same strides: one offset serves both.
  each_element(a, [&](std::int64_t index, std::int64_t offset) {
    const double x = element_value(a, offset), y = element_value(b, offset);
    const bool same = x == y || (std::isnan(x) && std::isnan(y));  // equal infinities have no difference
    const double diff = same ? 0.0 : std::isnan(x - y) ? HUGE_VAL : std::fabs(x - y);
    norm_diff += diff * diff;
    if (std::isfinite(y)) {
      norm_b += y * y;
      max_b = std::max(max_b, std::fabs(y));
    }
    if (diff > d.max_abs) {
      d.max_abs = diff;
      d.element = index;
      d.a = x;
      d.b = y;
    }
  });
  norm_b = std::sqrt(norm_b);
  norm_diff = std::sqrt(norm_diff);
  d.relative_norm = norm_diff == 0.0 ? 0.0 : norm_diff / norm_b;
  const bool exact = a.dtype == DType::I32;
  const double tolerance = exact ? 0.0 : options_.tolerance;
  if (norm_diff > tolerance * norm_b || d.max_abs > tolerance * max_b) report(std::move(d));
}

void CheckBackend::compare_routes(std::uint64_t op_index, const Route& a, const Route& b) {
  const std::int64_t k = a.ids.dim(1);
  for (std::int64_t t = 0; t < a.ids.dim(0); ++t) {
    const std::int32_t* ids_a = a.ids.i32() + t * a.ids.stride(0);
    const std::int32_t* ids_b = b.ids.i32() + t * b.ids.stride(0);
    bool differs = false, ties = true;
    for (std::int64_t r = 0; r < k; ++r) {
      if (ids_a[r] == ids_b[r]) continue;
      differs = true;
      if (ids_a[r] < 0 || ids_a[r] >= a.logits.dim(1) || ids_b[r] < 0 || ids_b[r] >= a.logits.dim(1)) {
        ties = false;
        continue;
      }
      const double key_a = route_key(a, t, ids_a[r]), key_b = route_key(a, t, ids_b[r]);
      ties = ties &&
             std::fabs(key_a - key_b) <= options_.tolerance * std::max(std::fabs(key_a), std::fabs(key_b));
    }
    if (differs && ties) {
      n_near_ties_.fetch_add(1, std::memory_order_relaxed);
      note(LogLevel::Info,
           fmt::format("op {} {}: near tie in the ids of token {}", op_index, Route::kName, t));
      continue;  // other experts, other weights
    }
    compare(op_index, Route::kName, "ids", a.ids.slice(t, 1), b.ids.slice(t, 1));
    if (!differs) compare(op_index, Route::kName, "weights", a.weights.slice(t, 1), b.weights.slice(t, 1));
  }
}

void CheckBackend::note(LogLevel level, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (sink_) sink_(level, text);
}

void CheckBackend::report(Difference difference) {
  n_differences_.fetch_add(1, std::memory_order_relaxed);
  const std::string text = difference.text();
  note(LogLevel::Error, text);
  {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = std::move(difference);
  }
  if (options_.throw_on_difference)
    fail(ErrorCode::Internal, "{} and {} disagree: {}", a_.name(), b_.name(), text);
}

#define MOEFLUX_CHECK_OP(Op) \
  void CheckBackend::execute(Stream& stream, const Op& op) { run_both(stream, op); }
MOEFLUX_FOR_EACH_OP(MOEFLUX_CHECK_OP)
#undef MOEFLUX_CHECK_OP

}  // namespace moeflux::backend
