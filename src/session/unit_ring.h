// The host's side of a step in units (backend/units.h): what is launched, how far ahead, and what happens on a miss.
//
// Unit 2j ends with check j, unit 2j + 1 is the experts of check j, the last unit ends the step. Begun units are launched; complete
// ones have posted a choice that had slots; on a miss everything begun behind it is discarded: it does nothing, and is launched
// again when the missing experts have been brought.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/units.h"

namespace moeflux::session {

class UnitRing {
 public:
  // What the ring acts on; tests bring their own.
  class Device {
   public:
    virtual ~Device() = default;
    virtual void launch(std::size_t first, std::size_t last) = 0;  // the first unit, or experts and the unit behind them
    virtual backend::UnitPost wait(std::size_t check) = 0;
    virtual void resume() = 0;
  };
  // Told in the order of checks. passed: all had slots. missed: gives them slots, in the order of the stream behind resume().
  // Either may throw: what is begun and not complete is then left to run out.
  class Host {
   public:
    virtual ~Host() = default;
    virtual void passed(std::size_t check, const backend::UnitPost& post) = 0;
    virtual void missed(std::size_t check, const backend::UnitPost& post) = 0;
  };

  // Checks of a step, and how many of them may be under way at once, before and behind the first miss; at least 1.
  UnitRing(std::size_t n_checks, std::size_t window, std::size_t window_after_miss) : n_checks_(n_checks), window_(window), window_after_miss_(window_after_miss) {}

  // Returns when the last unit is launched; true: nothing was missed.
  bool run(Device& device, Host& host);

  std::size_t n_discarded() const noexcept { return n_discarded_; }  // units launched in vain

 private:
  void begin(Device& device);
  void discard();

  std::size_t n_checks_, window_, window_after_miss_;
  std::size_t begun_ = 0;     // checks whose unit is launched; n_checks_ + 1: the last unit too
  std::size_t complete_ = 0;  // checks that are through
  std::size_t n_discarded_ = 0;
};

}  // namespace moeflux::session
