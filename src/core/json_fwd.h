// The name of the JSON type alone: for headers that pass documents on. core/json.h has the rest.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace moeflux {

// Keys keep the order of the file.
using Json = nlohmann::ordered_json;

}  // namespace moeflux
