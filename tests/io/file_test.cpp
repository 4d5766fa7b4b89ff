#include "io/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "core/error.h"
#include "io/path.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::io {
namespace {

using test::expect_error;
using test::slurp;
using test::TempDir;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

void write_text(const std::filesystem::path& path, std::string_view text) {
  const std::span<const std::byte> part = bytes_of(text);
  write_file_atomically(path, std::span(&part, 1));
}

std::string read_at(const File& file, std::uint64_t offset, std::size_t n) {
  std::string out(n, '?');
  file.read_exact(offset, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST(File, ReadsAtAnyOffset) {
  TempDir dir;
  const File file = File::open(dir.write("a.bin", "0123456789"));
  EXPECT_EQ(file.size(), 10u);
  EXPECT_EQ(file.path(), dir / "a.bin");
  EXPECT_EQ(read_at(file, 0, 10), "0123456789");
  EXPECT_EQ(read_at(file, 7, 3), "789");
  EXPECT_EQ(read_at(file, 3, 1), "3");
  EXPECT_EQ(read_at(file, 10, 0), "");
}

TEST(File, MoveLeavesTheSourceClosed) {
  TempDir dir;
  File a = File::open(dir.write("a.bin", "abc"));
  File b = std::move(a);
  EXPECT_EQ(a.fd(), -1);
  EXPECT_EQ(a.size(), 0u);
  expect_error([&] { read_at(a, 0, 1); }, ErrorCode::Internal, {"not open"});
  EXPECT_EQ(read_at(b, 0, 3), "abc");
  File c;
  c = std::move(b);
  EXPECT_EQ(read_at(c, 1, 2), "bc");
}

TEST(File, SharedByThreads) {
  TempDir dir;
  std::string content(1 << 16, '\0');
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 31 >> 3);
  const File file = File::open(dir.write("a.bin", content));
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t)
    threads.emplace_back([&, t] {
      for (std::size_t i = t; i + 100 < content.size(); i += 97)
        if (read_at(file, i, 100) != content.substr(i, 100)) ++wrong[t];
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST(File, MissingFile) {
  TempDir dir;
  expect_error([&] { File::open(dir / "none.bin"); }, ErrorCode::Io, {"none.bin", "No such file"});
}

TEST(File, RefusesWhatIsNotARegularFile) {
  TempDir dir;
  expect_error([&] { File::open(dir.path()); }, ErrorCode::Io, {dir.path().string(), "folder"});
  expect_error([&] { File::open("/dev/null"); }, ErrorCode::Io, {"/dev/null", "not a regular file"});
  expect_error([&] { File::open("/dev/zero"); }, ErrorCode::Io, {"/dev/zero", "not a regular file"});
  // Nobody writes to the pipe: opening it must not wait.
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  expect_error([&] { File::open(dir / "pipe"); }, ErrorCode::Io, {"pipe", "not a regular file"});
}

TEST(File, RefusesNulInPath) {
  TempDir dir;
  dir.write("a", "x");
  const std::string tricky = (dir / "a").string() + std::string("\0b", 2);
  expect_error([&] { File::open(tricky); }, ErrorCode::Io, {"NUL"});
  expect_error([&] { write_text(tricky, "y"); }, ErrorCode::Io, {"NUL"});
  EXPECT_EQ(slurp(dir / "a"), "x");
}

TEST(File, TruncatedAfterOpening) {
  TempDir dir;
  const File file = File::open(dir.write("shrinking.bin", std::string(1000, 'x')));
  std::filesystem::resize_file(file.path(), 300);
  EXPECT_EQ(read_at(file, 100, 200), std::string(200, 'x'));
  expect_error([&] { read_at(file, 100, 500); }, ErrorCode::Io,
               {"shrinking.bin", "ends early", "300 of the 500 bytes", "offset 100"});
}

TEST(File, OffsetBeyondTheEnd) {
  TempDir dir;
  const File file = File::open(dir.write("a.bin", "abc"));
  expect_error([&] { read_at(file, 3, 1); }, ErrorCode::Io, {"a.bin", "offset 3", "1 of the 1 bytes"});
  expect_error([&] { read_at(file, 1ull << 40, 8); }, ErrorCode::Io, {"a.bin", "offset 1099511627776"});
  expect_error([&] { read_at(file, UINT64_MAX, 8); }, ErrorCode::Io, {"a.bin", "18446744073709551615"});
  expect_error([&] { read_at(file, INT64_MAX, 8); }, ErrorCode::Io, {"a.bin", "9223372036854775807"});
}

TEST(ReadTextFile, WholeFileUpToTheLimit) {
  TempDir dir;
  EXPECT_EQ(read_text_file(dir.write("a.txt", "hello"), 5), "hello");
  EXPECT_EQ(read_text_file(dir.write("empty.txt", ""), 0), "");
  expect_error([&] { read_text_file(dir / "a.txt", 4); }, ErrorCode::InvalidModel,
               {"a.txt", "too large", "5 bytes", "at most 4"});
  expect_error([&] { read_text_file(dir / "none.txt", 4); }, ErrorCode::Io, {"none.txt"});
}

TEST(WriteFileAtomically, PartsInOrderAndNoTemporaryLeft) {
  TempDir dir;
  const std::vector<std::span<const std::byte>> parts{bytes_of("ab"), bytes_of(""), bytes_of("cde")};
  write_file_atomically(dir / "out.bin", parts);
  EXPECT_EQ(slurp(dir / "out.bin"), "abcde");
  write_text(dir / "out.bin", "new");
  EXPECT_EQ(slurp(dir / "out.bin"), "new");
  EXPECT_EQ(list_folder(dir.path()), std::vector<std::string>{"out.bin"});
}

TEST(WriteFileAtomically, ReaderOfTheOldFileKeepsIt) {
  TempDir dir;
  write_text(dir / "out.bin", "old content");
  const File old = File::open(dir / "out.bin");
  write_text(dir / "out.bin", "new");
  EXPECT_EQ(read_at(old, 0, 11), "old content");
}

TEST(WriteFileAtomically, LeftoverTemporaryOfACrashIsNotReused) {
  TempDir dir;
  const std::string leftover = fmt::format(".out.bin.{}-0.tmp", ::getpid());
  dir.write(leftover, "left");
  write_text(dir / "out.bin", "x");
  EXPECT_EQ(slurp(dir / leftover), "left");
  EXPECT_EQ(slurp(dir / "out.bin"), "x");
}

TEST(WriteFileAtomically, FailuresLeaveNothingBehind) {
  TempDir dir;
  expect_error([&] { write_text(dir / "none/out.bin", "x"); }, ErrorCode::Io, {"none/out.bin"});
  // A folder in the way: everything up to the rename works.
  dir.write("target/inside", "kept");
  expect_error([&] { write_text(dir / "target", "x"); }, ErrorCode::Io, {"target", "cannot replace"});
  EXPECT_EQ(slurp(dir / "target/inside"), "kept");
  EXPECT_EQ(list_folder(dir.path()), std::vector<std::string>{"target"});
  expect_error([&] { write_text("", "x"); }, ErrorCode::Io, {"names no file"});
}

// The size limit of the process stands in for a full disk: the write fails half-way.
TEST(WriteFileAtomically, FullDiskLeavesTheOldFile) {
  TempDir dir;
  write_text(dir / "out.bin", "old");
  rlimit saved{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &saved), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = saved;
  small.rlim_cur = 1000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error([&] { write_text(dir / "out.bin", std::string(5000, 'n')); }, ErrorCode::Io,
               {"out.bin", "writing failed"});
  ::setrlimit(RLIMIT_FSIZE, &saved);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(slurp(dir / "out.bin"), "old");
  EXPECT_EQ(list_folder(dir.path()), std::vector<std::string>{"out.bin"});
}

TEST(PathKind, TellsWhatIsThere) {
  TempDir dir;
  dir.write("file", "x");
  std::filesystem::create_symlink(dir / "file", dir / "link");
  std::filesystem::create_symlink(dir / "gone", dir / "dangling");
  EXPECT_EQ(path_kind(dir / "file"), PathKind::File);
  EXPECT_EQ(path_kind(dir / "link"), PathKind::File);
  EXPECT_EQ(path_kind(dir.path()), PathKind::Folder);
  EXPECT_EQ(path_kind(dir / "none"), PathKind::Missing);
  EXPECT_EQ(path_kind(dir / "dangling"), PathKind::Missing);
  EXPECT_EQ(path_kind(dir / "file/below"), PathKind::Missing);
  EXPECT_EQ(path_kind("/dev/null"), PathKind::Other);
  expect_error([&] { path_kind(dir / std::string(5000, 'n')); }, ErrorCode::Io, {"too long"});
}

TEST(ListFolder, SortedAndBounded) {
  TempDir dir;
  for (const char* name : {"c", "a", "b"}) dir.write(name, "");
  EXPECT_EQ(list_folder(dir.path()), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(list_folder(dir.path(), 2).size(), 2u);
  expect_error([&] { list_folder(dir / "none"); }, ErrorCode::Io, {"none"});
}

}  // namespace
}  // namespace moeflux::io
