#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>

#include "backend/ops.h"
#include "backend/view_walk.h"
#include "core/error.h"
#include "quant/bands.h"

namespace moeflux::backend {
namespace {

using Dims = std::initializer_list<std::int64_t>;

// Message arguments become text only when there is a message: these checks run before every op and must not
// allocate.
std::string show(Dims dims) {
  std::string text = "[";
  for (const std::int64_t d : dims) text += fmt::format("{}{}", text.size() == 1 ? "" : ", ", d);
  return text + "]";
}
std::string show(const TensorView& v) {
  return v.rank < 0 || v.rank > TensorView::kMaxRank ? fmt::format("rank {}", v.rank) : shape_text(v);
}
const char* show(const char* text) { return text; }
std::string show(const quant::Format& format) { return format.name(); }
std::string show(DType dtype) { return std::string(dtype_name(dtype)); }
template <class T>
requires std::is_arithmetic_v<T> T show(T number) { return number; }

// The checks of one op; every message starts with its name.
class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  // A condition that concerns a whole tensor or parameter.
  template <class... Args>
  void require(bool ok, const char* name, const char* format, const Args&... args) const {
    if (!ok)
      fail(ErrorCode::Internal, "{}: {}: {}", op_, name, fmt::format(fmt::runtime(format), show(args)...));
  }

  // Rank alone, before dims are taken from it as the yardstick of the others.
  void rank(const char* name, const TensorView& v, int expected) const {
    require(v.rank == expected, name, "expected {} dimensions, found {}", expected, v);
  }

  // Shape, dtype and memory.
  void tensor(const char* name, const TensorView& v, Dims dims, DType dtype = DType::F32) const {
    require(v.dtype == dtype, name, "expected {}, found {}", dtype, v.dtype);
    bool same = v.rank == static_cast<int>(dims.size());
    int i = 0;
    for (const std::int64_t d : dims) same = same && v.dim(i++) == d;
    require(same, name, "expected {}, found {}", dims, v);
    memory(name, v);
  }

  // A cache: F32 or F16.
  void cache(const char* name, const TensorView& v, Dims dims) const {
    require(v.dtype == DType::F32 || v.dtype == DType::F16, name, "expected F32 or F16, found {}", v.dtype);
    tensor(name, v, dims, v.dtype);
  }

  // Weights and recurrent state: no gaps.
  void contiguous(const char* name, const TensorView& v) const {
    require(v.count() == 0 || v.contiguous(), name, "{} is not contiguous", v);
  }

  // Bands are for fast matmuls alone.
  void matrix(const char* name, const quant::MatrixView& m, std::int64_t rows, std::int64_t cols, Precision precision = Precision::Exact) const {
    require(m.rows == rows && m.cols == cols && rows >= 0 && cols >= 1, name,
            "expected [{}, {}], found [{}, {}]", rows, cols, m.rows, m.cols);
    const quant::Format& f = m.format;
    require(known(f), name, "no such format: kind {}, {} bits, groups of {}", static_cast<int>(f.kind),
            f.bits, f.group);
    require(!f.integer_codes() || cols % f.group == 0, name, "{} columns are no multiple of the group of {}",
            cols, f);
    if (rows == 0) return;
    require(m.data != nullptr, name, "no data");
    if (m.order == quant::Order::Bands) {
      require(precision == Precision::Fast && quant::has_bands(f, rows, cols), name, "{} [{}, {}] in bands", f, rows, cols);
      return;
    }
    require(!f.quantized() || m.scales != nullptr, name, "{} without scales", f);
    require(!f.has_biases() || m.biases != nullptr, name, "{} without biases", f);
  }

  // Two views that must not start at the same place: the op reads one after it has written the other.
  void distinct(const char* name, const TensorView& a, const char* other, const TensorView& b) const {
    require(a.count() == 0 || a.data != b.data, name, "must not be the memory of {}", other);
  }

  void positive(const char* name, std::int64_t value) const {
    require(value >= 1, name, "expected at least 1, found {}", value);
  }

