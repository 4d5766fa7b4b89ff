// Sees what the routers of a session choose, and may choose instead: recorded and replayed routing.
#pragma once

#include <cstdint>
#include <span>

#include <moeflux/types.h>

namespace moeflux::model {

// Called on the session's thread, pass by pass: begin, the layers with experts in their order, end. May throw, which ends
// the pass like any other error.
class RoutingHook {
 public:
  virtual ~RoutingHook() = default;

  // n_tokens tokens from position pos0 on pass the layers.
  virtual void begin_pass(std::int64_t pos0, std::int64_t n_tokens) = 0;
  // ids: [n_tokens, top_k], experts of a layer in rank order. True: they were replaced (by distinct ones in each row);
  // the router's weights stay.
  virtual bool routed(LayerIdx layer, std::int64_t n_experts, std::int64_t top_k, std::span<std::int32_t> ids) = 0;
  // What routed() does. Looks: nothing but look. Foretells: replaces ids whatever they are, so it may be called before the router
  // has spoken, layers in their order. Replaces: neither.
  enum class Kind : std::uint8_t { Looks, Foretells, Replaces };
  virtual Kind kind() const noexcept { return Kind::Replaces; }
  // The pass is done and its positions are committed. `decode`: it was a step of one token.
  virtual void end_pass(bool decode) = 0;
};

}  // namespace moeflux::model
