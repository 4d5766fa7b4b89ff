#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "io/async_reader.h"
#include "io/region.h"
#include "support/expect_error.h"
#include "support/fault_reader.h"
#include "support/manual_reader.h"
#include "support/temp_dir.h"

namespace moeflux::io {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::Fault;
using test::FaultReader;
using test::ManualReader;
using test::TempDir;

std::string random_text(std::size_t n, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::string text(n, '\0');
  for (std::size_t i = 0; i + 8 <= n; i += 8) {
    const std::uint64_t v = rng();
    std::memcpy(text.data() + i, &v, 8);
  }
  for (std::size_t i = n / 8 * 8; i < n; ++i) text[i] = static_cast<char>(rng());
  return text;
}

std::string at(const std::byte* window, std::uint64_t offset, std::uint64_t bytes) {
  return {reinterpret_cast<const char*>(window) + aligned_window(offset, bytes).skew,
          static_cast<std::size_t>(bytes)};
}

// Waits until all outstanding requests are back.
std::vector<ReadCompletion> drain(AsyncReader& reader) {
  std::vector<ReadCompletion> all;
  ReadCompletion out[7];
  while (const std::size_t n = reader.wait(out, seconds(30))) all.insert(all.end(), out, out + n);
  EXPECT_EQ(reader.outstanding(), 0u);
  return all;
}

ReaderOptions options_of(ReaderKind kind) {
  ReaderOptions options;
  options.kind = kind;
  options.piece_bytes = 16 * 1024;
  options.depth = 8;
  options.n_threads = 4;
  options.max_requests = 256;
  return options;
}

TEST(AlignedWindow, EnclosesTheBytes) {
  for (const std::uint64_t offset : {0ull, 1ull, 4095ull, 4096ull, 4097ull, 123456789ull})
    for (const std::uint64_t bytes : {1ull, 2ull, 4095ull, 4096ull, 4097ull, 1000000ull}) {
      const AlignedWindow w = aligned_window(offset, bytes);
      EXPECT_EQ(w.offset % kDirectAlign, 0u);
      EXPECT_EQ(w.bytes % kDirectAlign, 0u);
      EXPECT_EQ(w.offset + w.skew, offset);
      EXPECT_LT(w.skew, kDirectAlign);
      EXPECT_GE(w.offset + w.bytes, offset + bytes);
      EXPECT_LT(w.offset + w.bytes, offset + bytes + kDirectAlign);
    }
}

class Reader : public testing::TestWithParam<ReaderKind> {
 protected:
  void SetUp() override {
    contents_ = {random_text(1'000'003, 1), random_text(65536, 2), random_text(5, 3), ""};
    for (std::size_t i = 0; i < contents_.size(); ++i)
      paths_.push_back(dir_.write("f" + std::to_string(i), contents_[i]));
    region_ = Region::allocate(8 << 20);
    probe_ = probe_reader(paths_[0]);
    if (GetParam() == ReaderKind::Uring && !probe_.uring) GTEST_SKIP() << probe_.note;
  }
  std::unique_ptr<AsyncReader> make(const ReaderOptions& options) {
    return make_reader(paths_, {region_.span()}, options);
  }
  std::unique_ptr<AsyncReader> make() { return make(options_of(GetParam())); }
  std::byte* window(std::size_t i, std::size_t stride = 128 * 1024) { return region_.data() + i * stride; }

