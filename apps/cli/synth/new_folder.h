// A folder that appears under its name complete or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace moeflux::cli::synth {

// Made under a temporary name beside the target and renamed by commit(); removed with all it holds when there
// is no commit. A process that is killed leaves the temporary folder behind, so what makes it a model is
// written last.
class NewFolder {
 public:
  // InvalidArgument: something stands at the target, or there is no folder to put it in. Io.
  explicit NewFolder(const std::filesystem::path& target);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::filesystem::path& path() const noexcept { return temporary_; }  // the temporary one
  std::uint64_t free_bytes() const;  // of its file system, for this user
  void write_file(const char* name, std::string_view text);
  // InvalidArgument when something has appeared at the target meanwhile; Io.
  void commit();

 private:
  std::filesystem::path target_, parent_, temporary_;
  bool committed_ = false;
};

}  // namespace moeflux::cli::synth
