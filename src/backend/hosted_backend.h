// A device backend behind host memory: for tests and CheckBackend, which read what an op wrote.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "core/buffer.h"

namespace moeflux::backend {

// Every op is run on copies: all it reads and writes, weights too, is copied to `inner`'s memory, computed there and
// copied back before run() returns. Slow, and right for any op. `inner` must outlive it. Threads as for any backend.
class HostedBackend final : public Backend {
 public:
  explicit HostedBackend(Backend& inner) : inner_(inner) {}

  std::string name() const override { return inner_.name() + " on host memory"; }
  std::unique_ptr<Stream> create_stream() override { return inner_.create_stream(); }
  void synchronize(Stream& stream) override { inner_.synchronize(stream); }
  Allocator& allocator() noexcept override { return allocator_; }
  Copier& copier() noexcept override { return copier_; }

 protected:
#define MOEFLUX_HOSTED_OP(Op) void execute(Stream& stream, const Op& op) override;
  MOEFLUX_FOR_EACH_OP(MOEFLUX_HOSTED_OP)
#undef MOEFLUX_HOSTED_OP

 private:
  template <class Op>
  void run_copied(Stream& stream, const Op& op);

  Backend& inner_;
  HostAllocator allocator_;
  HostCopier copier_;
};

}  // namespace moeflux::backend
