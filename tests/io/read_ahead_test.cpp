#include "io/read_ahead.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::io {
namespace {

std::string noise(std::size_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::string out(n, '\0');
  for (char& c : out) c = static_cast<char>(random());
  return out;
}

std::string as_text(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

class ReadAheadTest : public testing::TestWithParam<ReaderKind> {
 protected:
  const test::TempDir dir_;
  const std::vector<std::string> content_{noise(300'001, 1), noise(77'777, 2)};
  const std::vector<std::filesystem::path> files_{dir_.write("a", content_[0]), dir_.write("b", content_[1])};

  ReadAheadOptions options(std::uint64_t job_bytes, std::uint64_t memory) const {
    ReadAheadOptions o{.job_bytes = job_bytes, .memory_bytes = memory};
    o.reader.kind = GetParam();
    return o;
  }
};

// Far more jobs than fit in memory, of one to three parts at any byte of either file.
TEST_P(ReadAheadTest, JobsComeInOrderWithTheirBytes) {
  std::mt19937 random(3);
  std::vector<std::vector<ReadPart>> jobs;
  for (int i = 0; i < 300; ++i) {
    auto& job = jobs.emplace_back();
    std::uint64_t window = 0;
    for (std::size_t p = 0; p < 1 + random() % 3; ++p) {
      const std::uint32_t file = random() % 2;
      const std::uint64_t offset = random() % content_[file].size();
      const std::uint64_t bytes = std::min<std::uint64_t>(random() % 20'000, content_[file].size() - offset);
      job.push_back({file, offset, bytes, window});
      window += aligned_window(offset, bytes).bytes;
    }
  }
  jobs[7].clear();  // nothing to read is in order too
  std::size_t asked = 0;
  ReadAhead reads(files_, options(96 << 10, 400 << 10), [&](std::vector<ReadPart>& parts) {
    if (asked == jobs.size()) return false;
    parts = jobs[asked++];
    return true;
  });
  ReadAhead::Job job;
  for (const auto& want : jobs) {
    ASSERT_TRUE(reads.next(job));
    ASSERT_EQ(job.status, 0);
    ASSERT_EQ(job.parts.size(), want.size());
    for (std::size_t p = 0; p < want.size(); ++p) {
      ASSERT_EQ(job.parts[p].offset, want[p].offset);
      EXPECT_EQ(as_text(job.data(p)), content_[want[p].file].substr(want[p].offset, want[p].bytes));
    }
    EXPECT_LE(asked, static_cast<std::size_t>(&want - jobs.data()) + 5) << "more memory in use than allowed";
  }
  EXPECT_FALSE(reads.next(job));
  EXPECT_FALSE(reads.next(job));
}

TEST_P(ReadAheadTest, AFailedJobIsNamedAndTheRestGoesOn) {
  const std::vector<ReadPart> parts{{0, 0, 100, 0}, {0, 299'990, 100, 0}, {1, 50, 100, 0}};
  std::size_t asked = 0;
  ReadAhead reads(files_, options(8192, 1 << 20), [&](std::vector<ReadPart>& out) {
    if (asked == parts.size()) return false;
    out.push_back(parts[asked++]);
    return true;
  });
  ReadAhead::Job job;
  ASSERT_TRUE(reads.next(job));
  EXPECT_EQ(job.status, 0);
  ASSERT_TRUE(reads.next(job));
  EXPECT_EQ(job.status, ReadAhead::kEnded);
  EXPECT_EQ(job.parts[job.failed].offset, 299'990u);
  ASSERT_TRUE(reads.next(job));
  EXPECT_EQ(job.status, 0);
  EXPECT_EQ(as_text(job.data(0)), content_[1].substr(50, 100));
  EXPECT_FALSE(reads.next(job));
}

// A part without room fails; nothing is written beside the job's memory.
TEST_P(ReadAheadTest, PartsMustFit) {
  for (const ReadPart& part : {ReadPart{0, 0, 8193, 0}, ReadPart{0, 4000, 8192, 0}, ReadPart{0, 0, 4096, 8192}, ReadPart{7, 0, 1, 0}}) {
    bool asked = false;
    ReadAhead reads(files_, options(8192, 1 << 20), [&](std::vector<ReadPart>& out) {
      out.push_back(part);
      return !std::exchange(asked, true);
    });
    ReadAhead::Job job;
    ASSERT_TRUE(reads.next(job));
    EXPECT_EQ(job.status, EINVAL);
  }
}

INSTANTIATE_TEST_SUITE_P(Readers, ReadAheadTest, testing::Values(ReaderKind::Auto, ReaderKind::Pread),
                         [](const auto& param) { return std::string(reader_kind_name(param.param)); });

}  // namespace
}  // namespace moeflux::io
