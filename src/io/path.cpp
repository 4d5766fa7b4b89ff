#include "io/path.h"

#include <algorithm>
#include <system_error>

#include "core/error.h"

namespace moeflux::io {

PathKind path_kind(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  switch (status.type()) {
    case std::filesystem::file_type::not_found:
      return PathKind::Missing;
    case std::filesystem::file_type::regular:
      return PathKind::File;
    case std::filesystem::file_type::directory:
      return PathKind::Folder;
    case std::filesystem::file_type::none:
      fail(ErrorCode::Io, "{}: cannot look at it: {}", path.string(), error.message());
    default:
      return PathKind::Other;
  }
}

std::vector<std::string> list_folder(const std::filesystem::path& path, std::size_t max_names) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(path, error);
  while (!error && entry != std::filesystem::directory_iterator() && names.size() < max_names) {
    names.push_back(entry->path().filename().string());
    entry.increment(error);
  }
  if (error) fail(ErrorCode::Io, "{}: cannot list the folder: {}", path.string(), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace moeflux::io
