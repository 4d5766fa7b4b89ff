#include "io/new_folder.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::io {
namespace {

namespace fs = std::filesystem;
constexpr const char* kMarker = "unfinished";

TEST(NewFolder, AppearsWholeWithoutItsMarker) {
  const test::TempDir dir;
  fs::path temporary;
  {
    NewFolder folder(dir / "x", kMarker);
    temporary = folder.path();
    EXPECT_TRUE(fs::exists(temporary / kMarker));
    EXPECT_FALSE(fs::exists(dir / "x"));
    EXPECT_GT(folder.free_bytes(), 0u);
    folder.write_file("f", "content");
    folder.commit();
  }
  EXPECT_EQ(test::slurp(dir / "x/f"), "content");
  EXPECT_FALSE(fs::exists(dir / "x/unfinished"));
  EXPECT_FALSE(fs::exists(temporary));
}

TEST(NewFolder, GoneWithoutCommit) {
  const test::TempDir dir;
  { NewFolder(dir / "x", kMarker).write_file("f", "content"); }
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

TEST(NewFolder, NothingIsOverwritten) {
  const test::TempDir dir;
  fs::create_directory(dir / "x");
  test::expect_error([&] { NewFolder(dir / "x"); }, ErrorCode::InvalidArgument, {"already there"});
  test::expect_error([&] { NewFolder(dir / "no/parent"); }, ErrorCode::InvalidArgument, {"parent"});
  NewFolder late(dir / "y", kMarker);
  fs::create_directory(dir / "y");
  test::expect_error([&] { late.commit(); }, ErrorCode::InvalidArgument, {"y"});
}

// One that is being written is told from one whose writer has gone, and from what is none at all.
TEST(NewFolder, TemporaryFoldersOfATarget) {
  const test::TempDir dir;
  dir.write(".x.1234-0.tmp/unfinished", "");
  dir.write(".x.1234-0.tmp/data", "12345");
  dir.write(".x.1234-1.tmp/data", "no marker");
  dir.write(".x.mine.tmp/unfinished", "");
  dir.write(".y.1234-0.tmp/unfinished", "");
  dir.write(".x.77-0.tmp", "a file");
  const NewFolder alive(dir / "x/", kMarker);
  const auto found = temporary_folders(dir / "x", kMarker);
  ASSERT_EQ(found.size(), 2u);
  const auto& left = found[found[0].in_use ? 1 : 0];
  EXPECT_FALSE(left.in_use);
  EXPECT_EQ(left.path.filename(), ".x.1234-0.tmp");
  EXPECT_EQ(left.bytes, 5u);
  EXPECT_EQ(found[found[0].in_use ? 0 : 1].path, alive.path());
  remove_folder(left.path);
  EXPECT_EQ(temporary_folders(dir / "x/", kMarker).size(), 1u);
  EXPECT_TRUE(temporary_folders(dir / "none/x", kMarker).empty());
}

}  // namespace
}  // namespace moeflux::io