  // Positions pos0 .. pos0 + n - 1 of a cache with `capacity` rows.
  void positions(std::int64_t pos0, std::int64_t n, std::int64_t capacity) const {
    require(pos0 >= 0 && n <= capacity && pos0 <= capacity - n, "pos0",
            "positions {} .. {} + {} do not fit a cache of {} rows", pos0, pos0, n, capacity);
  }

 private:
  static bool known(const quant::Format& f) {
    switch (f.kind) {
      case quant::FormatKind::F32:
        return f == quant::Format::f32();
      case quant::FormatKind::F16:
        return f == quant::Format::f16();
      case quant::FormatKind::BF16:
        return f == quant::Format::bf16();
      case quant::FormatKind::Mxfp4:
        return f == quant::Format::mxfp4();
      case quant::FormatKind::Fp8:
        return f == quant::Format::fp8();
      case quant::FormatKind::Affine:
        break;
    }
    const bool bits = (f.bits >= 2 && f.bits <= 6) || f.bits == 8;
    const bool group = f.group == 32 || f.group == 64 || f.group == 128;
    const bool scales =
        f.scale_dtype == DType::BF16 || f.scale_dtype == DType::F16 || f.scale_dtype == DType::F32;
    return f.kind == quant::FormatKind::Affine && bits && group && scales;
  }

  void memory(const char* name, const TensorView& v) const {
    for (int i = 0; i < v.rank; ++i) require(v.dim(i) >= 0, name, "negative dimension in {}", v);
    if (v.count() == 0) return;
    require(v.data != nullptr, name, "{} without memory", v);
    const std::size_t size = dtype_bits(v.dtype) / 8;
    require(reinterpret_cast<std::uintptr_t>(v.data) % size == 0, name,
            "memory is not aligned to its elements");
    const int last = v.rank - 1;
    require(v.dim(last) == 1 || v.stride(last) == 1, name, "last dimension has stride {}, expected 1",
            v.stride(last));
    strides(name, v);
  }

  // Rows may have gaps and the first two dimensions may stand in either order, but no two elements share
  // memory.
  void strides(const char* name, const TensorView& v) const {
    for (int i = 0; i + 1 < v.rank; ++i)
      require(v.dim(i) == 1 || v.stride(i) >= v.dim(v.rank - 1), name,
              "stride {} of dimension {} of {} is too small", v.stride(i), i, v);
    if (v.rank != 3 || v.dim(0) == 1 || v.dim(1) == 1) return;
    const bool outer_first = v.stride(0) >= (v.dim(1) - 1) * v.stride(1) + v.dim(2);
    const bool inner_first = v.stride(1) >= (v.dim(0) - 1) * v.stride(0) + v.dim(2);
    require(outer_first || inner_first, name, "strides {}, {} of {} overlap", v.stride(0), v.stride(1), v);
  }

  const char* op_;
};

// [T, D] or [T, H, D]: all tensors of an element-wise op have the shape of the first.
void check_like(const Checker& c, const char* name, const TensorView& v, const TensorView& model) {
  if (model.rank == 2)
    c.tensor(name, v, {model.dim(0), model.dim(1)});
  else
    c.tensor(name, v, {model.dim(0), model.dim(1), model.dim(2)});
}

void check_glu(const Checker& c, GluKind kind, float limit) {
  c.require(kind == GluKind::Silu || limit >= 0.0f, "limit", "expected at least 0, found {}", limit);
}

void check_indices(const Checker& c, const char* name, std::span<const std::int32_t> values,
                   std::int64_t end) {
  for (std::size_t i = 0; i < values.size(); ++i)
    c.require(values[i] >= 0 && values[i] < end, name, "entry {} is {}, expected 0 .. {}", i, values[i],
              end - 1);
}

}  // namespace

void check(const Embed& op) {
  const Checker c(Embed::kName);
  c.rank("y", op.y, 2);
  c.matrix("table", op.table, op.table.rows, op.y.dim(1));
  c.tensor("y", op.y, {static_cast<std::int64_t>(op.tokens.size()), op.table.cols});
  check_indices(c, "tokens", op.tokens, op.table.rows);
}

