// A step of one token in units, for experts of which only some are in the backend's memory.
//
// The ops of a step are recorded once and cut into units: everything up to a layer's slot check is one, its experts are the next,
// and so on; the last unit ends the step. Units are queued without knowing what routers will choose. A check that finds an expert
// without a slot marks the stream: units behind it do nothing, so caches and recurrent state stay as they are, until resume(). Every
// check posts what was chosen where the host can read it at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/ops.h"
#include "core/tensor_view.h"

namespace moeflux::backend {

class Stream;

// Compares a layer's choice with the table of slots. With `forced` ids become those first.
struct SlotCheck {
  static constexpr std::int64_t kShares = 16;  // entries of `shares`; more experts count as the last one's
  TensorView ids;                         // [1, k], I32
  const std::int32_t* slot_of = nullptr;  // [n_experts], the backend's memory, as in RoutedFfn; -1: no slot
  const std::int32_t* forced = nullptr;   // [k], the backend's memory, or null
  // [kShares], the backend's memory: where n of the chosen experts are in main memory, the host computes the last shares[n] of them in rank
  // order (at most UnitRunner::kMostShared). Null: none ever.
  const std::int32_t* shares = nullptr;
  const RoutedFfn* ffn = nullptr;         // what follows, for `shares`
};

struct UnitPost {
  bool missed = false;                // some have no slot: what is queued behind this check does nothing
  std::span<const std::int32_t> ids;  // in rank order; valid until the next step begins
};

// What the host needs to compute its share of a layer's experts.
struct HostShare {
  std::span<const float> x;  // the experts' input
  float* rows = nullptr;     // [kMostShared, width]: its results, in rank order
};

// Offered by Backend::units(). Thread-safe for different streams; of one stream one thread at a time. Throws Internal when the
// device fails.
class UnitRunner {
 public:
  virtual ~UnitRunner() = default;

  virtual std::size_t max_top_k() const noexcept = 0;
  virtual std::size_t max_checks() const noexcept = 0;

  // Begins a step of one token; the stream is at rest. Eager: the caller runs its ops, then calls end(). Record: likewise, with
  // check() and cut(); nothing is computed. Replay: the caller runs none, launch() does. `whole`: no check can miss, so the step is
  // one unit, however often it is cut.
  enum class Mode : std::uint8_t { Eager, Record, Replay };
  virtual Mode begin(Stream& stream, std::span<const std::int32_t> tokens, std::int64_t pos0, bool whole) = 0;
  // False: the host may have no share of these experts, SlotCheck::shares must be 0. In steps that are not whole nobody looks at those.
  virtual bool check(Stream& stream, const SlotCheck& check) = 0;
  virtual void cut(Stream& stream) = 0;
  // After the ops. A recorded step can be launched now; false: it was not complete, or this backend cannot record it.
  virtual bool end(Stream& stream, bool complete) = 0;
  virtual void reserve(Stream& stream, const RoutedFfn& op) = 0;  // memory that a recording of the op will need

  virtual std::size_t n_units(Stream& stream) const = 0;  // of the step that was begun
  // The first unit (0, 0), or an odd one and the one behind it, `last`.
  virtual void launch(Stream& stream, std::size_t first, std::size_t last) = 0;
  // All units of the step, in their order; false: this runner launches them one by one.
  virtual bool launch_all(Stream&) { return false; }
  // Waits for the post of the check-th check of the step.
  virtual UnitPost wait(Stream& stream, std::size_t check) = 0;
  // The host's share of the check's experts, whose post has come; and: rows are written, the device may go on. It waits for that, so what it
  // is owed must be given whatever happens: forgive() says that no more will come in this step, whose results are then worth nothing.
  static constexpr std::size_t kMostShared = 8;
  virtual HostShare take_share(Stream&, std::size_t /*check*/) { return {}; }
  virtual void give_share(Stream&, std::size_t /*check*/) {}
  virtual void forgive(Stream&) noexcept {}
  // Behind a step with shares, the stream at rest: throws Internal where the device gave up waiting.
  virtual void settle_shares(Stream&) {}
  // After a miss: units launched from now on compute again.
  virtual void resume(Stream& stream) = 0;
  // In the order of the stream; `pinned` stays as it is until a later check has posted.
  virtual void upload(Stream& stream, std::byte* to, const std::byte* pinned, std::size_t bytes) = 0;
};

}  // namespace moeflux::backend
