// Choosing and making the expert store that fits the memory ceiling.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <moeflux/options.h>
#include <moeflux/plan.h>

#include "backend/backend.h"
#include "format/model_folder.h"
#include "io/async_reader.h"
#include "model/binder.h"
#include "model/spec.h"
#include "store/expert_store.h"

namespace moeflux::engine {

struct ExpertSetup {
  std::unique_ptr<store::ExpertStore> store;
  MemorySplit memory;
  std::string description;  // "all 10240 experts in memory", "2560 of 10240 experts in memory, streamed by io_uring"
};

// Called when the trunk is loaded: what the process takes by then is measured, the rest is planned.
ExpertSetup make_expert_store(const EngineOptions& options, const model::ModelSpec& spec, const model::Binding& binding,
                              const format::ModelFolder& folder, backend::Backend& backend);

// Whether matrices are brought into bands when they are loaded (quant/bands.h).
bool use_bands(const EngineOptions& options, const backend::Backend& backend) noexcept;

// The files that hold weights, in the order extents count them.
std::vector<std::filesystem::path> weight_files(const format::ModelFolder& folder);
io::ReaderKind reader_kind(IoKind kind);
// Throws as io::make_reader.
std::unique_ptr<io::AsyncReader> make_model_reader(const format::ModelFolder& folder, IoKind kind, const io::MemoryRegions& regions);

}  // namespace moeflux::engine
