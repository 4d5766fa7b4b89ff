// What stands at a path, and what lies in a folder.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace moeflux::io {

enum class PathKind { Missing, File, Folder, Other };

// Links are followed; a link to nothing is Missing. Throws Io when the system cannot say (no permission).
PathKind path_kind(const std::filesystem::path& path);

// The names in a folder, sorted; at most `max_names` of them are looked at. Throws Io.
std::vector<std::string> list_folder(const std::filesystem::path& path, std::size_t max_names = 65536);

}  // namespace moeflux::io