void check(const Add& op) {
  const Checker c(Add::kName);
  c.rank("a", op.a, 2);
  check_like(c, "a", op.a, op.a);
  check_like(c, "b", op.b, op.a);
  check_like(c, "y", op.y, op.a);
}

void check(const RmsNorm& op) {
  const Checker c(RmsNorm::kName);
  c.require(op.x.rank == 2 || op.x.rank == 3, "x", "expected 2 or 3 dimensions, found {}", op.x.rank);
  check_like(c, "x", op.x, op.x);
  const std::int64_t width = op.x.dim(op.x.rank - 1);
  c.positive("width of x", width);
  c.tensor("weight", op.weight, {width});
  check_like(c, "y", op.y, op.x);
}

void check(const AddRmsNorm& op) {
  const Checker c(AddRmsNorm::kName);
  c.rank("h", op.h, 2);
  check_like(c, "h", op.h, op.h);
  c.positive("width of h", op.h.dim(1));
  check_like(c, "delta", op.delta, op.h);
  c.tensor("weight", op.weight, {op.h.dim(1)});
  check_like(c, "y", op.y, op.h);
  c.distinct("y", op.y, "h", op.h);
}

void check(const MatMul& op) {
  const Checker c(MatMul::kName);
  c.rank("x", op.x, 2);
  check_like(c, "x", op.x, op.x);
  for (const MatMulPart& part : op.parts) {
    c.matrix("w", part.w, part.w.rows, op.x.dim(1), op.precision);
    if (!part.bias.empty()) c.tensor("bias", part.bias, {part.w.rows});
    c.tensor("y", part.y, {op.x.dim(0), part.w.rows});
    c.distinct("y", part.y, "x", op.x);
  }
}

void check(const HeadMatMul& op) {
  const Checker c(HeadMatMul::kName);
  c.rank("x", op.x, 3);
  check_like(c, "x", op.x, op.x);
  const std::int64_t n_heads = op.x.dim(1);
  c.positive("heads of x", n_heads);
  c.matrix("w", op.w, op.w.rows, op.w.cols);
  c.require(op.w.rows % n_heads == 0, "w", "{} rows are no multiple of {} heads", op.w.rows, n_heads);
  c.require(op.n_passed() >= 0, "w", "{} inputs for heads of {} values", op.n_inputs(), op.x.dim(2));
  c.tensor("y", op.y, {op.x.dim(0), n_heads, op.n_outputs() + op.n_passed()});
  c.distinct("y", op.y, "x", op.x);
}

void check(const Rope& op) {
  const Checker c(Rope::kName);
  c.rank("x", op.x, 3);
  check_like(c, "x", op.x, op.x);
  c.rank("inv_freq", op.inv_freq, 1);
  c.tensor("inv_freq", op.inv_freq, {op.inv_freq.dim(0)});
  c.require(op.inv_freq.dim(0) <= op.x.dim(2) / 2, "inv_freq", "{} frequencies for heads of {} values",
            op.inv_freq.dim(0), op.x.dim(2));
  c.positions(op.pos0, op.x.dim(0), std::numeric_limits<std::int64_t>::max());
}

void check(const CacheWrite& op) {
  const Checker c(CacheWrite::kName);
  c.rank("x", op.x, 2);
  check_like(c, "x", op.x, op.x);
  c.rank("cache", op.cache, 2);
  c.cache("cache", op.cache, {op.cache.dim(0), op.x.dim(1)});
  c.positions(op.pos0, op.x.dim(0), op.cache.dim(0));
}

