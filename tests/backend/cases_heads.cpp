// HeadMatMul: both orientations of the matrices, values that pass, strided heads; and Clamp.
#include <cmath>

#include <fmt/format.h>

#include "backend/op_cases.h"
#include "backend/view_walk.h"
#include "quant/decode.h"

namespace moeflux::backend::cases {
namespace {

// One fma per input and the reference's store; what passes is copied.
Bounds head_bound(Backend&, const HeadMatMul& op, const Result&) {
  const std::int64_t n_in = op.n_inputs(), n_out = op.n_outputs();
  std::vector<std::vector<float>> rows;
  for (std::int64_t r = 0; r < op.w.rows; ++r)
    quant::decode_row(op.w, r, rows.emplace_back(static_cast<std::size_t>(op.w.cols)));
  std::vector<double> bounds;
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t h = 0; h < op.x.dim(1); ++h) {
      for (std::int64_t n = 0; n < n_out; ++n) {
        double size = 0.0;
        for (std::int64_t k = 0; k < n_in; ++k) {
          const std::int64_t row = op.inputs_first ? h * n_in + k : h * n_out + n;
          const float w = rows[static_cast<std::size_t>(row)][static_cast<std::size_t>(op.inputs_first ? n : k)];
          const double x = element_value(op.x, t * op.x.stride(0) + h * op.x.stride(1) + k);
          size += std::fabs(x * static_cast<double>(w));
        }
        bounds.push_back(roundings(static_cast<double>(n_in) + 1.0) * size + kTiny);
      }
      bounds.insert(bounds.end(), static_cast<std::size_t>(op.n_passed()), 0.0);
    }
  return {bounds};
}

struct HeadShape {
  std::int64_t t, heads, inputs, outputs, passed;
};

void head_case(const Visitor& visit, unsigned seed, const HeadShape& s, const quant::Format& format, bool inputs_first) {
  OpCase<HeadMatMul> c(fmt::format("HeadMatMul {} T {} H {} {} -> {} and {}{}", format.name(), s.t, s.heads, s.inputs,
                                   s.outputs, s.passed, inputs_first ? " inputs first" : ""),
                       seed);
  Memory& m = c.memory;
  c.op.x = seed % 3 == 0   ? m.random_interleaved(s.t, s.heads, s.inputs + s.passed)
           : seed % 3 == 1 ? m.random_head_major(s.t, s.heads, s.inputs + s.passed)
                           : m.random({s.t, s.heads, s.inputs + s.passed});
  c.op.w = inputs_first ? m.matrix(s.heads * s.inputs, s.outputs, format, seed % 2 == 0)
                        : m.matrix(s.heads * s.outputs, s.inputs, format, seed % 2 == 0);
  c.op.y = m.output({s.t, s.heads, s.outputs + s.passed}, seed % 2 == 0 ? 3 : 0);
  c.op.inputs_first = inputs_first;
  c.bound = head_bound;
  visit(c);
}

}  // namespace

void head_matmul_cases(const Visitor& visit) {
  unsigned seed = 9000;
  for (const bool inputs_first : {false, true}) {
    for (const quant::Format& f : all_formats()) {
      const std::int64_t group = f.integer_codes() ? f.group : 48;
      const HeadShape s = inputs_first ? HeadShape{3, 2, 5, group, 4} : HeadShape{3, 2, group, 5, 4};
      head_case(visit, seed++, s, f, inputs_first);
    }
    for (const HeadShape& s : {HeadShape{0, 2, 8, 8, 1}, HeadShape{1, 1, 1, 1, 0}, HeadShape{1, 4, 32, 64, 16}, HeadShape{5, 3, 17, 33, 0},
                           HeadShape{65, 2, 7, 100, 3}, HeadShape{8, 4, 128, 31, 0}, HeadShape{2, 2, 512, 16, 64}})
      for (const quant::Format& f : {quant::Format::f32(), quant::Format::bf16(), quant::Format::fp8()})
        head_case(visit, seed++, s, f, inputs_first);
    // As models have them, of one and some tokens: outputs of one block and of several, with some left over.
    const quant::Format q4 = quant::Format::affine(4, 64, DType::BF16);
    for (const std::int64_t t : {1, 9, 70})
      for (const HeadShape& s : {HeadShape{t, 2, 512, 128, 0}, HeadShape{t, 2, 128, 512, 64}, HeadShape{t, 1, 192, 192, 5}, HeadShape{t, 1, 64, 320, 0}})
        for (const quant::Format& f : {q4, quant::Format::affine(4, 32, DType::F16), quant::Format::affine(4, 32, DType::F32), quant::Format::affine(8, 64, DType::BF16),
                                       quant::Format::affine(3, 64, DType::BF16), quant::Format::mxfp4(), quant::Format::bf16()})
          if (t == 1 || f == q4) head_case(visit, seed++, s, f, inputs_first);
  }
}

void clamp_cases(const Visitor& visit) {
  unsigned seed = 9500;
  for (const std::int64_t t : {0, 1, 7})
    for (const std::int64_t d : {1, 17, 64, 257})
      for (const bool in_place : {false, true}) {
        OpCase<Clamp> c(fmt::format("Clamp [{}, {}]{}", t, d, in_place ? " in place" : ""), seed++);
        c.op.x = c.memory.random_gaps({t, d}, seed % 3);
        c.op.y = in_place ? c.op.x : c.memory.output({t, d}, seed % 2);
        c.op.limit = seed % 4 == 0 ? 0.0f : 0.7f;
        c.bound = [](Backend&, const Clamp&, const Result& r) { return Bounds{std::vector<double>(r.values[0].size(), 0.0)}; };
        visit(c);
      }
}

}  // namespace moeflux::backend::cases
