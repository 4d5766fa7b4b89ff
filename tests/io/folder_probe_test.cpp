#include "io/folder_probe.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "io/path.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::io {
namespace {

using test::TempDir;

// Quick: the rates themselves are not judged.
FolderProbe quick_probe(const std::filesystem::path& path, const ProgressSink& progress = {}) {
  FolderProbeOptions options;
  options.depths = {1, 3};
  options.seconds = 0.01;
  options.request_bytes = 65536;
  options.temporary_bytes = 1 << 20;
  return probe_folder(path, options, progress);
}

void expect_rates(const FolderProbe& probe) {
  ASSERT_EQ(probe.rates.size(), 2u);
  for (const DiskProbe& rate : probe.rates) EXPECT_GT(rate.bytes_per_second(), 0.0);
}

TEST(FolderProbe, ReadsTheLargeFiles) {
  const TempDir dir;
  dir.write("a", std::string(300000, 'a'));
  dir.write("b", std::string(100000, 'b'));
  dir.write("small", "x");
  dir.write("folder/c", std::string(300000, 'c'));
  const FolderProbe probe = quick_probe(dir.path());
  expect_rates(probe);
  EXPECT_FALSE(probe.temporary);
  EXPECT_EQ(probe.n_files, 2u);
  EXPECT_EQ(probe.file_bytes, 400000u);
}

TEST(FolderProbe, OneFile) {
  const TempDir dir;
  const FolderProbe probe = quick_probe(dir.write("a", std::string(300000, 'a')));
  expect_rates(probe);
  EXPECT_EQ(probe.file_bytes, 300000u);
  EXPECT_TRUE(quick_probe(dir.write("small", "x")).temporary);
}

TEST(FolderProbe, WritesAFileWhereThereIsNoneAndLeavesNothing) {
  const TempDir dir;
  dir.write("small", "x");
  std::filesystem::resize_file(dir.write("hole", ""), 1 << 20);
  std::vector<std::string> seen;
  const FolderProbe probe = quick_probe(dir.path(), [&](std::string_view what, std::uint64_t done,
                                                        std::uint64_t total) {
    EXPECT_LE(done, total);
    if (seen.empty() || seen.back() != what) seen.emplace_back(what);
    EXPECT_EQ(list_folder(dir.path()), (std::vector<std::string>{"hole", "small"})) << "not even meanwhile";
  });
  expect_rates(probe);
  EXPECT_TRUE(probe.temporary);
  EXPECT_EQ(probe.file_bytes, 1u << 20);
  EXPECT_EQ(seen.size(), 2u);
}

TEST(FolderProbe, Refuses) {
  const TempDir dir;
  test::expect_error([&] { quick_probe(dir / "nowhere"); }, ErrorCode::InvalidArgument, {"nowhere"});
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  test::expect_error([&] { quick_probe(dir / "pipe"); }, ErrorCode::InvalidArgument, {"pipe"});
  EXPECT_TRUE(quick_probe(dir.path()).temporary) << "a pipe is no file to read";
  test::expect_error([] { quick_probe("/proc/self/task"); }, ErrorCode::Io, {"/proc/self/task"});
}

}  // namespace
}  // namespace moeflux::io
