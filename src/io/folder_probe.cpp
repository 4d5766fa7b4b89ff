#include "io/folder_probe.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <system_error>

#include "core/error.h"
#include "io/path.h"

namespace moeflux::io {
namespace {

namespace fs = std::filesystem;

struct Candidate {
  fs::path path;
  std::uint64_t bytes = 0;
};

// A hole is read without the disk.
bool worth_reading(const fs::path& path, std::uint64_t request_bytes, std::uint64_t& bytes) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || ::access(path.c_str(), R_OK) != 0)
    return false;
  bytes = static_cast<std::uint64_t>(info.st_size);
  return bytes >= request_bytes && static_cast<std::uint64_t>(info.st_blocks) * 512 >= bytes / 2;
}

std::vector<Candidate> files_of(const fs::path& folder, std::uint64_t request_bytes) {
  constexpr std::size_t kMost = 64;  // of the largest: more tell nothing new
  std::vector<Candidate> files;
  for (const std::string& name : list_folder(folder)) {
    Candidate file{folder / name};
    if (worth_reading(file.path, request_bytes, file.bytes)) files.push_back(std::move(file));
  }
  std::stable_sort(files.begin(), files.end(),
                   [](const Candidate& a, const Candidate& b) { return a.bytes > b.bytes; });
  if (files.size() > kMost) files.resize(kMost);
  return files;
}

// A file without a name: it is gone with the last descriptor, however the process ends.
class NamelessFile {
 public:
  NamelessFile(const fs::path& folder, std::uint64_t bytes, const ProgressSink& progress) : folder_(folder) {
    std::string name = (folder / ".moeflux-probe-XXXXXX").string();
    fd_ = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd_ < 0) fail_io("cannot make a file to read there", errno);
    ::unlink(name.c_str());
    try {
      fill(bytes, progress);
    } catch (...) {
      ::close(fd_);
      throw;
    }
  }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;
  ~NamelessFile() { ::close(fd_); }

  fs::path path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  // Random bytes: no file system can compress them.
  void fill(std::uint64_t bytes, const ProgressSink& progress) {
    std::vector<std::uint64_t> block((std::size_t{4} << 20) / sizeof(std::uint64_t));
    std::mt19937_64 random(bytes);
    for (std::uint64_t done = 0; done < bytes;) {
      for (std::uint64_t& word : block) word = random();
      const std::size_t n = static_cast<std::size_t>(
          std::min<std::uint64_t>(block.size() * sizeof(std::uint64_t), bytes - done));
      const ssize_t written = ::write(fd_, block.data(), n);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_io("cannot write a file to read there", errno);
      done += static_cast<std::uint64_t>(written);
      if (progress) progress("writing a file to read", done, bytes);
    }
    if (::fsync(fd_) != 0) fail_io("cannot write a file to read there", errno);
  }
  [[noreturn]] void fail_io(const char* what, int error) const {
    fail(ErrorCode::Io, "{}: {}: {}", folder_.string(), what, std::generic_category().message(error));
  }

  const fs::path folder_;
  int fd_ = -1;
};

void read_all(std::span<const fs::path> files, const FolderProbeOptions& options,
              const ProgressSink& progress, FolderProbe& probe) {
  probe.reader = probe_reader(files[0]);
  for (std::size_t i = 0; i < options.depths.size(); ++i) {
    if (progress) progress("reading", i, options.depths.size());
    DiskProbeOptions read;
    read.depth = options.depths[i];
    read.request_bytes = options.request_bytes;
    read.seconds = options.seconds;
    read.seed = i + 1;
    probe.rates.push_back(probe_disk(files, read));
  }
  if (progress) progress("reading", options.depths.size(), options.depths.size());
}

}  // namespace

FolderProbe probe_folder(const fs::path& path, const FolderProbeOptions& options,
                         const ProgressSink& progress) {
  const PathKind kind = path_kind(path);
  if (kind == PathKind::Missing)
    fail(ErrorCode::InvalidArgument, "{}: there is no such folder or file", path.string());
  if (kind == PathKind::Other)
    fail(ErrorCode::InvalidArgument, "{}: is neither a folder nor a file", path.string());
  FolderProbe probe;
  std::vector<Candidate> found;
  if (kind == PathKind::Folder)
    found = files_of(path, options.request_bytes);
  else if (Candidate file{path}; worth_reading(path, options.request_bytes, file.bytes))
    found.push_back(file);
  if (!found.empty()) {
    std::vector<fs::path> files;
    for (const Candidate& file : found) {
      files.push_back(file.path);
      probe.file_bytes += file.bytes;
    }
    probe.n_files = files.size();
    read_all(files, options, progress, probe);
    return probe;
  }
  const fs::path parent = path.has_parent_path() ? path.parent_path() : ".";
  const NamelessFile own(kind == PathKind::Folder ? path : parent, options.temporary_bytes, progress);
  probe.temporary = true;
  probe.n_files = 1;
  probe.file_bytes = options.temporary_bytes;
  const fs::path file = own.path();
  read_all({&file, 1}, options, progress, probe);
  return probe;
}

}  // namespace moeflux::io
