// Names -> tensors: finds every tensor a spec needs, checks shape, dtype and quantization, reads no data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "format/model_config.h"
#include "format/model_folder.h"
#include "model/family.h"
#include "model/spec.h"
#include "model/tensors.h"
#include "store/expert_record.h"

namespace moeflux::model {

// Where everything a model needs lies on disk.
struct Binding {
  ModelSources sources;
  store::ExpertCatalog experts;
  std::vector<std::string> missing;   // names of tensors that are needed and absent
  std::vector<std::string> warnings;  // tensors nobody reads
  std::map<std::string, std::uint64_t> trunk_formats;   // format name -> bytes
  std::map<std::string, std::uint64_t> expert_formats;
  std::uint64_t trunk_params = 0;  // weights of matrices and vectors

  std::uint64_t trunk_bytes() const noexcept;
  std::uint64_t expert_bytes() const noexcept;      // as loaded, without record padding
  std::uint64_t largest_record() const noexcept;
  // Throws InvalidModel with the first few names and the count when something is missing.
  void require_complete(const format::ModelFolder& folder) const;
};

// Wrong shapes, dtypes and quantization are InvalidModel or Unsupported, naming file, tensor, what was expected and
// what was found. Absent tensors are collected.
Binding bind(const format::ModelFolder& folder, const ModelSpec& spec, const TensorNames& names);

}  // namespace moeflux::model
