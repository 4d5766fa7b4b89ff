// A file for reads past the page cache.
#pragma once

#include <filesystem>
#include <string>

#include "io/file.h"

namespace moeflux::io {

struct DirectFile {
  File file;
  bool direct = false;
  std::string note;  // why not direct, though it was asked for

  // Opens as File::open does; where the file system cannot read directly (found out by reading one block)
  // through the page cache. Throws Io.
  static DirectFile open(const std::filesystem::path& path, bool direct);
};

}  // namespace moeflux::io
