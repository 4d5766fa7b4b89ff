// `--json`: exactly one object on standard output. Counts and bytes are numbers; a hash is 16 hex digits,
// because many readers of JSON know only doubles.
#pragma once

#include <moeflux/stats.h>
#include <moeflux/types.h>

#include <nlohmann/json_fwd.hpp>
#include <span>

namespace moeflux::cli {

// On one line. Text that is no UTF-8 gets replacement characters.
void write_json(const nlohmann::ordered_json& object);

nlohmann::ordered_json ids_json(std::span<const TokenId> tokens);
nlohmann::ordered_json stats_json(const SessionStats& stats);

}  // namespace moeflux::cli
