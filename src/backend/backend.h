// A backend runs ops on streams. Everything above it (blocks, sessions) speaks only this interface.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "backend/ops.h"
#include "backend/sequences.h"
#include "backend/units.h"
#include "core/async_copier.h"
#include "core/buffer.h"

namespace moeflux::backend {

// An ordered queue of ops. Ops on one stream take effect in order; two streams are independent. A stream
// belongs to one session and one thread at a time. On the CPU run() returns when the op is done.
class Stream {
 public:
  virtual ~Stream() = default;
};

// Thread-safe for different streams. Two backends share nothing.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;                   // "cpu avx512, 2 threads"
  virtual std::unique_ptr<Stream> create_stream() = 0;
  virtual void synchronize(Stream& stream) = 0;           // returns when all ops of the stream are done
  virtual Allocator& allocator() noexcept = 0;            // memory that ops may touch
  virtual Copier& copier() noexcept = 0;
  virtual Allocator& pinned_allocator() noexcept { return allocator(); }  // host memory that copies to allocator()'s fastest

  // Whether fast matmuls take matrices in Order::Bands and are faster for it. Nothing else may be given those.
  virtual bool wants_bands() const noexcept { return false; }

  // Whether ops may read experts in pinned_allocator()'s memory (RoutedFfn::host_offset), and write a head's logits there.
  virtual bool reads_pinned() const noexcept { return false; }

  // Copies between pinned_allocator()'s memory and allocator()'s beside what streams compute; null where both are the same
  // memory. The backend outlives it.
  virtual std::unique_ptr<AsyncCopier> make_async_copier() { return nullptr; }

  // Whether run_routed() may be called; else the caller reads the router's choice and runs ExpertFfn.
  virtual bool routes_on_device() const noexcept { return false; }
  // One token: the first chosen expert that is read from main memory is also left in the first slot of slot_of[n_experts ..], the next in
  // the next, as far as n_lent goes and a slot is not -1. Returns whether that is so for this op; else those slots stay as they are.
  virtual bool run_routed(Stream&, const RoutedFfn&) { return false; }

  // The defaults run the ops one by one.
  virtual void run_sequence(Stream& stream, const DeltaMix& m);
  virtual void run_sequence(Stream& stream, const HeadInputs& m);

  // Says that the next ops compute these tokens from position pos0 on. `repeatable`: the ops of two such steps differ in
  // nothing but tokens and positions, so a backend may record them and replay the recording: then it returns true, all of
  // the step's ops are queued already and the caller runs none. Otherwise end_step() follows the ops; complete == false
  // where one of them was not reached. `tokens` stay valid until then.
  virtual bool begin_step(Stream&, std::span<const std::int32_t> /*tokens*/, std::int64_t /*pos0*/, bool /*repeatable*/) { return false; }
  virtual void end_step(Stream&, bool /*complete*/) {}

  // Between expect(true) and expect(false), which nest, ops come at short notice: whoever computes them waits awake.
  virtual void expect(bool /*ops*/) noexcept {}

  // Steps in units, where the backend can record them; else null. The backend owns it.
  virtual UnitRunner* units() noexcept { return nullptr; }

  // Checks shapes (throws Internal: a bug of the caller), then queues the op.
  template <class Op>
  void run(Stream& stream, const Op& op) {
    check(op);
    if (!nothing_to_do(op)) execute(stream, op);
  }

 protected:
  // One overload per op; arguments have been checked and T > 0. Fused ops have a default that composes
  // plain ones, so a new backend is right before it is fast.
  virtual void execute(Stream& stream, const Embed& op) = 0;
  virtual void execute(Stream& stream, const Add& op) = 0;
  virtual void execute(Stream& stream, const RmsNorm& op) = 0;
  virtual void execute(Stream& stream, const AddRmsNorm& op);
  virtual void execute(Stream& stream, const MatMul& op) = 0;
  virtual void execute(Stream& stream, const HeadMatMul& op) = 0;
  virtual void execute(Stream& stream, const Rope& op) = 0;
  virtual void execute(Stream& stream, const CacheWrite& op) = 0;
  virtual void execute(Stream& stream, const Attention& op) = 0;
  virtual void execute(Stream& stream, const Clamp& op) = 0;
  virtual void execute(Stream& stream, const SigmoidGate& op) = 0;
  virtual void execute(Stream& stream, const Glu& op) = 0;
  virtual void execute(Stream& stream, const Route& op) = 0;
  virtual void execute(Stream& stream, const ExpertFfn& op) = 0;
  virtual void execute(Stream& stream, const Combine& op) = 0;
  virtual void execute(Stream& stream, const CausalConv& op) = 0;
  virtual void execute(Stream& stream, const L2Norm& op) = 0;
  virtual void execute(Stream& stream, const DeltaGates& op) = 0;
  virtual void execute(Stream& stream, const GatedDelta& op) = 0;
  virtual void execute(Stream& stream, const GatedRmsNorm& op) = 0;

  // For wrappers (TraceBackend, CheckBackend) that hand ops on.
  template <class Op>
  static void forward_to(Backend& backend, Stream& stream, const Op& op) {
    backend.execute(stream, op);
  }

 private:
  // No tokens: the first dimension of the first tensor of every op but ExpertFfn counts tokens.
  template <class Op>
  static bool nothing_to_do(const Op& op) {
    bool empty = false, first = true;
    Op copy = op;
    copy.each_tensor([&](const char*, TensorView& v, Access) {
      if (first) empty = v.dim(0) == 0;
      first = false;
    });
    return empty;
  }
};

}  // namespace moeflux::backend
