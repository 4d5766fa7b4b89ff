// Writes down every op that passes: for finding out what a model does. Host memory only.
#pragma once

#include <moeflux/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "backend/backend.h"

namespace moeflux::backend {

struct TraceOptions {
  // Waits for every op, then adds mean |value| and a hash of the bytes to each output. Two runs whose
  // lines are equal computed the same.
  bool outputs = false;
};

// Hands ops on to `inner`, which must outlive it, and logs one line each at level Debug:
//   "12 MatMul x[5, 64] y[5, 96] w affine 4-bit g64 [96, 64]".
// Threads as for any backend; the sink is called by one thread at a time.
class TraceBackend final : public Backend {
 public:
  TraceBackend(Backend& inner, LogSink sink, TraceOptions options = {});

  std::string name() const override;
  std::unique_ptr<Stream> create_stream() override;
  void synchronize(Stream& stream) override;
  Allocator& allocator() noexcept override;
  Copier& copier() noexcept override;
  bool wants_bands() const noexcept override { return inner_.wants_bands(); }

 protected:
#define MOEFLUX_TRACE_OP(Op) void execute(Stream& stream, const Op& op) override;
  MOEFLUX_FOR_EACH_OP(MOEFLUX_TRACE_OP)
#undef MOEFLUX_TRACE_OP

 private:
  template <class Op>
  void trace(Stream& stream, const Op& op);

  Backend& inner_;
  LogSink sink_;
  TraceOptions options_;
  std::atomic<std::uint64_t> n_ops_{0};
  std::mutex sink_mutex_;
};

}  // namespace moeflux::backend
