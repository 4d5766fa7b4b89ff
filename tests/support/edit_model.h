// Rewriting fixture models tensor by tensor: other layouts, other formats, the same numbers.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "core/float_bits.h"
#include "core/json.h"
#include "quant/decode.h"
#include "quant/encode.h"
#include "support/evaluate.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::test {

inline std::vector<float> values_of(const Tensor& t) {
  std::vector<float> out(t.data.size() * 8 / dtype_bits(t.dtype));
  quant::decode_floats(t.data.data(), t.dtype, out);
  return out;
}

inline Tensor f32_tensor(std::vector<std::uint64_t> shape, std::span<const float> values) {
  Tensor t{DType::F32, std::move(shape), std::vector<std::byte>(values.size_bytes())};
  std::memcpy(t.data.data(), values.data(), t.data.size());
  return t;
}

inline Tensor raw_tensor(DType dtype, std::vector<std::uint64_t> shape, std::span<const std::byte> bytes) {
  return {dtype, std::move(shape), {bytes.begin(), bytes.end()}};
}

// [rows, cols] of equal elements, transposed.
inline Tensor transposed(const Tensor& t, std::uint64_t rows, std::uint64_t cols) {
  const std::size_t unit = t.data.size() / (rows * cols);
  Tensor out{t.dtype, {cols, rows}, std::vector<std::byte>(t.data.size())};
  for (std::uint64_t r = 0; r < rows; ++r)
    for (std::uint64_t c = 0; c < cols; ++c) std::memcpy(&out.data[(c * rows + r) * unit], &t.data[(r * cols + c) * unit], unit);
  return out;
}

// Rows first, first + step, .. of [n_rows, ..], n of them.
inline Tensor every(const Tensor& t, std::uint64_t n_rows, std::uint64_t first, std::uint64_t step, std::uint64_t n) {
  const std::size_t bytes = t.data.size() / n_rows;
  Tensor out{t.dtype, {n}, {}};
  for (std::uint64_t i = 0; i < n; ++i) {
    const auto at = t.data.begin() + static_cast<std::ptrdiff_t>((first + i * step) * bytes);
    out.data.insert(out.data.end(), at, at + static_cast<std::ptrdiff_t>(bytes));
  }
  return out;
}

inline void append(Tensor& to, const Tensor& from) { to.data.insert(to.data.end(), from.data.begin(), from.data.end()); }

// A fixture in memory, to be changed, written and run.
struct EditedModel {
  std::string fixture;
  TensorFile file;
  Json config;

  explicit EditedModel(const std::string& name)
      : fixture(name),
        file(TensorFile::load(fixtures() / name / "model.safetensors")),
        config(parse_json(slurp(fixtures() / name / "config.json"), "config.json")) {}

  std::vector<TokenId> tokens() const { return to_tokens(TensorFile::load(fixtures() / fixture / "golden.safetensors").ints("tokens")); }
  void write(const TempDir& dir) const {
    dir.write("config.json", config.dump());
    file.save(dir / "model.safetensors");
  }
  std::vector<float> logits(const RunOptions& options = {}) const {
    const TempDir dir;
    write(dir);
    return run(dir.path(), tokens(), options).logits;
  }
  // Removes and returns.
  Tensor take(const std::string& name) {
    Tensor t = file.at(name);
    file.tensors.erase(name);
    return t;
  }
  // Names that end in `suffix`.
  std::vector<std::string> names(const std::string& suffix) const {
    std::vector<std::string> out;
    for (const auto& [name, t] : file.tensors)
      if (name.ends_with(suffix)) out.push_back(name);
    return out;
  }
};

}  // namespace moeflux::test
