// Replays a trace in memory; the public face is <moeflux/simulate.h>.
#pragma once

#include <cstdint>

#include "store/trace.h"

namespace moeflux::store {

// Hits among all requests, from an empty cache of n_slots experts.
//
// Ours: each layer of a step is one visit; its experts are pinned while the missing ones come in, as in the
// engine. The other two take the experts one by one, as the textbook does; Belady is therefore a bound of
// both ways.
std::uint64_t count_hits_ours(const RoutingTrace& trace, std::uint64_t n_slots);
std::uint64_t count_hits_lru(const RoutingTrace& trace, std::uint64_t n_slots);
std::uint64_t count_hits_belady(const RoutingTrace& trace, std::uint64_t n_slots);

}  // namespace moeflux::store