void check(const Attention& op) {
  const Checker c(Attention::kName);
  c.rank("q", op.q, 3);
  check_like(c, "q", op.q, op.q);
  c.rank("k", op.k, 3);
  const std::int64_t n_heads = op.q.dim(1), n_kv_heads = op.k.dim(1), head_dim = op.q.dim(2);
  c.positive("heads of k", n_kv_heads);
  c.positive("width of q", head_dim);
  c.require(n_heads % n_kv_heads == 0, "q", "{} heads are no multiple of the {} of k", n_heads, n_kv_heads);
  c.cache("k", op.k, {op.k.dim(0), n_kv_heads, head_dim});
  c.rank("v", op.v, 3);
  c.positive("width of v", op.v.dim(2));
  c.tensor("v", op.v, {op.k.dim(0), n_kv_heads, op.v.dim(2)}, op.k.dtype);
  if (!op.sinks.empty()) c.tensor("sinks", op.sinks, {n_heads});
  c.tensor("y", op.y, {op.q.dim(0), n_heads, op.v.dim(2)});
  c.distinct("y", op.y, "q", op.q);
  c.require(op.window >= 0, "window", "expected at least 0, found {}", op.window);
  c.positions(op.pos0, op.q.dim(0), op.k.dim(0));
}

void check(const Clamp& op) {
  const Checker c(Clamp::kName);
  c.rank("x", op.x, 2);
  check_like(c, "x", op.x, op.x);
  check_like(c, "y", op.y, op.x);
  c.require(op.limit >= 0.0f, "limit", "expected at least 0, found {}", op.limit);
}

void check(const SigmoidGate& op) {
  const Checker c(SigmoidGate::kName);
  c.rank("x", op.x, 3);
  check_like(c, "x", op.x, op.x);
  check_like(c, "gate", op.gate, op.x);
  check_like(c, "y", op.y, op.x);
}

void check(const Glu& op) {
  const Checker c(Glu::kName);
  c.rank("gate", op.gate, 2);
  check_like(c, "gate", op.gate, op.gate);
  check_like(c, "up", op.up, op.gate);
  check_like(c, "y", op.y, op.gate);
  check_glu(c, op.kind, op.limit);
}

void check(const Route& op) {
  const Checker c(Route::kName);
  c.rank("logits", op.logits, 2);
  check_like(c, "logits", op.logits, op.logits);
  const std::int64_t n_tokens = op.logits.dim(0), n_experts = op.logits.dim(1);
  if (!op.select_bias.empty()) c.tensor("select_bias", op.select_bias, {n_experts});
  c.rank("ids", op.ids, 2);
  const std::int64_t k = op.ids.dim(1);
  c.tensor("ids", op.ids, {n_tokens, k}, DType::I32);
  c.tensor("weights", op.weights, {n_tokens, k});
  c.positive("n_groups", op.n_groups);
  c.require(n_experts % op.n_groups == 0, "n_groups", "{} groups do not divide {} experts", op.n_groups,
            n_experts);
  c.require(op.topk_groups >= 1 && op.topk_groups <= op.n_groups, "topk_groups", "expected 1 .. {}, found {}",
            op.n_groups, op.topk_groups);
  const std::int64_t per_group = n_experts / op.n_groups;
  if (op.n_groups > 1) {
    c.require(op.score != RouterScore::SoftmaxOfChosen, "n_groups",
              "not defined for a softmax of the chosen");
    c.require(op.score != RouterScore::Sigmoid || per_group >= 2, "n_groups",
              "{} experts per group, expected 2", per_group);
  }
  c.require(k >= 1 && k <= per_group * op.topk_groups, "ids", "cannot choose {} of {} experts", k,
            per_group * op.topk_groups);
}

void check(const ExpertFfn& op) {
  const Checker c(ExpertFfn::kName);
  c.rank("x", op.x, 2);
  check_like(c, "x", op.x, op.x);
  c.rank("y", op.y, 2);
  const std::int64_t width = op.x.dim(1);
  c.tensor("y", op.y, {op.y.dim(0), width});
  c.distinct("y", op.y, "x", op.x);
  check_glu(c, op.glu, op.limit);
  for (const ExpertWork& work : op.works) {
    const FfnMatrices& m = work.m;
    const std::int64_t inner = m.gate.rows;
    c.matrix("gate", m.gate, inner, width, op.precision);
    c.matrix("up", m.up, inner, width, op.precision);
    c.matrix("down", m.down, width, inner, op.precision);
    if (!m.gate_bias.empty()) c.tensor("gate_bias", m.gate_bias, {inner});
    if (!m.up_bias.empty()) c.tensor("up_bias", m.up_bias, {inner});
    if (!m.down_bias.empty()) c.tensor("down_bias", m.down_bias, {width});
    c.require(work.rows.size() == work.slots.size(), "slots", "{} slots for {} rows", work.slots.size(),
              work.rows.size());
    check_indices(c, "rows", work.rows, op.x.dim(0));
    check_indices(c, "slots", work.slots, op.y.dim(0));
  }
}

