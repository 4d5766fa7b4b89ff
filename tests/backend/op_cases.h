// Op test cases: memory, an op over it, and for every output the error that rounding allows against the
// reference.
//
// A case can be run on any host backend any number of times: its memory is put back before each run, and
// after it every byte that no output covers must be as before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "quant/encode.h"

namespace moeflux::backend::cases {

using Dims = std::initializer_list<std::int64_t>;

// Owns what a case's views point to. Every allocation is its own exactly sized block, so that sanitizers see
// overruns.
class Memory {
 public:
  explicit Memory(unsigned seed) : state_(seed) {}

  // Normally distributed values, mean 0.
  TensorView random(Dims dims, double deviation = 1.0);
  // The same with `gap` unused elements behind every row of the last dimension.
  TensorView random_gaps(Dims dims, std::int64_t gap, double deviation = 1.0);
  // [T, H, D] that lies as [H, T, D].
  TensorView random_head_major(std::int64_t t, std::int64_t h, std::int64_t d, double deviation = 1.0);
  // [T, H, D] where every head's values are followed by another D: the first half of a (q | gate) row.
  TensorView random_interleaved(std::int64_t t, std::int64_t h, std::int64_t d, double deviation = 1.0);
  TensorView values(Dims dims, std::span<const float> values);
  TensorView random_f16(Dims dims, double deviation = 1.0);
  TensorView ints(Dims dims);  // I32, all -7
  // Filled with a recognizable number: what an op must overwrite.
  TensorView output(Dims dims, std::int64_t gap = 0);

  // Random weights in a format. Plain ones and scales lie at odd addresses when `unaligned`: files promise
  // nothing.
  quant::MatrixView matrix(std::int64_t rows, std::int64_t cols, const quant::Format& format,
                           bool unaligned = false);
  std::span<const std::int32_t> indices(std::vector<std::int32_t> values);

  // Mean 0 and deviation 1, nearly normal; exact arithmetic, so that every machine makes the same cases.
  double normal() {
    double sum = -2.0;
    for (int i = 0; i < 2; ++i) {
      const std::uint64_t bits = random_bits();
      sum += static_cast<double>(bits >> 32) * 0x1p-32 + static_cast<double>(bits & 0xffffffffu) * 0x1p-32;
    }
    return sum * 1.7320508075688772;
  }
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(random_bits() % static_cast<std::uint64_t>(n)); }

  // Remembers the contents; restore() puts them back.
  void seal();
  void restore();
  // True when all bytes outside the given views are as they were sealed.
  bool untouched_outside(std::span<const TensorView> views) const;

 private:
  struct Block {
    std::vector<std::byte> now, sealed;
  };
  std::byte* allocate(std::size_t bytes);
  TensorView allocate_view(Dims dims, DType dtype, std::int64_t gap);
  const std::byte* keep(const std::vector<std::byte>& bytes, bool unaligned);

  std::deque<Block> blocks_;
  std::deque<std::vector<std::int32_t>> indices_;
  // splitmix64: most of what the cases cost was std::mt19937.
  std::uint64_t random_bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint64_t state_;
};

// What an op wrote: one entry per output in the order of each_tensor().
struct Result {
  std::vector<std::string> names;
  std::vector<std::vector<double>> values;
  std::vector<std::vector<std::byte>> bytes;
};

// Allowed |difference| per element of every output; 0 means the same value exactly.
using Bounds = std::vector<std::vector<double>>;

class Case {
 public:
  Case(std::string case_label, unsigned seed) : label(std::move(case_label)), memory(seed) {}
  virtual ~Case() = default;
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  // The whole op at once, or cut along the tokens: chunk sizes are taken in turn.
  Result run(Backend& backend);
  Result run_in_chunks(Backend& backend, std::span<const std::int64_t> chunks);
  Bounds bounds(Backend& reference, const Result& reference_result);

  std::string label;
  Memory memory;

 protected:
  virtual void execute(Backend& backend, Stream& stream) = 0;
  virtual void execute_slice(Backend& backend, Stream& stream, std::int64_t begin, std::int64_t n) = 0;
  virtual std::int64_t n_tokens() const = 0;
  virtual std::vector<std::pair<std::string, TensorView>> outputs() = 0;
  virtual Bounds compute_bounds(Backend& reference, const Result& reference_result) = 0;

 private:
  Result collect();
};

// The op on tokens [begin, begin + n) alone.
Embed slice_tokens(Embed op, std::int64_t begin, std::int64_t n);
Add slice_tokens(Add op, std::int64_t begin, std::int64_t n);
RmsNorm slice_tokens(RmsNorm op, std::int64_t begin, std::int64_t n);
AddRmsNorm slice_tokens(AddRmsNorm op, std::int64_t begin, std::int64_t n);
HeadMatMul slice_tokens(HeadMatMul op, std::int64_t begin, std::int64_t n);
Clamp slice_tokens(Clamp op, std::int64_t begin, std::int64_t n);
Rope slice_tokens(Rope op, std::int64_t begin, std::int64_t n);
CacheWrite slice_tokens(CacheWrite op, std::int64_t begin, std::int64_t n);
Attention slice_tokens(Attention op, std::int64_t begin, std::int64_t n);
SigmoidGate slice_tokens(SigmoidGate op, std::int64_t begin, std::int64_t n);
Glu slice_tokens(Glu op, std::int64_t begin, std::int64_t n);
Route slice_tokens(Route op, std::int64_t begin, std::int64_t n);
Combine slice_tokens(Combine op, std::int64_t begin, std::int64_t n);
CausalConv slice_tokens(CausalConv op, std::int64_t begin, std::int64_t n);
L2Norm slice_tokens(L2Norm op, std::int64_t begin, std::int64_t n);
DeltaGates slice_tokens(DeltaGates op, std::int64_t begin, std::int64_t n);
GatedDelta slice_tokens(GatedDelta op, std::int64_t begin, std::int64_t n);
GatedRmsNorm slice_tokens(GatedRmsNorm op, std::int64_t begin, std::int64_t n);

