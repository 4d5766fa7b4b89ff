#include "cli/safetensors_out.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "cli/fail.h"

namespace moeflux::cli {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "rows are written as they lie in memory");

[[noreturn]] void fail_io(const fs::path& path, const char* what, int error) {
  const bool users = error == ENOENT || error == ENOTDIR || error == ENAMETOOLONG;
  fail(users ? ErrorCode::InvalidArgument : ErrorCode::Io, "{}: {}: {}", path.string(), what,
       std::generic_category().message(error));
}

// What a rename may replace: nothing, or a plain file. Links are followed to what they name.
fs::path checked_target(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (path.empty() || !path.has_filename() || fs::is_directory(status))
    fail(ErrorCode::InvalidArgument, "\"{}\": names no file to write", path.string());
  if (fs::exists(status) && !fs::is_regular_file(status))
    fail(ErrorCode::InvalidArgument, "{}: not a plain file", path.string());
  if (!fs::is_symlink(path, error)) return path;
  const fs::path resolved = fs::weakly_canonical(path, error);
  return error ? path : resolved;
}

std::uint64_t checked_multiply(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > (std::uint64_t{1} << 62))
    fail(ErrorCode::InvalidArgument, "the result would not fit into a file");
  return product;
}

std::uint64_t matrix_bytes(const MatrixShape& shape) {
  const std::uint64_t elements =
      checked_multiply(static_cast<std::uint64_t>(shape.n_rows), static_cast<std::uint64_t>(shape.n_cols));
  return checked_multiply(elements, sizeof(float));
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const fs::path& target, std::vector<MatrixShape> matrices)
    : target_(checked_target(target)), matrices_(std::move(matrices)) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  std::uint64_t data_bytes = 0;
  for (const MatrixShape& shape : matrices_) {
    offsets_.push_back(data_bytes);
    const std::uint64_t end = data_bytes + matrix_bytes(shape);
    if (end > std::uint64_t{1} << 62)
      fail(ErrorCode::InvalidArgument, "the result would not fit into a file");
    json[shape.name] = {
        {"dtype", "F32"}, {"shape", {shape.n_rows, shape.n_cols}}, {"data_offsets", {data_bytes, end}}};
    data_bytes = end;
  }
  std::string header = json.dump();
  header.resize((header.size() + 7) / 8 * 8, ' ');  // keeps the data aligned
  const std::uint64_t header_bytes = header.size();
  for (std::uint64_t& offset : offsets_) offset += sizeof(header_bytes) + header_bytes;
  file_bytes_ = sizeof(header_bytes) + header_bytes + data_bytes;

  create_temporary();
  try {
    reserve();
    write_at(0, std::as_bytes(std::span(&header_bytes, 1)));
    write_at(sizeof(header_bytes), std::as_bytes(std::span(header)));
  } catch (...) {  // the destructor does not run for a half-made object
    ::close(fd_);
    ::unlink(temporary_.c_str());
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) ::close(fd_);
  if (!committed_) ::unlink(temporary_.c_str());
}

void SafetensorsWriter::create_temporary() {
  constexpr int kMaxAttempts = 1000;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    temporary_ = target_.parent_path() /
                 fmt::format(".{}.{}-{}.tmp", target_.filename().string(), ::getpid(), attempt);
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ >= 0) return;
    if (errno != EEXIST && errno != EINTR) break;
  }
  fail_io(target_, "cannot create a file beside it", errno);
}

void SafetensorsWriter::reserve() {
  const auto size = static_cast<off_t>(file_bytes_);
  int result = 0;
  do {
    result = ::fallocate(fd_, 0, 0, size);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS)
    fail_io(target_, fmt::format("no room for {} bytes", file_bytes_).c_str(), errno);
  if (::ftruncate(fd_, size) != 0) fail_io(target_, "cannot set its size", errno);
}

void SafetensorsWriter::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io(target_, "writing failed", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
}

void SafetensorsWriter::write_row(std::size_t matrix, std::int64_t row, std::span<const float> values) {
  if (matrix >= matrices_.size()) fail(ErrorCode::Internal, "there is no output matrix {}", matrix);
  const MatrixShape& shape = matrices_[matrix];
  if (row < 0 || row >= shape.n_rows || values.size() != static_cast<std::size_t>(shape.n_cols))
    fail(ErrorCode::Internal, "{}: row {} of {} values does not fit [{}, {}]", shape.name, row, values.size(),
         shape.n_rows, shape.n_cols);
  write_at(offsets_[matrix] + static_cast<std::uint64_t>(row) * values.size_bytes(), std::as_bytes(values));
  ++rows_written_;
}

void SafetensorsWriter::commit() {
  std::uint64_t expected = 0;
  for (const MatrixShape& shape : matrices_) expected += static_cast<std::uint64_t>(shape.n_rows);
  if (rows_written_ != expected)
    fail(ErrorCode::Internal, "{}: {} of {} rows were computed", target_.string(), rows_written_, expected);
  if (::fsync(fd_) != 0) fail_io(target_, "fsync failed", errno);
  // Some file systems report a failed write only here.
  if (::close(std::exchange(fd_, -1)) != 0) fail_io(target_, "closing failed", errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail_io(target_, "cannot replace", errno);
  committed_ = true;
}

}  // namespace moeflux::cli
