// A folder that appears under its name complete or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

namespace moeflux::io {

// Made under a temporary name beside the target (".NAME.PID-N.tmp") and renamed by commit(); removed with all it holds when
// there is no commit. A process that is killed leaves the temporary folder behind: a marker tells it from a whole one, or
// what makes it whole is written last. While the object lives it holds a lock on the folder.
class NewFolder {
 public:
  // A marker is an empty file of this name that lies in the folder until commit(). InvalidArgument: something stands at the
  // target, or there is no folder to put it in. Io.
  explicit NewFolder(const std::filesystem::path& target, const char* marker = nullptr);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::filesystem::path& path() const noexcept { return temporary_; }  // the temporary one
  std::uint64_t free_bytes() const;  // of its file system, for this user
  // On disk when it returns.
  void write_file(const char* name, std::string_view text);
  // InvalidArgument when something has appeared at the target meanwhile; Io.
  void commit();

 private:
  std::filesystem::path target_, parent_, temporary_, marker_;
  int fd_ = -1;  // of the temporary folder: the lock
  bool committed_ = false;
};

// A temporary folder of some NewFolder with a marker, for the same target.
struct TemporaryFolder {
  std::filesystem::path path;
  bool in_use = false;      // its writer lives
  std::uint64_t bytes = 0;  // of the files in it
};
// None when the place cannot be listed.
std::vector<TemporaryFolder> temporary_folders(const std::filesystem::path& target, const char* marker);

// With all it holds. Throws Io.
void remove_folder(const std::filesystem::path& path);

}  // namespace moeflux::io
