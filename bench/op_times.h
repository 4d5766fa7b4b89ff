// A backend that hands ops on and sums what each kind costs: wall time, calls, bytes of weights, multiplications.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "backend/backend.h"

namespace moeflux::bench {

struct OpTime {
  double seconds = 0;
  std::int64_t calls = 0;
  double bytes = 0;  // of weights, cache and state
  double ops = 0;    // multiplications and additions, of matrices, attention and the delta rule
};

// For one stream at a time; `inner` outlives it and finishes an op before run() returns.
class TimingBackend final : public backend::Backend {
 public:
  explicit TimingBackend(backend::Backend& inner) : inner_(inner) {}

  std::string name() const override { return inner_.name(); }
  std::unique_ptr<backend::Stream> create_stream() override { return inner_.create_stream(); }
  void synchronize(backend::Stream& s) override { inner_.synchronize(s); }
  Allocator& allocator() noexcept override { return inner_.allocator(); }
  Copier& copier() noexcept override { return inner_.copier(); }
  bool wants_bands() const noexcept override { return inner_.wants_bands(); }

  // By op and shape since the last call.
  std::map<std::string, OpTime> take() { return std::exchange(times_, {}); }

 protected:
#define MOEFLUX_TIME_OP(Op) \
  void execute(backend::Stream& s, const backend::Op& op) override { timed(s, op); }
  MOEFLUX_FOR_EACH_OP(MOEFLUX_TIME_OP)
#undef MOEFLUX_TIME_OP

 private:
  struct Cost {
    std::string label;
    double bytes = 0, ops = 0;
  };
  template <class Op>
  static Cost cost(const Op&) {
    return {Op::kName};
  }
  static double size(const quant::MatrixView& w) { return static_cast<double>(w.rows * w.cols); }
  static Cost cost(const backend::MatMul& op) {
    Cost c{fmt::format("MatMul {}", op.precision == Precision::Fast ? "fast" : "exact")};
    for (const backend::MatMulPart& p : op.parts) {
      c.label += fmt::format("{}{}", &p == op.parts.data() ? " " : "+", p.w.rows);
      c.bytes += static_cast<double>(p.w.bytes());
      c.ops += 2.0 * size(p.w) * static_cast<double>(op.x.dim(0));
    }
    c.label += fmt::format(" x {}", op.x.dim(1));
    return c;
  }
  static Cost cost(const backend::ExpertFfn& op) {
    Cost c{op.works.size() == 1 ? "ExpertFfn shared" : "ExpertFfn"};
    for (const backend::ExpertWork& w : op.works)
      for (const quant::MatrixView* m : {&w.m.gate, &w.m.up, &w.m.down}) {
        c.bytes += static_cast<double>(m->bytes());
        c.ops += 2.0 * size(*m) * static_cast<double>(w.rows.size());
      }
    return c;
  }
  static Cost cost(const backend::Attention& op) {
    const auto t = static_cast<double>(op.q.dim(0)), keys = static_cast<double>(op.pos0) + t;
    const double each = op.k.dtype == DType::F16 ? 2 : 4;
    return {"Attention", 2 * each * keys * static_cast<double>(op.k.dim(1) * op.k.dim(2)),
            4.0 * t * (keys - t / 2) * static_cast<double>(op.q.dim(1) * op.q.dim(2))};
  }
  static Cost cost(const backend::GatedDelta& op) {
    const auto state = static_cast<double>(op.v.dim(1) * op.v.dim(2) * op.q.dim(2));
    return {"GatedDelta", 8 * state, 7 * state * static_cast<double>(op.q.dim(0))};
  }
  template <class Op>
  void timed(backend::Stream& s, const Op& op) {
    const auto start = std::chrono::steady_clock::now();
    forward_to(inner_, s, op);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const Cost c = cost(op);
    OpTime& t = times_[c.label];
    t.seconds += seconds, t.calls += 1, t.bytes += c.bytes, t.ops += c.ops;
  }

  backend::Backend& inner_;
  std::map<std::string, OpTime> times_;
};

}  // namespace moeflux::bench
