// A folder's config and headers as ModelInfo.
#pragma once

#include <moeflux/engine.h>

#include "format/model_folder.h"
#include "model/binder.h"
#include "model/family.h"

namespace moeflux::engine {

ModelInfo describe(const format::ModelFolder& folder, const model::ParsedModel& parsed, const model::Binding& binding);

}  // namespace moeflux::engine
