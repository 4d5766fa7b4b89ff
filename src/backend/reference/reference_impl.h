// The class behind make_reference_backend(); its ops stand in ops_*.cpp by family.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/view_walk.h"

namespace moeflux::backend {

class ReferenceBackend final : public Backend {
 public:
  std::string name() const override { return "reference"; }
  std::unique_ptr<Stream> create_stream() override { return std::make_unique<Stream>(); }
  void synchronize(Stream&) override {}
  Allocator& allocator() noexcept override { return allocator_; }
  Copier& copier() noexcept override { return copier_; }

 protected:
  using Backend::execute;  // AddRmsNorm by its definition
  void execute(Stream& stream, const Embed& op) override;
  void execute(Stream& stream, const Add& op) override;
  void execute(Stream& stream, const RmsNorm& op) override;
  void execute(Stream& stream, const MatMul& op) override;
  void execute(Stream& stream, const HeadMatMul& op) override;
  void execute(Stream& stream, const Rope& op) override;
  void execute(Stream& stream, const CacheWrite& op) override;
  void execute(Stream& stream, const Attention& op) override;
  void execute(Stream& stream, const Clamp& op) override;
  void execute(Stream& stream, const SigmoidGate& op) override;
  void execute(Stream& stream, const Glu& op) override;
  void execute(Stream& stream, const Route& op) override;
  void execute(Stream& stream, const ExpertFfn& op) override;
  void execute(Stream& stream, const Combine& op) override;
  void execute(Stream& stream, const CausalConv& op) override;
  void execute(Stream& stream, const L2Norm& op) override;
  void execute(Stream& stream, const DeltaGates& op) override;
  void execute(Stream& stream, const GatedDelta& op) override;
  void execute(Stream& stream, const GatedRmsNorm& op) override;

 private:
  HostAllocator allocator_;
  HostCopier copier_;
};

namespace reference {

// An f32 element of a view with one, two or three dimensions.
inline float& at(const TensorView& v, std::int64_t i) { return v.f32()[i]; }
inline float& at(const TensorView& v, std::int64_t i, std::int64_t j) { return v.f32()[i * v.stride(0) + j]; }
inline float& at(const TensorView& v, std::int64_t i, std::int64_t j, std::int64_t k) {
  return v.f32()[i * v.stride(0) + j * v.stride(1) + k];
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double silu(double x) { return x * sigmoid(x); }
double glu(GluKind kind, double gate, double up, double limit, double alpha);

// W x (+ bias) for one token.
std::vector<float> matvec(const quant::MatrixView& w, const TensorView& bias, std::span<const float> x,
                          Precision precision);

}  // namespace reference
}  // namespace moeflux::backend
