// MatMul over all formats and both precisions.
#include "backend/cases_matmul.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "quant/decode.h"

namespace moeflux::backend::cases {

Quantized quantize(std::span<const float> x, std::int64_t group) {
  Quantized q{std::vector<double>(x.size(), 0.0), {}};
  for (std::size_t begin = 0; begin < x.size(); begin += static_cast<std::size_t>(group)) {
    float top = 0.0f;
    for (std::size_t i = begin; i < begin + static_cast<std::size_t>(group); ++i)
      top = std::max(top, std::fabs(x[i]));
    const float d = top / 127.0f;
    q.d.push_back(static_cast<double>(d));
    for (std::size_t i = begin; i < begin + static_cast<std::size_t>(group) && d != 0.0f; ++i)
      q.x8[i] = static_cast<double>(std::clamp(std::rint(x[i] / d), -127.0f, 127.0f));
  }
  return q;
}

std::vector<double> matmul_bound(const quant::MatrixView& w, const TensorView& bias, std::span<const float> x,
                                 Precision precision) {
  const bool fast = precision == Precision::Fast && w.format.integer_codes();
  const Quantized q = fast ? quantize(x, w.format.group) : Quantized{};
  std::vector<float> row(x.size());
  std::vector<std::int16_t> codes(x.size());
  std::vector<double> bounds;
  for (std::int64_t n = 0; n < w.rows; ++n) {
    double size = 0.0, count = 0.0;
    if (fast) {
      // s * d is rounded, then one fma for the codes and one for the bias per group. Integers are exact.
      quant::decode_codes(w, n, codes);
      for (std::size_t g = 0; g < q.d.size(); ++g) {
        const quant::GroupParams p = quant::group_params(w, n, static_cast<std::int64_t>(g));
        double idot = 0.0, sum = 0.0;
        for (std::size_t i = g * w.format.group; i < (g + 1) * w.format.group; ++i) {
          idot += codes[i] * q.x8[i];
          sum += q.x8[i];
        }
        size += q.d[g] * (std::fabs(idot * static_cast<double>(p.scale)) +
                          std::fabs(sum * static_cast<double>(p.bias)));
      }
      count = 1.0 + 2.0 * static_cast<double>(q.d.size());
    } else {
      quant::decode_row(w, n, row);
      for (std::size_t i = 0; i < x.size(); ++i)
        size += std::fabs(static_cast<double>(row[i]) * static_cast<double>(x[i]));
      count = dot16_roundings(w.cols);
    }
    if (!bias.empty()) size += std::fabs(static_cast<double>(bias.f32()[n]));
    // The addition of the bias and the reference's store come on top. Sums below the normal range do not
    // occur.
    bounds.push_back(roundings(count + 2.0) * size + kTiny);
  }
  return bounds;
}

namespace {

Bounds bound_of(Backend&, const MatMul& op, const Result&) {
  Bounds bounds;
  for (const MatMulPart& part : op.parts) {
    std::vector<double>& b = bounds.emplace_back();
    for (std::int64_t t = 0; t < op.x.dim(0); ++t) {
      const std::span<const float> x(op.x.row(t), static_cast<std::size_t>(op.x.dim(1)));
      const std::vector<double> row = matmul_bound(part.w, part.bias, x, op.precision);
      b.insert(b.end(), row.begin(), row.end());
    }
  }
  return bounds;
}

struct Part {
  std::int64_t rows;
  quant::Format format;
  bool bias;
};

void matmul_case(const Visitor& visit, unsigned seed, std::int64_t t, std::int64_t cols,
                 const std::vector<Part>& parts, Precision precision) {
  OpCase<MatMul> c(fmt::format("MatMul {} x [{}, {}] {}", parts[0].format.name(), t, cols,
                               precision == Precision::Fast ? "fast" : "exact"),
                   seed);
  c.op.x = c.memory.random_gaps({t, cols}, seed % 3 == 0 ? 7 : 0);
  // A token of zeros, and a group of zeros: d is 0 there.
  if (t > 1) std::fill_n(c.op.x.row(1), cols, 0.0f);
  if (t > 2) std::fill_n(c.op.x.row(2), std::min<std::int64_t>(cols, 32), 0.0f);
  c.op.precision = precision;
  for (const Part& p : parts) {
    c.label += fmt::format(" {}{}", p.rows, p.bias ? "+bias" : "");
    c.parts.push_back({c.memory.matrix(p.rows, cols, p.format, seed % 2 == 0),
                       p.bias ? c.memory.random({p.rows}) : TensorView{},
                       c.memory.output({t, p.rows}, seed % 5 == 0 ? 3 : 0)});
  }
  c.bound = bound_of;
  visit(c);
}

// Largest codes and 8-bit activations of one sign: sums of products come to what they can be at most.
void largest_case(const Visitor& visit, unsigned seed, std::int64_t t, const quant::Format& format, float x) {
  constexpr std::int64_t kRows = 19, kCols = 1152;
  OpCase<MatMul> c(fmt::format("MatMul {} x [{}, {}] largest codes, all x {}", format.name(), t, kCols, x), seed);
  c.op.x = c.memory.random({t, kCols});
  std::fill_n(c.op.x.f32(), t * kCols, x);
  c.op.precision = Precision::Fast;
  const quant::MatrixView w = c.memory.matrix(kRows, kCols, format);
  const int largest = format.kind == quant::FormatKind::Mxfp4 ? 0x77 : 0xff;
  std::memset(const_cast<std::byte*>(w.data), largest, static_cast<std::size_t>(kRows) * w.row_bytes());  // the case's own memory
  c.parts.push_back({w, {}, c.memory.output({t, kRows})});
  c.bound = bound_of;
  visit(c);
}

// Every e4m3 code but the two that are no numbers.
void every_code_case(const Visitor& visit, unsigned seed, std::int64_t t, std::int64_t cols) {
  constexpr std::int64_t kRows = 19;
  OpCase<MatMul> c(fmt::format("MatMul fp8 x [{}, {}] every code", t, cols), seed);
  c.op.x = c.memory.random({t, cols});
  c.op.precision = Precision::Fast;
  const quant::MatrixView w = c.memory.matrix(kRows, cols, quant::Format::fp8());
  auto* codes = const_cast<std::byte*>(w.data);  // the case's own memory
  for (std::int64_t i = 0; i < kRows * cols; ++i) codes[i] = static_cast<std::byte>((i & 0x7f) == 0x7f ? 1 : i & 0xff);
  c.parts.push_back({w, {}, c.memory.output({t, kRows})});
  c.bound = bound_of;
  visit(c);
}

}  // namespace

void matmul_cases(const Visitor& visit) {
  unsigned seed = 2000;
  const std::int64_t rows[] = {1, 3, 17, 33, 100}, plain_cols[] = {1, 3, 17, 31, 33, 100, 257};
  for (const quant::Format& f : all_formats())
    for (const Precision precision : {Precision::Exact, Precision::Fast})
      for (const std::int64_t t : {1, 2, 7}) {
        const std::int64_t n = rows[seed % 5];
        const std::int64_t cols = f.quantized() ? f.group * (1 + seed % 4) : plain_cols[seed % 7];
        matmul_case(visit, seed++, t, cols, {{n, f, t == 2}}, precision);
      }
  // All odd widths of the plain formats; T = 0 and many tokens.
  for (const quant::Format& f : {quant::Format::f32(), quant::Format::f16(), quant::Format::bf16()})
    for (const std::int64_t cols : plain_cols)
      for (const std::int64_t t : {0, 1, 65})
        matmul_case(visit, seed++, t, cols, {{17, f, cols == 3}}, Precision::Exact);
  // FP8 groups may be short at the end.
  for (const std::int64_t cols : {1, 64, 129, 300})
    for (const std::int64_t t : {1, 7}) matmul_case(visit, seed++, t, cols, {{17, quant::Format::fp8(), t == 1}}, Precision::Fast);
  for (const std::int64_t cols : {256, 200, 1000, 1047})
    for (const std::int64_t t : {1, 3}) every_code_case(visit, seed++, t, cols);
  // Kernels take tokens and rows in tiles: every number of tokens up to two tiles, rows around 16 and 32, and
  // rows of codes that end inside a register.
  for (const quant::Format& f : all_formats())
    for (const Precision precision : {Precision::Exact, Precision::Fast}) {
      if (!f.quantized()) continue;
      const std::int64_t t = 3 + seed % 24, n = 15 + seed % 35, cols = f.group * (1 + seed % 5);
      matmul_case(visit, seed, t, cols, {{n, f, seed % 2 == 0}}, precision);
      ++seed;
    }
  for (std::int64_t t = 3; t <= 26; ++t)
    matmul_case(visit, seed++, t, 192, {{33, quant::Format::affine(4, 64, DType::BF16), false}},
                Precision::Fast);
  // More than 32 groups in a row.
  for (const std::int64_t t : {1, 5})
    for (const quant::Format& f :
         {quant::Format::affine(4, 32, DType::BF16), quant::Format::affine(6, 32, DType::F32),
          quant::Format::affine(2, 32, DType::F16), quant::Format::mxfp4()})
      for (const Precision precision : {Precision::Exact, Precision::Fast})
        matmul_case(visit, seed++, t, 32 * 71, {{19, f, true}}, precision);
  const quant::Format q4 = quant::Format::affine(4, 64, DType::BF16),
                      q8 = quant::Format::affine(8, 64, DType::BF16);
  const quant::Format q3 = quant::Format::affine(3, 128, DType::F16), mx = quant::Format::mxfp4();
  for (const Precision precision : {Precision::Exact, Precision::Fast}) {
    for (const quant::Format& f : {q4, q3, q8, mx})
      for (const std::int64_t t : {0, 65}) matmul_case(visit, seed++, t, 256, {{33, f, true}}, precision);
    // Several matrices of one input: different formats, groups and sizes, some with bias.
    for (const std::int64_t t : {1, 7, 65})
      matmul_case(visit, seed++, t, 384,
                  {{100, q4, false},
                   {1, q8, true},
                   {31, quant::Format::bf16(), true},
                   {257, q3, false},
                   {17, mx, true}},
                  precision);
    // A long row: many groups, many fmas of a lane.
    matmul_case(visit, seed++, 2, 8192, {{3, q4, false}, {3, quant::Format::bf16(), false}}, precision);
  }
  // Columns as models have them that few powers of two divide, and rows of several blocks.
  for (const quant::Format& f : {q4, quant::Format::affine(4, 64, DType::F16), quant::Format::affine(4, 128, DType::BF16), q8, quant::Format::affine(8, 32, DType::F16), mx})
    for (const std::int64_t cols : {320, 704, 768, 1408, 2880, 7168})
      if (cols % f.group == 0) matmul_case(visit, seed++, 1, cols, {{cols == 7168 ? 20 : 45 + cols % 7 * 40, f, cols % 3 == 0}}, Precision::Fast);
  // One token and 4-bit codes: rows of whole units of 128 codes are read as one sequence, in blocks of 16 units, whose ends are
  // not those of rows; rows of a tile of 16, several tiles, and some left over.
  const quant::Format four_bits[] = {quant::Format::affine(4, 32, DType::BF16), q4, quant::Format::affine(4, 64, DType::F16),
                                     quant::Format::affine(4, 64, DType::F32),  quant::Format::affine(4, 128, DType::BF16), mx};
  const std::int64_t some_rows[] = {16, 48, 50};
  for (const quant::Format& f : four_bits)
    for (const std::int64_t units : {3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 32}) {
      const std::int64_t n = some_rows[seed % 3];
      matmul_case(visit, seed++, 1, 128 * units, {{n, f, units % 2 == 0}}, Precision::Fast);
    }
  // Up to four tokens meet them the same way, more do not.
  for (const quant::Format& f : four_bits)
    for (const std::int64_t units : {4, 5, 11, 16, 17, 32}) {
      const std::int64_t n = some_rows[seed % 3], t = 2 + seed % 4;
      matmul_case(visit, seed++, t, 128 * units, {{n, f, units % 2 == 0}}, Precision::Fast);
    }
  for (const std::int64_t t : {2, 3, 4, 5}) {
    for (const std::int64_t units : {4, 16, 32}) matmul_case(visit, seed++, t, 128 * units, {{50, q4, units == 4}}, Precision::Fast);
    // Beside a matrix that wants its tokens otherwise.
    matmul_case(visit, seed++, t, 1024, {{50, q4, false}, {33, q8, false}, {17, mx, false}}, Precision::Fast);
  }
  // Whole bands of sixteen rows: an odd number of them, every number of tokens up to two tiles, groups of every size.
  for (const quant::Format& f : four_bits)
    for (const std::int64_t cols : {128, 384, 2176}) {
      matmul_case(visit, seed++, 1, cols, {{80, f, cols == 384}, {16, f, false}}, Precision::Fast);
      const std::int64_t few = 2 + seed % 5, many = 9 + seed % 9;
      matmul_case(visit, seed++, few, cols, {{48, f, cols == 384}, {33, q4, false}}, Precision::Fast);
      matmul_case(visit, seed++, many, cols, {{48, f, cols == 384}}, Precision::Fast);
    }
  for (std::int64_t t = 1; t <= 26; ++t) matmul_case(visit, seed++, t, 192, {{48, q4, t % 2 == 0}}, Precision::Fast);
  // More tokens, in tiles of up to sixteen and two of those at a time: every number of tokens up to four tiles, rows that end inside a chunk of 64.
  for (std::int64_t t = 24; t <= 66; ++t) matmul_case(visit, seed++, t, 192, {{48, q4, t % 2 == 0}, {9, t % 3 == 0 ? q8 : mx, false}}, Precision::Fast);
  for (const quant::Format& f : all_formats())
    if (f.quantized()) {
      const std::int64_t t = 25 + seed % 47, n = 15 + seed % 35, cols = f.group * (1 + seed % 5);
      matmul_case(visit, seed++, t, cols, {{n, f, t % 2 == 0}}, Precision::Fast);
    }
  // Long rows, whose tiles have eight rows, and fewer tokens of which go that way.
  const std::int64_t few_rows[] = {5, 8, 24, 29};
  for (const quant::Format& f : four_bits)
    for (const std::int64_t units : {33, 36, 40, 56}) {
      const std::int64_t n = few_rows[seed % 4];
      matmul_case(visit, seed++, 1, 128 * units, {{n, f, units % 8 == 0}}, Precision::Fast);
    }
  for (const std::int64_t t : {2, 3, 4}) matmul_case(visit, seed++, t, 128 * 56, {{29, q4, t == 3}}, Precision::Fast);
  // The same for units of 64 codes, where a row has an odd number of them.
  for (const quant::Format& f : four_bits)
    for (const std::int64_t units : {5, 7, 9, 13, 15, 17, 33}) {
      if (f.group > 64) continue;
      const std::int64_t n = some_rows[seed % 3] - 7;
      matmul_case(visit, seed++, 1, 64 * units, {{n, f, units % 4 == 1}}, Precision::Fast);
    }
  for (const quant::Format& f : all_formats())
    for (const std::int64_t t : {1, 5})
      if (f.kind == quant::FormatKind::Affine || f.kind == quant::FormatKind::Mxfp4)
        for (const float x : {1.0f, -1.0f}) largest_case(visit, seed++, t, f, x);
}

}  // namespace moeflux::backend::cases
