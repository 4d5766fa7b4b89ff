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
  std::int64_t rows_per_scale = 1;  // rows that share a stored row of scales
  float bias_per_scale = 0.0f;      // not 0: biases are this multiple of the scales
};

class TensorFinder {
 public:
  TensorFinder(const format::ModelFolder& folder, const format::QuantConfig& quant) : folder_(folder), quant_(quant) {}

  const format::ModelFolder& folder() const noexcept { return folder_; }
  bool exists(const std::string& name) const { return folder_.find(name) != nullptr; }

  // A trunk matrix "<name>.weight" of [rows, cols], or of [leading.., rows, cols] taken as one matrix.
  store::MatrixSource matrix(const std::string& name, std::int64_t rows, std::int64_t cols, std::vector<std::uint64_t> leading = {});
  // A float tensor of exactly this many values; any of `shapes`.
  store::VectorSource vector(const std::string& name, const std::vector<std::vector<std::uint64_t>>& shapes,
                             store::VectorSource::Transform transform);
  // "<name>_blocks" [leading.., rows, cols / 32, 16] and "<name>_scales" [leading.., rows, cols / 32].
  std::optional<FoundMatrix> find_blocks(const std::string& name, std::vector<std::uint64_t> leading, std::int64_t rows, std::int64_t cols);
  // A float tensor of this shape; nullptr (and a note) when absent.
  const format::FolderTensor* find_floats(const std::string& name, const std::vector<std::uint64_t>& shape);
  // "<module><suffix>" of [leading.., rows, cols] with its scales; nullopt (and a note of what is missing) when absent.
  // Also vendors' own forms: "<module>.weight" in e4m3 with "<module>.weight_scale_inv", and "<module>.weight_packed".
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
  std::optional<FoundMatrix> find_fp8(const std::string& module, FoundMatrix m, std::vector<std::uint64_t> shape);
  std::optional<FoundMatrix> find_packed(const std::string& module, std::vector<std::uint64_t> shape);
  quant::Format quantized_format(const std::string& module, const FoundMatrix& m, std::int64_t cols) const;

  const format::ModelFolder& folder_;
  const format::QuantConfig& quant_;
  std::set<const format::FolderTensor*> used_;
  std::vector<std::string> missing_;
};

}  // namespace moeflux::model
