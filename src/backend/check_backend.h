// Runs every op on two backends and says where they part: the tool for a new kernel. Host memory only.
#pragma once

#include <moeflux/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "backend/backend.h"

namespace moeflux::backend {

struct CheckOptions {
  // Two tensors agree when ||a - b|| <= tolerance * ||b|| and max|a - b| <= tolerance * max|b|. The default
  // is some 800 roundings of f32: above any op's rounding error, far below any mistake.
  double tolerance = 1e-4;
  // Throw Internal at the first difference instead of going on.
  bool throw_on_difference = false;
};

// One tensor in which the two disagree.
struct Difference {
  std::uint64_t op_index = 0;  // counted from 0 over all ops of the backend
  std::string op;
  std::string tensor;
  std::int64_t element = 0;    // the worst one, row-major
  double a = 0.0, b = 0.0;     // its two values
  double relative_norm = 0.0;  // ||a - b|| / ||b||
  double max_abs = 0.0;

  std::string text() const;
};

// The caller sees the results of `a` alone. `b` gets copies of everything an op writes, with the contents
// from before the op, and reads the same weights and inputs, so every op is judged by itself: an error does
// not travel. Integers (expert ids) must be equal; where the two keys that compete are equal within the
// tolerance, the choice is a near tie: told to the sink at level Info, counted apart, no difference. Both
// backends must outlive it and compute on host memory. Threads as for any backend.
class CheckBackend final : public Backend {
 public:
  // Every difference goes to the sink at level Error.
  CheckBackend(Backend& a, Backend& b, CheckOptions options = {}, LogSink sink = {});

  std::string name() const override;
  std::unique_ptr<Stream> create_stream() override;
  void synchronize(Stream& stream) override;
  Allocator& allocator() noexcept override;
  Copier& copier() noexcept override;

  std::optional<Difference> first_difference() const;
  std::uint64_t n_ops() const noexcept { return n_ops_.load(std::memory_order_relaxed); }
  std::uint64_t n_differences() const noexcept { return n_differences_.load(std::memory_order_relaxed); }
  std::uint64_t n_near_ties() const noexcept { return n_near_ties_.load(std::memory_order_relaxed); }

 protected:
#define MOEFLUX_CHECK_OP(Op) void execute(Stream& stream, const Op& op) override;
  MOEFLUX_FOR_EACH_OP(MOEFLUX_CHECK_OP)
#undef MOEFLUX_CHECK_OP

 private:
  template <class Op>
  void run_both(Stream& stream, const Op& op);
  void compare(std::uint64_t op_index, const char* op, const char* tensor, const TensorView& a,
               const TensorView& b);
  void compare_routes(std::uint64_t op_index, const Route& a, const Route& b);
  void report(Difference difference);
  void note(LogLevel level, const std::string& text);

  Backend& a_;
  Backend& b_;
  CheckOptions options_;
  LogSink sink_;
  std::atomic<std::uint64_t> n_ops_{0}, n_differences_{0}, n_near_ties_{0};
  mutable std::mutex mutex_;  // the sink and first_
  std::optional<Difference> first_;
};

}  // namespace moeflux::backend
