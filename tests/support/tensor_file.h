// Whole safetensors files in memory: goldens to compare with, models to rename, restack and break.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "format/safetensors.h"
#include "io/file.h"

namespace moeflux::test {

struct Tensor {
  DType dtype = DType::F32;
  std::vector<std::uint64_t> shape;
  std::vector<std::byte> data;

  template <class T>
  std::vector<T> as() const {
    std::vector<T> out(data.size() / sizeof(T));
    std::memcpy(out.data(), data.data(), out.size() * sizeof(T));
    return out;
  }
};

struct TensorFile {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;

  static TensorFile load(const std::filesystem::path& path) {
    const io::File file = io::File::open(path);
    const format::SafetensorsHeader header = format::read_safetensors_header(file);
    TensorFile out;
    out.metadata = header.metadata;
    for (const format::TensorInfo& t : header.tensors) {
      Tensor& tensor = out.tensors[t.name];
      tensor = {t.dtype, t.shape, std::vector<std::byte>(t.bytes)};
      file.read_exact(t.offset, tensor.data);
    }
    return out;
  }

  void save(const std::filesystem::path& path) const {
    std::vector<format::TensorData> list;
    for (const auto& [name, t] : tensors) list.push_back({name, t.dtype, t.shape, t.data.data()});
    format::write_safetensors(path, list, metadata);
  }

  const Tensor& at(const std::string& name) const {
    const auto it = tensors.find(name);
    if (it == tensors.end()) throw std::runtime_error("no tensor " + name);
    return it->second;
  }
  std::vector<float> floats(const std::string& name) const { return at(name).as<float>(); }
  std::vector<std::int32_t> ints(const std::string& name) const { return at(name).as<std::int32_t>(); }
};

inline std::filesystem::path fixtures() { return std::filesystem::path(MOEFLUX_SOURCE_DIR) / "tests/fixtures"; }
inline std::filesystem::path demo_model() { return std::filesystem::path(MOEFLUX_SOURCE_DIR) / "models/demo"; }

// A copy of a model folder's small files (config, tokenizer, ..) without its weights.
inline void copy_configs(const std::filesystem::path& from, const std::filesystem::path& to) {
  for (const auto& entry : std::filesystem::directory_iterator(from))
    if (entry.path().extension() != ".safetensors") std::filesystem::copy_file(entry.path(), to / entry.path().filename());
}

}  // namespace moeflux::test
