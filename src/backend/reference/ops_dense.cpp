// Embedding, element-wise ops, norms, matrix products.
#include <algorithm>
#include <cmath>

#include "backend/reference/reference_impl.h"
#include "quant/decode.h"

namespace moeflux::backend {
namespace reference {
namespace {

struct QuantizedGroup {
  std::vector<int> x8;
  float d = 0.0f;
  std::int64_t sum = 0;
};

// In f32, because these roundings define the result.
QuantizedGroup quantize(std::span<const float> x) {
  float top = 0.0f;
  for (const float v : x) top = std::max(top, std::fabs(v));
  QuantizedGroup out{std::vector<int>(x.size(), 0), top / 127.0f, 0};
  if (out.d == 0.0f) return out;
  for (std::size_t i = 0; i < x.size(); ++i) {
    out.x8[i] = static_cast<int>(std::clamp(std::rint(x[i] / out.d), -127.0f, 127.0f));
    out.sum += out.x8[i];
  }
  return out;
}

double dot_exact(const quant::MatrixView& w, std::int64_t row, std::span<const float> x) {
  std::vector<float> weights(x.size());
  quant::decode_row(w, row, weights);
  double sum = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i)
    sum += static_cast<double>(weights[i]) * static_cast<double>(x[i]);
  return sum;
}

double dot_fast(const quant::MatrixView& w, std::int64_t row, std::span<const QuantizedGroup> groups) {
  std::vector<std::int16_t> codes(static_cast<std::size_t>(w.cols));
  quant::decode_codes(w, row, codes);
  double sum = 0.0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const quant::GroupParams p = quant::group_params(w, row, static_cast<std::int64_t>(g));
    std::int64_t idot = 0;
    for (std::size_t i = 0; i < groups[g].x8.size(); ++i)
      idot += codes[g * w.format.group + i] * groups[g].x8[i];
    sum +=
        static_cast<double>(groups[g].d) * (static_cast<double>(idot) * static_cast<double>(p.scale) +
                                            static_cast<double>(groups[g].sum) * static_cast<double>(p.bias));
  }
  return sum;
}

// 1 / sqrt(mean(x^2) + eps) over the last dimension.
double inverse_rms(const float* x, std::int64_t n, float eps) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return 1.0 / std::sqrt(sum / static_cast<double>(n) + static_cast<double>(eps));
}

}  // namespace

std::vector<float> matvec(const quant::MatrixView& w, const TensorView& bias, std::span<const float> x,
                          Precision precision) {
  const bool fast = precision == Precision::Fast && w.format.integer_codes();
  std::vector<QuantizedGroup> groups;
  for (std::size_t at = 0; fast && at < x.size(); at += w.format.group)
    groups.push_back(quantize(x.subspan(at, w.format.group)));
  std::vector<float> y(static_cast<std::size_t>(w.rows));
  for (std::int64_t n = 0; n < w.rows; ++n) {
    double sum = fast ? dot_fast(w, n, groups) : dot_exact(w, n, x);
    if (!bias.empty()) sum += static_cast<double>(at(bias, n));
    y[static_cast<std::size_t>(n)] = static_cast<float>(sum);
  }
  return y;
}

double glu(GluKind kind, double gate, double up, double limit, double alpha) {
  if (kind == GluKind::Silu) return silu(gate) * up;
  const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
  return (u + 1.0) * g * sigmoid(alpha * g);
}

}  // namespace reference

using reference::at;

void ReferenceBackend::execute(Stream&, const Embed& op) {
  for (std::size_t t = 0; t < op.tokens.size(); ++t)
    quant::decode_row(op.table, op.tokens[t],
                      {op.y.row(static_cast<std::int64_t>(t)), static_cast<std::size_t>(op.y.dim(1))});
}

void ReferenceBackend::execute(Stream&, const Add& op) {
  for (std::int64_t t = 0; t < op.y.dim(0); ++t)
    for (std::int64_t i = 0; i < op.y.dim(1); ++i) at(op.y, t, i) = at(op.a, t, i) + at(op.b, t, i);
}

void ReferenceBackend::execute(Stream&, const RmsNorm& op) {
  const bool heads = op.x.rank == 3;
  const std::int64_t width = op.x.dim(op.x.rank - 1);
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t h = 0; h < (heads ? op.x.dim(1) : 1); ++h) {
      const float* x = heads ? &at(op.x, t, h, 0) : op.x.row(t);
      float* y = heads ? &at(op.y, t, h, 0) : op.y.row(t);
      const double r = reference::inverse_rms(x, width, op.eps);
      for (std::int64_t i = 0; i < width; ++i)
        y[i] = static_cast<float>(static_cast<double>(x[i]) * r * static_cast<double>(at(op.weight, i)));
    }
}

