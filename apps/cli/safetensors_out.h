// Writes a safetensors file of f32 matrices row by row, in any order, in constant memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace moeflux::cli {

struct MatrixShape {
  std::string name;
  std::int64_t n_rows = 0;
  std::int64_t n_cols = 0;
};

// The file appears under its name, complete, at commit(); before that, or when there is no commit, the target
// is untouched. One thread at a time. Space is reserved at once, so that a full disk shows before the work,
// not after.
class SafetensorsWriter {
 public:
  // InvalidArgument: the target cannot be a file. Io: it cannot be created, or there is no room.
  SafetensorsWriter(const std::filesystem::path& target, std::vector<MatrixShape> matrices);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // matrix: index into the list given. Internal: no such row, or a row of another length. Io.
  void write_row(std::size_t matrix, std::int64_t row, std::span<const float> values);
  // Internal: rows are missing. Io.
  void commit();

  std::uint64_t file_bytes() const noexcept { return file_bytes_; }

 private:
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void create_temporary();
  void reserve();

  std::filesystem::path target_, temporary_;
  std::vector<MatrixShape> matrices_;
  std::vector<std::uint64_t> offsets_;  // of each matrix, from the start of the file
  std::uint64_t file_bytes_ = 0;
  std::uint64_t rows_written_ = 0;
  int fd_ = -1;
  bool committed_ = false;
};

}  // namespace moeflux::cli