void check(const Combine& op) {
  const Checker c(Combine::kName);
  c.rank("rows", op.rows, 3);
  check_like(c, "rows", op.rows, op.rows);
  const std::int64_t n_tokens = op.rows.dim(0), width = op.rows.dim(2);
  c.tensor("weights", op.weights, {n_tokens, op.rows.dim(1)});
  if (!op.shared.empty()) c.tensor("shared", op.shared, {n_tokens, width});
  if (!op.shared_gate.empty()) {
    c.require(!op.shared.empty() || n_tokens == 0, "shared_gate", "a gate without a shared expert");
    c.tensor("shared_gate", op.shared_gate, {n_tokens, 1});
  }
  c.tensor("h", op.h, {n_tokens, width});
}

void check(const CausalConv& op) {
  const Checker c(CausalConv::kName);
  c.rank("u", op.u, 2);
  check_like(c, "u", op.u, op.u);
  c.rank("w", op.w, 2);
  const std::int64_t n_channels = op.u.dim(1), n_taps = op.w.dim(1);
  c.positive("taps of w", n_taps);
  c.tensor("w", op.w, {n_channels, n_taps});
  c.contiguous("w", op.w);
  c.tensor("state", op.state, {n_taps - 1, n_channels});
  c.contiguous("state", op.state);
  check_like(c, "y", op.y, op.u);
  c.distinct("y", op.y, "u", op.u);
}

void check(const L2Norm& op) {
  const Checker c(L2Norm::kName);
  c.rank("x", op.x, 3);
  check_like(c, "x", op.x, op.x);
  check_like(c, "y", op.y, op.x);
}

void check(const DeltaGates& op) {
  const Checker c(DeltaGates::kName);
  c.rank("a", op.a, 2);
  check_like(c, "a", op.a, op.a);
  check_like(c, "b", op.b, op.a);
  c.tensor("neg_exp_a", op.neg_exp_a, {op.a.dim(1)});
  c.tensor("dt_bias", op.dt_bias, {op.a.dim(1)});
  check_like(c, "decay", op.decay, op.a);
  check_like(c, "beta", op.beta, op.a);
}

void check(const GatedDelta& op) {
  const Checker c(GatedDelta::kName);
  c.rank("q", op.q, 3);
  check_like(c, "q", op.q, op.q);
  check_like(c, "k", op.k, op.q);
  c.rank("v", op.v, 3);
  const std::int64_t n_tokens = op.q.dim(0), n_key_heads = op.q.dim(1), n_value_heads = op.v.dim(1);
  const std::int64_t value_dim = op.v.dim(2);
  c.tensor("v", op.v, {n_tokens, n_value_heads, value_dim});
  c.positive("heads of q", n_key_heads);
  c.require(n_value_heads % n_key_heads == 0, "v", "{} heads are no multiple of the {} of q", n_value_heads,
            n_key_heads);
  c.tensor("decay", op.decay, {n_tokens, n_value_heads});
  c.tensor("beta", op.beta, {n_tokens, n_value_heads});
  c.tensor("state", op.state, {n_value_heads, value_dim, op.q.dim(2)});
  c.contiguous("state", op.state);
  check_like(c, "y", op.y, op.v);
  c.distinct("y", op.y, "v", op.v);
}

void check(const GatedRmsNorm& op) {
  const Checker c(GatedRmsNorm::kName);
  c.rank("x", op.x, 3);
  check_like(c, "x", op.x, op.x);
  c.positive("width of x", op.x.dim(2));
  check_like(c, "gate", op.gate, op.x);
  c.tensor("weight", op.weight, {op.x.dim(2)});
  check_like(c, "y", op.y, op.x);
}

}  // namespace moeflux::backend