void ReferenceBackend::execute(Stream&, const GatedRmsNorm& op) {
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t h = 0; h < op.x.dim(1); ++h) {
      const double r = reference::inverse_rms(&at(op.x, t, h, 0), op.x.dim(2), op.eps);
      for (std::int64_t i = 0; i < op.x.dim(2); ++i)
        at(op.y, t, h, i) = static_cast<float>(static_cast<double>(at(op.x, t, h, i)) * r *
                                               static_cast<double>(at(op.weight, i)) *
                                               reference::silu(static_cast<double>(at(op.gate, t, h, i))));
    }
}

void ReferenceBackend::execute(Stream&, const L2Norm& op) {
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t h = 0; h < op.x.dim(1); ++h) {
      double sum = 0.0;
      for (std::int64_t i = 0; i < op.x.dim(2); ++i) {
        const auto v = static_cast<double>(at(op.x, t, h, i));
        sum += v * v;
      }
      const double factor = static_cast<double>(op.scale) / std::sqrt(sum + static_cast<double>(op.eps));
      for (std::int64_t i = 0; i < op.x.dim(2); ++i)
        at(op.y, t, h, i) = static_cast<float>(static_cast<double>(at(op.x, t, h, i)) * factor);
    }
}

void ReferenceBackend::execute(Stream&, const MatMul& op) {
  for (std::int64_t t = 0; t < op.x.dim(0); ++t) {
    const std::span<const float> x(op.x.row(t), static_cast<std::size_t>(op.x.dim(1)));
    for (const MatMulPart& part : op.parts) {
      const std::vector<float> y = reference::matvec(part.w, part.bias, x, op.precision);
      std::copy(y.begin(), y.end(), part.y.row(t));
    }
  }
}

void ReferenceBackend::execute(Stream&, const HeadMatMul& op) {
  const std::int64_t n_in = op.n_inputs(), n_out = op.n_outputs();
  std::vector<std::vector<float>> rows(static_cast<std::size_t>(op.w.rows), std::vector<float>(static_cast<std::size_t>(op.w.cols)));
  for (std::size_t r = 0; r < rows.size(); ++r) quant::decode_row(op.w, static_cast<std::int64_t>(r), rows[r]);
  const auto weight = [&](std::int64_t h, std::int64_t n, std::int64_t k) {
    const std::int64_t row = op.inputs_first ? h * n_in + k : h * n_out + n;
    return static_cast<double>(rows[static_cast<std::size_t>(row)][static_cast<std::size_t>(op.inputs_first ? n : k)]);
  };
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t h = 0; h < op.x.dim(1); ++h) {
      for (std::int64_t n = 0; n < n_out; ++n) {
        double sum = 0.0;
        for (std::int64_t k = 0; k < n_in; ++k) sum += static_cast<double>(at(op.x, t, h, k)) * weight(h, n, k);
        at(op.y, t, h, n) = static_cast<float>(sum);
      }
      for (std::int64_t i = 0; i < op.n_passed(); ++i) at(op.y, t, h, n_out + i) = at(op.x, t, h, n_in + i);
    }
}

void ReferenceBackend::execute(Stream&, const Clamp& op) {
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t i = 0; i < op.x.dim(1); ++i)
      at(op.y, t, i) = std::min(std::max(at(op.x, t, i), -op.limit), op.limit);
}

void ReferenceBackend::execute(Stream&, const SigmoidGate& op) {
  for (std::int64_t t = 0; t < op.x.dim(0); ++t)
    for (std::int64_t h = 0; h < op.x.dim(1); ++h)
      for (std::int64_t i = 0; i < op.x.dim(2); ++i)
        at(op.y, t, h, i) = static_cast<float>(static_cast<double>(at(op.x, t, h, i)) *
                                               reference::sigmoid(static_cast<double>(at(op.gate, t, h, i))));
}

void ReferenceBackend::execute(Stream&, const Glu& op) {
  for (std::int64_t t = 0; t < op.y.dim(0); ++t)
    for (std::int64_t i = 0; i < op.y.dim(1); ++i)
      at(op.y, t, i) = static_cast<float>(reference::glu(
          op.kind, static_cast<double>(at(op.gate, t, i)), static_cast<double>(at(op.up, t, i)),
          static_cast<double>(op.limit), static_cast<double>(op.alpha)));
}

}  // namespace moeflux::backend