void run_slice(Backend& backend, Stream& stream, const MatMul& op, std::int64_t begin, std::int64_t n);
// Works are cut into pieces of n rows: each row is a token's own.
void run_slice(Backend& backend, Stream& stream, const ExpertFfn& op, std::int64_t begin, std::int64_t n);
template <class Op>
void run_slice(Backend& backend, Stream& stream, const Op& op, std::int64_t begin, std::int64_t n) {
  backend.run(stream, slice_tokens(op, begin, n));
}

template <class Op>
class OpCase final : public Case {
 public:
  using Case::Case;
  Op op;
  std::vector<MatMulPart> parts;  // MatMul
  std::vector<ExpertWork> works;  // ExpertFfn
  std::function<Bounds(Backend& reference, const Op& op, const Result& reference_result)> bound;

 protected:
  void execute(Backend& backend, Stream& stream) override { backend.run(stream, whole()); }
  void execute_slice(Backend& backend, Stream& stream, std::int64_t begin, std::int64_t n) override {
    run_slice(backend, stream, whole(), begin, n);
  }
  std::int64_t n_tokens() const override {
    std::int64_t n = -1;
    Op copy = op;
    copy.each_tensor([&](const char*, TensorView& v, Access) { n = n < 0 ? v.dim(0) : n; });
    if constexpr (std::is_same_v<Op, ExpertFfn>) n = op.y.dim(0);  // rows of work are counted by slots
    return n;
  }
  std::vector<std::pair<std::string, TensorView>> outputs() override {
    std::vector<std::pair<std::string, TensorView>> out;
    whole().each_tensor([&](const char* name, TensorView& v, Access access) {
      if (access != Access::In) out.emplace_back(name, v);
    });
    return out;
  }
  Bounds compute_bounds(Backend& reference, const Result& reference_result) override {
    return bound(reference, whole(), reference_result);
  }

 private:
  Op whole() {
    Op copy = op;
    if constexpr (std::is_same_v<Op, MatMul>) copy.parts = parts;
    if constexpr (std::is_same_v<Op, ExpertFfn>) copy.works = works;
    return copy;
  }
};

// Every generator makes its cases one after the other and shows each to the visitor.
using Visitor = std::function<void(Case&)>;
struct Generator {
  const char* op;
  void (*each)(const Visitor& visit);
};
std::vector<Generator> all_generators();
inline void PrintTo(const Generator& generator, std::ostream* out) { *out << generator.op; }

void embed_cases(const Visitor& visit);
void add_cases(const Visitor& visit);
void rms_norm_cases(const Visitor& visit);
void add_rms_norm_cases(const Visitor& visit);
void matmul_cases(const Visitor& visit);
void head_matmul_cases(const Visitor& visit);
void rope_cases(const Visitor& visit);
void cache_write_cases(const Visitor& visit);
void attention_cases(const Visitor& visit);
void clamp_cases(const Visitor& visit);
void sigmoid_gate_cases(const Visitor& visit);
void glu_cases(const Visitor& visit);
void route_cases(const Visitor& visit);
void expert_ffn_cases(const Visitor& visit);
void combine_cases(const Visitor& visit);
void causal_conv_cases(const Visitor& visit);
void l2_norm_cases(const Visitor& visit);
void delta_gates_cases(const Visitor& visit);
void gated_delta_cases(const Visitor& visit);
void gated_rms_norm_cases(const Visitor& visit);

std::vector<quant::Format> all_formats();

// ---- Rounding errors
// -------------------------------------------------------------------------------------------
//
// kU is the largest relative error of one f32 rounding. A value that went through n roundings has a relative
// error of at most n * kU; as roundings are independent of each other it stays below 8 * sqrt(n) * kU with a
// probability of failure of 2 exp(-8^2 / 2) < 1e-13 (Higham and Mary's probabilistic bound), so the smaller
// of the two serves. Errors of second order are covered by the factor 1.01. Bounds are absolute: the factor
// times the sum of the terms' magnitudes.
inline constexpr double kU = 0x1p-24;
double roundings(double n);
// Roundings of dot16 or sum16 over n elements: the fmas of a lane and four levels of the tree.
double dot16_roundings(std::int64_t n);
// Relative errors of our functions: n ulp are at most 2 n kU. Bounds in ulp: core/scalar_math.h.
inline constexpr double kExp = 2 * 1.02 * kU, kSigmoid = 2 * 2.5 * kU, kSoftplus = 2 * 2.9 * kU,
                        kSinCos = 2 * 0.51 * kU;
// Below the normal range relative errors mean nothing: exp gives 0 there.
inline constexpr double kTiny = 0x1p-126;

// bounds[i] = factor * |y_i| for output `index`.
std::vector<double> relative(const Result& result, std::size_t index, double factor);

}  // namespace moeflux::backend::cases
