// How well an expert cache of a given size would have served a recorded run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace moeflux {

// Hit rates, from an empty cache, over all experts asked for.
struct SimulationRow {
  double cache = 0;           // share of all experts
  std::uint64_t n_slots = 0;  // experts the cache holds
  double ours = 0;            // the policy of the engine
  double lru = 0;             // least recently used
  double belady = 0;          // knowing the future: what no policy can beat
};

struct Simulation {
  std::string model;  // as the trace names it
  std::int64_t n_layers = 0, n_experts = 0;
  std::uint64_t n_steps = 0, n_requests = 0;
  std::vector<SimulationRow> rows;  // as the shares were given
};

// Replays a routing trace (docs/format.md). Shares are within (0, 1]. Throws Io (the file cannot be read),
// InvalidModel (it is no trace; file and line are named), InvalidArgument (a share is out of range or holds
// no expert at all).
Simulation simulate(const std::filesystem::path& trace, std::span<const double> cache);

}  // namespace moeflux
