// Looking up one tensor with all its checks; what the binder is made of.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "format/model_config.h"
#include "format/model_folder.h"
#include "store/expert_record.h"
#include "store/trunk_store.h"

namespace moeflux::model {

// A quantized or plain matrix, possibly stacked [n, rows, cols].
struct FoundMatrix {
  quant::Format format;
  const format::FolderTensor* data = nullptr;
  const format::FolderTensor* scales = nullptr;
  const format::FolderTensor* biases = nullptr;
};

class TensorFinder {
 public:
  TensorFinder(const format::ModelFolder& folder, const format::QuantConfig& quant) : folder_(folder), quant_(quant) {}

  bool exists(const std::string& name) const { return folder_.find(name) != nullptr; }

  // A trunk matrix "<name>.weight" of [rows, cols].
  store::MatrixSource matrix(const std::string& name, std::int64_t rows, std::int64_t cols);
  // A float tensor of exactly this many values; any of `shapes`.
  store::VectorSource vector(const std::string& name, const std::vector<std::vector<std::uint64_t>>& shapes,
                             store::VectorSource::Transform transform);
  // "<module><suffix>" of [leading.., rows, cols] with its scales; nullopt (and a note of what is missing) when absent.
  std::optional<FoundMatrix> find_matrix(const std::string& module, std::string_view suffix, std::vector<std::uint64_t> leading,
                                         std::int64_t rows, std::int64_t cols);

  void note_missing(const std::string& name) { missing_.push_back(name); }
  const std::vector<std::string>& missing() const noexcept { return missing_; }
  // Names of tensors that nobody asked for and that start with none of `ignored`.
  std::vector<std::string> unused(const std::vector<std::string>& ignored) const;
  std::string where(const format::FolderTensor& t) const;  // "file: tensor"

 private:
  const format::FolderTensor* use(const std::string& name);
  void expect_shape(const format::FolderTensor& t, const std::vector<std::uint64_t>& shape) const;
  quant::Format plain_format(const format::FolderTensor& t) const;
  quant::Format quantized_format(const std::string& module, const FoundMatrix& m, std::int64_t cols) const;

  const format::ModelFolder& folder_;
  const format::QuantConfig& quant_;
  std::set<const format::FolderTensor*> used_;
  std::vector<std::string> missing_;
};

}  // namespace moeflux::model