  TempDir dir_;
  std::vector<std::string> contents_;
  std::vector<std::filesystem::path> paths_;
  Region region_;
  ReaderProbe probe_;
};

INSTANTIATE_TEST_SUITE_P(Kinds, Reader, testing::Values(ReaderKind::Uring, ReaderKind::Pread),
                         [](const auto& p) { return std::string(reader_kind_name(p.param)); });

TEST_P(Reader, SaysWhatItIs) {
  const auto reader = make();
  const ReaderInfo info = reader->info();
  EXPECT_EQ(info.kind, GetParam());
  EXPECT_EQ(info.n_files, 4u);
  EXPECT_EQ(info.n_direct, probe_.direct ? 4u : 0u) << info.note;
  EXPECT_GT(info.depth, 0u);
  if (GetParam() == ReaderKind::Uring) {
    EXPECT_TRUE(info.registered_files) << info.note;
    EXPECT_TRUE(info.registered_memory || !info.note.empty());
  }
}

TEST_P(Reader, RandomPlacesAgainstTheFile) {
  for (const bool direct : {true, false})
    for (const bool registered : {true, false}) {
      ReaderOptions options = options_of(GetParam());
      options.direct = direct;
      options.register_memory = registered;
      const auto reader = make(options);
      std::mt19937_64 rng(7);
      for (int round = 0; round < 8; ++round) {
        std::vector<ReadRequest> requests;
        for (std::uint64_t i = 0; i < 60; ++i) {
          const auto file = static_cast<std::uint32_t>(rng() % 2);
          const std::uint64_t size = contents_[file].size();
          std::uint64_t offset = rng() % size;
          if (rng() % 3 == 0) offset -= offset % kDirectAlign;
          const std::uint64_t bytes = std::min<std::uint64_t>(size - offset, rng() % 120'000);
          const auto priority = rng() % 4 == 0 ? ReadPriority::Hint : ReadPriority::Demand;
          requests.push_back({file, priority, offset, bytes, window(i), i});
        }
        ASSERT_EQ(reader->submit(requests), 0);
        const std::vector<ReadCompletion> done = drain(*reader);
        ASSERT_EQ(done.size(), requests.size());
        for (const ReadCompletion& c : done) {
          const ReadRequest& r = requests.at(c.tag);
          EXPECT_EQ(c.status, 0);
          ASSERT_EQ(c.bytes, r.bytes);
          EXPECT_EQ(at(r.window, r.offset, r.bytes), contents_[r.file].substr(r.offset, r.bytes));
        }
      }
      const ReaderStats stats = reader->stats();
      EXPECT_EQ(stats.requests, 480u);
      EXPECT_EQ(stats.completed, 480u);
      EXPECT_EQ(stats.failed + stats.short_reads + stats.cancelled, 0u);
      EXPECT_GT(stats.pieces, stats.requests);
      EXPECT_GE(stats.bytes_moved, stats.bytes);
      EXPECT_GT(stats.busy_ns, 0u);
    }
}

TEST_P(Reader, EndOfFile) {
  const auto reader = make();
  const std::uint64_t size = contents_[0].size();
  const std::vector<ReadRequest> requests = {
      {0, ReadPriority::Demand, size - 100, 200, window(0), 0},     // ends inside
      {0, ReadPriority::Demand, size, 10, window(1), 1},            // at the end
      {0, ReadPriority::Demand, size + 100'000, 10, window(2), 2},  // beyond
      {2, ReadPriority::Demand, 0, 5, window(3), 3},                // exactly a file smaller than a block
      {2, ReadPriority::Demand, 3, 100'000, window(4), 4},          // pieces beyond the end
      {3, ReadPriority::Demand, 0, 1, window(5), 5},                // an empty file
      {1, ReadPriority::Demand, 65536 - 4096, 4096, window(6), 6},  // the last block, whole
      {0, ReadPriority::Demand, size - 50'000, 120'000, window(7), 7},
      {0, ReadPriority::Demand, 77, 0, nullptr, 8},  // nothing
  };
  const std::vector<std::uint64_t> expected = {100, 0, 0, 5, 2, 0, 4096, 50'000, 0};
  ASSERT_EQ(reader->submit(requests), 0);
  const std::vector<ReadCompletion> done = drain(*reader);
  ASSERT_EQ(done.size(), requests.size());
  for (const ReadCompletion& c : done) {
    const ReadRequest& r = requests.at(c.tag);
    EXPECT_EQ(c.status, 0) << c.tag;
    EXPECT_EQ(c.bytes, expected.at(c.tag)) << c.tag;
    if (c.bytes == 0) continue;
    EXPECT_EQ(at(r.window, r.offset, c.bytes), contents_[r.file].substr(r.offset, c.bytes));
  }
  EXPECT_EQ(reader->stats().short_reads, 6u);
}

TEST_P(Reader, TruncatedWhileRunning) {
  const auto reader = make();
  std::filesystem::resize_file(paths_[0], 300'000);
  const std::vector<ReadRequest> requests = {{0, ReadPriority::Demand, 250'001, 100'000, window(0), 0},
                                             {0, ReadPriority::Demand, 700'000, 1, window(1), 1},
                                             {0, ReadPriority::Demand, 10, 100'000, window(2), 2}};
  ASSERT_EQ(reader->submit(requests), 0);
  std::map<std::uint64_t, ReadCompletion> done;
  for (const ReadCompletion& c : drain(*reader)) done[c.tag] = c;
  EXPECT_EQ(done[0].status, 0);
  EXPECT_EQ(done[0].bytes, 49'999u);
  EXPECT_EQ(at(window(0), 250'001, 49'999), contents_[0].substr(250'001, 49'999));
  EXPECT_EQ(done[1].bytes, 0u);
  EXPECT_EQ(done[2].bytes, 100'000u);
  EXPECT_EQ(at(window(2), 10, 100'000), contents_[0].substr(10, 100'000));
}

TEST_P(Reader, ReplacedWhileRunningKeepsTheOldBytes) {
  const auto reader = make();
  dir_.write("new", random_text(1'000'003, 99));
  std::filesystem::rename(dir_ / "new", paths_[0]);
  const ReadRequest request{0, ReadPriority::Demand, 5000, 60'000, window(0), 1};
  ASSERT_EQ(reader->submit({&request, 1}), 0);
  ASSERT_EQ(drain(*reader).size(), 1u);
  EXPECT_EQ(at(window(0), 5000, 60'000), contents_[0].substr(5000, 60'000));
}

TEST_P(Reader, RefusesWhatCannotBe) {
  const auto reader = make();
  ReadRequest good{0, ReadPriority::Demand, 0, 4096, window(0), 0};
  const auto refused = [&](auto change) {
    ReadRequest pair[2] = {good, good};
    pair[1].window = window(1);
    change(pair[1]);
    return reader->submit(pair);
  };
  EXPECT_EQ(refused([](ReadRequest& r) { r.file = 4; }), EINVAL);
  EXPECT_EQ(refused([](ReadRequest& r) { r.window += 512; }), EINVAL);
  EXPECT_EQ(refused([](ReadRequest& r) { r.window = nullptr; }), EINVAL);
  EXPECT_EQ(
      refused([&](ReadRequest& r) { r.window = region_.data() + region_.bytes() - 4096, r.bytes = 4097; }),
      EINVAL);
  EXPECT_EQ(
      refused([&](ReadRequest& r) { r.window = region_.data() + region_.bytes() - 4096, r.offset = 1; }),
      EINVAL);
  EXPECT_EQ(refused([](ReadRequest& r) { r.offset = ~std::uint64_t{0}; }), EINVAL);
  EXPECT_EQ(refused([](ReadRequest& r) { r.bytes = ~std::uint64_t{0}; }), EINVAL);
  EXPECT_EQ(reader->outstanding(), 0u) << "all or none";
  EXPECT_EQ(refused([&](ReadRequest& r) { r.window = region_.data() + region_.bytes() - 4096; }), 0);
  EXPECT_EQ(drain(*reader).size(), 2u);

  std::vector<ReadRequest> many(257, good);
  for (ReadRequest& r : many) r.bytes = 0;
  EXPECT_EQ(reader->submit(many), EAGAIN);
  many.pop_back();
  EXPECT_EQ(reader->submit(many), 0);
  EXPECT_EQ(reader->submit({&good, 1}), EAGAIN) << "what nobody took counts";
  EXPECT_EQ(drain(*reader).size(), 256u);
  EXPECT_EQ(reader->submit({&good, 1}), 0);
  EXPECT_EQ(drain(*reader).size(), 1u);
}

TEST_P(Reader, WaitReturns) {
  const auto reader = make();
  ReadCompletion out[4];
  EXPECT_EQ(reader->poll(out), 0u);
  EXPECT_EQ(reader->wait(out, seconds(60)), 0u) << "nothing is outstanding";
  EXPECT_EQ(reader->wait(out, std::chrono::nanoseconds::max()), 0u);
  EXPECT_EQ(reader->wait(out, std::chrono::nanoseconds(0)), 0u);
  const ReadRequest request{0, ReadPriority::Demand, 0, 4096, window(0), 42};
  ASSERT_EQ(reader->submit({&request, 1}), 0);
  ASSERT_EQ(reader->wait(out, std::chrono::nanoseconds::max()), 1u);
  EXPECT_EQ(out[0].tag, 42u);
}

TEST_P(Reader, ManyThreadsSubmitAndWait) {
  ReaderOptions options = options_of(GetParam());
  options.max_requests = 64;
  const auto reader = make(options);
  constexpr int kThreads = 6, kRounds = 60;
  std::atomic<int> taken{0}, wrong{0};
  std::vector<std::atomic<bool>> busy(64);
  const auto check = [&](std::span<const ReadCompletion> done) {
    for (const ReadCompletion& c : done) {
      // The tag says what was asked for: the window and the place follow from it.
      const std::uint64_t slot = c.tag % 64, offset = c.tag / 64;
      if (c.status != 0 || c.bytes != 30'000 ||
          at(window(slot), offset, 30'000) != contents_[0].substr(offset, 30'000))
        ++wrong;
      busy[slot] = false;
      ++taken;
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::mt19937_64 rng(static_cast<unsigned>(t));
      ReadCompletion out[3];
      for (int i = 0; i < kRounds; ++i) {
        // Whoever takes a completion looks at its window; only then may the owner of the slot use it again.
        const auto slot = static_cast<std::uint64_t>(t * 10 + i % 10);
        while (busy[slot]) check({out, reader->wait(out, milliseconds(1))});
        busy[slot] = true;
        const std::uint64_t offset = rng() % 900'000;
        const ReadRequest request{0,
                                  i % 3 == 0 ? ReadPriority::Hint : ReadPriority::Demand,
                                  offset,
                                  30'000,
                                  window(slot),
                                  offset * 64 + slot};
        while (reader->submit({&request, 1}) == EAGAIN) check({out, reader->wait(out, milliseconds(1))});
        check({out, reader->poll(out)});
      }
    });
  for (std::thread& t : threads) t.join();
  check(drain(*reader));
  EXPECT_EQ(taken, kThreads * kRounds);
  EXPECT_EQ(wrong, 0);
}

TEST_P(Reader, CancelsQueuedHintsOnly) {
  ReaderOptions options = options_of(GetParam());
  options.hint_depth = 1;
  options.depth = 2;
  options.n_threads = 2;
  options.piece_bytes = 4096;
  const auto reader = make(options);
  std::vector<ReadRequest> requests;
  for (std::uint64_t i = 0; i < 40; ++i)
    requests.push_back(
        {0, i < 20 ? ReadPriority::Demand : ReadPriority::Hint, i * 20'000, 100'000, window(i), i});
  ASSERT_EQ(reader->submit(requests), 0);
  EXPECT_EQ(reader->cancel(5), 0u) << "demand reads stay";
  const std::size_t one = reader->cancel(39);
  EXPECT_LE(one, 1u);
  const std::size_t promoted = reader->promote(38);
  EXPECT_LE(promoted, 1u);
  const std::size_t n = reader->cancel_hints();
  const std::vector<ReadCompletion> done = drain(*reader);
  ASSERT_EQ(done.size(), 40u);
  std::size_t cancelled = 0;
  for (const ReadCompletion& c : done) {
    if (c.status == ECANCELED) {
      ++cancelled;
      EXPECT_GE(c.tag, 20u);
      EXPECT_NE(c.tag, promoted != 0 ? 38u : 0u);
    } else {
      EXPECT_EQ(c.status, 0);
      EXPECT_EQ(at(window(c.tag), c.tag * 20'000, c.bytes), contents_[0].substr(c.tag * 20'000, c.bytes));
    }
  }
  EXPECT_EQ(cancelled, n + one);
  EXPECT_EQ(reader->stats().cancelled, cancelled);
  EXPECT_GT(cancelled, 0u);
}

TEST_P(Reader, DestroyedWithReadsInFlight) {
  for (int round = 0; round < 20; ++round) {
    auto reader = make();
    std::vector<ReadRequest> requests;
    for (std::uint64_t i = 0; i < 60; ++i)
      requests.push_back(
          {0, i % 2 == 0 ? ReadPriority::Demand : ReadPriority::Hint, i * 1000 + 1, 100'000, window(i), i});
    ASSERT_EQ(reader->submit(requests), 0);
    ReadCompletion out[2];
    if (round % 2 == 0) reader->wait(out, seconds(1));
    reader.reset();
    // From here on nobody may write to the windows.
    std::memset(region_.data(), round, region_.bytes());
    std::this_thread::sleep_for(milliseconds(1));
    for (std::size_t i = 0; i < region_.bytes(); i += 4096)
      ASSERT_EQ(region_.data()[i], static_cast<std::byte>(round));
  }
}

TEST_P(Reader, TwoAtOnce) {
  const auto a = make();
  const auto b = make(options_of(GetParam() == ReaderKind::Uring ? ReaderKind::Pread : ReaderKind::Auto));
  std::vector<ReadRequest> ra, rb;
  for (std::uint64_t i = 0; i < 30; ++i) {
    ra.push_back({0, ReadPriority::Demand, i * 777, 50'000, window(i), i});
    rb.push_back({0, ReadPriority::Demand, i * 9999, 50'000, window(i + 30), i});
  }
  ASSERT_EQ(a->submit(ra), 0);
  ASSERT_EQ(b->submit(rb), 0);
  EXPECT_EQ(drain(*b).size(), 30u);
  EXPECT_EQ(drain(*a).size(), 30u);
  for (std::uint64_t i = 0; i < 30; ++i) {
    EXPECT_EQ(at(window(i), i * 777, 50'000), contents_[0].substr(i * 777, 50'000));
    EXPECT_EQ(at(window(i + 30), i * 9999, 50'000), contents_[0].substr(i * 9999, 50'000));
  }
}

TEST_P(Reader, SubmittingThreadMayEnd) {
  const auto reader = make();
  for (int round = 0; round < 20; ++round) {
    std::thread([&] {
      std::vector<ReadRequest> requests;
      for (std::uint64_t i = 0; i < 40; ++i)
        requests.push_back({0, ReadPriority::Demand, i * 20'000, 100'000, window(i), i});
      ASSERT_EQ(reader->submit(requests), 0);
    }).join();
    for (const ReadCompletion& c : drain(*reader)) {
      EXPECT_EQ(c.status, 0);
      EXPECT_EQ(at(window(c.tag), c.tag * 20'000, c.bytes), contents_[0].substr(c.tag * 20'000, c.bytes));
    }
  }
}

TEST_P(Reader, MissingFileAndBadOptions) {
  const std::vector<std::filesystem::path> missing = {paths_[0], dir_ / "none"};
  test::expect_error([&] { make_reader(missing, {region_.span()}, options_of(GetParam())); }, ErrorCode::Io,
                     {"none"});
  ReaderOptions options = options_of(GetParam());
  options.piece_bytes = 1000;
  test::expect_error([&] { make(options); }, ErrorCode::InvalidArgument, {"1000"});
  options = options_of(GetParam());
  options.depth = 0;
  test::expect_error([&] { make(options); }, ErrorCode::InvalidArgument, {"in flight"});
}

TEST(ReaderProbe, ReadsTmpfsOneWayOrAnother) {
  if (!std::filesystem::exists("/dev/shm")) GTEST_SKIP() << "no tmpfs at /dev/shm";
  const std::filesystem::path path = "/dev/shm/moeflux-reader-" + std::to_string(::getpid());
  const std::string text = random_text(100'000, 5);
  std::FILE* const f = std::fopen(path.c_str(), "wb");
  if (f == nullptr) GTEST_SKIP() << "cannot write to /dev/shm";
  std::fwrite(text.data(), 1, text.size(), f);
  std::fclose(f);
  const ReaderProbe probe = probe_reader(path);
  EXPECT_TRUE(probe.direct || !probe.note.empty());
  const Region region = Region::allocate(1 << 20);
  const auto reader = make_reader({&path, 1}, {region.span()}, {});
  EXPECT_EQ(reader->info().n_direct, probe.direct ? 1u : 0u);
  const ReadRequest request{0, ReadPriority::Demand, 333, 99'000, region.data(), 1};
  ASSERT_EQ(reader->submit({&request, 1}), 0);
  EXPECT_EQ(drain(*reader).at(0).bytes, 99'000u);
  EXPECT_EQ(at(region.data(), 333, 99'000), text.substr(333, 99'000));
  std::filesystem::remove(path);
}

TEST(Region, AlignedAndZero) {
  Region region = Region::allocate(3'000'000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % (2 << 20), 0u);
  EXPECT_EQ(region.bytes(), 3'000'000u);
  for (const std::byte b : region.span()) ASSERT_EQ(b, std::byte{0});
  Region other = std::move(region);
  EXPECT_EQ(region.data(), nullptr);
  EXPECT_EQ(other.bytes(), 3'000'000u);
  test::expect_error([] { Region::allocate(~std::uint64_t{0} - 100); }, ErrorCode::OutOfMemory, {"memory"});
}

}  // namespace
}  // namespace moeflux::io
