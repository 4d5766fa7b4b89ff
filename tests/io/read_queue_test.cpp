// The cases no real disk gives on demand: errors, interruptions, short reads in the middle.
#include "io/read_queue.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "io/region.h"
#include "support/fault_reader.h"
#include "support/manual_reader.h"
#include "support/temp_dir.h"

namespace moeflux::io {
namespace {

using test::Fault;
using test::FaultReader;
using test::ManualReader;
using test::TempDir;

class Queue : public testing::Test {
 protected:
  static ReaderOptions options() {
    ReaderOptions o;
    o.piece_bytes = 8192;
    o.max_requests = 8;
    o.hint_depth = 1;
    return o;
  }
  ReadCompletion only_completion() {
    ReadCompletion out[2];
    EXPECT_EQ(queue_.take(out), 1u);
    return out[0];
  }
  ReadRequest request(std::uint64_t offset, std::uint64_t bytes, std::uint64_t tag = 0,
                      ReadPriority priority = ReadPriority::Demand) {
    return {0, priority, offset, bytes, region_.data() + tag * 65536, tag};
  }
  void add(const ReadRequest& r) { ASSERT_EQ(queue_.submit({&r, 1}), 0); }

  Region region_ = Region::allocate(1 << 20);
  ReadQueue queue_{options(), 1, {region_.span()}, 3};
};

TEST_F(Queue, CutsAtPieces) {
  add(request(5000, 20'000));  // blocks 4096 .. 28672: 24576 bytes in three pieces
  ReadPiece* pieces[3];
  for (std::uint64_t i = 0; i < 3; ++i) {
    pieces[i] = queue_.next();
    ASSERT_NE(pieces[i], nullptr);
    EXPECT_EQ(pieces[i]->offset, 4096 + i * 8192);
    EXPECT_EQ(pieces[i]->bytes(), 8192u);
    EXPECT_EQ(pieces[i]->target, region_.data() + i * 8192);
  }
  EXPECT_EQ(queue_.next(), nullptr);
  for (const int i : {2, 0, 1}) EXPECT_FALSE(queue_.finish(pieces[i], 8192));
  EXPECT_EQ(only_completion().bytes, 20'000u);
}

TEST_F(Queue, GoesOnAfterAShortReadAtTheBlock) {
  add(request(100, 8000));
  ReadPiece* const piece = queue_.next();
  EXPECT_TRUE(queue_.finish(piece, 5000));
  EXPECT_EQ(piece->offset, 4096u);
  EXPECT_EQ(piece->target, region_.data() + 4096);
  EXPECT_EQ(piece->end, 8192u);
  EXPECT_TRUE(queue_.finish(piece, 2000));  // 6096: progress
  EXPECT_EQ(piece->offset, 4096u);
  EXPECT_FALSE(queue_.finish(piece, 4004));  // 8100: all that was wanted, though not all of the block
  const ReadCompletion c = only_completion();
  EXPECT_EQ(c.status, 0);
  EXPECT_EQ(c.bytes, 8000u);
  EXPECT_EQ(queue_.stats().retries, 2u);
}

TEST_F(Queue, NoProgressIsTheEnd) {
  add(request(100, 8000));
  ReadPiece* const piece = queue_.next();
  EXPECT_TRUE(queue_.finish(piece, 5000));
  EXPECT_FALSE(queue_.finish(piece, 904));  // 5000 again
  const ReadCompletion c = only_completion();
  EXPECT_EQ(c.status, 0);
  EXPECT_EQ(c.bytes, 4900u);
  EXPECT_EQ(queue_.stats().short_reads, 1u);
}

TEST_F(Queue, RetriesWhatPasses) {
  add(request(0, 4096));
  ReadPiece* const piece = queue_.next();
  EXPECT_TRUE(queue_.finish(piece, -EINTR));
  EXPECT_TRUE(queue_.finish(piece, -EAGAIN));
  EXPECT_TRUE(piece->retried);
  EXPECT_FALSE(queue_.finish(piece, 4096));
  EXPECT_EQ(only_completion().status, 0);
  EXPECT_EQ(queue_.stats().retries, 2u);
}

TEST_F(Queue, WhatNeverPassesIsAnError) {
  add(request(0, 4096));
  ReadPiece* const piece = queue_.next();
  int n = 0;
  while (queue_.finish(piece, -EAGAIN)) ASSERT_LT(++n, 1'000'000);
  EXPECT_EQ(only_completion().status, EAGAIN);
}

TEST_F(Queue, FirstErrorInTheFileWinsAndTheRestIsNotRead) {
  add(request(0, 40'960));  // five pieces, three at a time
  ReadPiece* const a = queue_.next();
  ReadPiece* const b = queue_.next();
  ReadPiece* const c = queue_.next();
  EXPECT_FALSE(queue_.finish(c, -ENXIO));
  EXPECT_EQ(queue_.next(), nullptr) << "pieces four and five cannot help";
  EXPECT_FALSE(queue_.finish(b, -EIO));
  EXPECT_EQ(queue_.outstanding(), 1u);
  EXPECT_FALSE(queue_.finish(a, 8192));
  const ReadCompletion done = only_completion();
  EXPECT_EQ(done.status, EIO);
  EXPECT_EQ(done.bytes, 0u);
  EXPECT_EQ(queue_.stats().failed, 1u);
  EXPECT_EQ(queue_.outstanding(), 0u);
}

TEST_F(Queue, DemandBeforeHintsAndFewHintsAtOnce) {
  add(request(0, 16'384, 1, ReadPriority::Hint));
  add(request(0, 8192, 2, ReadPriority::Hint));
  ReadPiece* const hint = queue_.next();
  ASSERT_NE(hint, nullptr);
  EXPECT_EQ(hint->target, region_.data() + 65536);
  EXPECT_EQ(queue_.next(), nullptr) << "one hint at a time";
  add(request(0, 8192, 3));
  ReadPiece* const demand = queue_.next();
  ASSERT_NE(demand, nullptr);
  EXPECT_EQ(demand->target, region_.data() + 3 * 65536);
  EXPECT_EQ(queue_.promote(2), 1u);
  ReadPiece* const promoted = queue_.next();
  ASSERT_NE(promoted, nullptr);
  EXPECT_EQ(promoted->target, region_.data() + 2 * 65536);
  // The first hint is half issued: cancelled, it completes when its piece is back.
  EXPECT_EQ(queue_.cancel_hints(nullptr), 1u);
  EXPECT_FALSE(queue_.has_completions());
  EXPECT_FALSE(queue_.finish(hint, 8192));
  const ReadCompletion c = only_completion();
  EXPECT_EQ(c.tag, 1u);
  EXPECT_EQ(c.status, ECANCELED);
  EXPECT_FALSE(queue_.finish(demand, 8192));
  EXPECT_FALSE(queue_.finish(promoted, 8192));
  EXPECT_EQ(queue_.outstanding(), 0u);
}

TEST_F(Queue, DropsWhatIsQueued) {
  add(request(0, 40'960, 1));
  add(request(0, 8192, 2));
  ReadPiece* const piece = queue_.next();
  queue_.drop_queued();
  EXPECT_EQ(queue_.next(), nullptr);
  EXPECT_EQ(queue_.outstanding(), 1u);
  EXPECT_FALSE(queue_.finish(piece, 8192));
  EXPECT_EQ(queue_.outstanding(), 0u);
}

class Doubles : public testing::Test {
 protected:
  Doubles() {
    for (std::size_t i = 0; i < text_.size(); ++i) text_[i] = static_cast<char>(i * 7 >> 2);
    path_ = dir_.write("f", text_);
  }
  ReadRequest request(std::uint64_t offset, std::uint64_t bytes, std::uint64_t tag) {
    return {0, ReadPriority::Demand, offset, bytes, region_.data() + tag * 65536, tag};
  }
  std::string data(const ReadRequest& r, std::uint64_t bytes) {
    return {reinterpret_cast<const char*>(r.window) + aligned_window(r.offset, bytes).skew,
            static_cast<std::size_t>(bytes)};
  }

  TempDir dir_;
  std::string text_ = std::string(100'000, '\0');
  std::filesystem::path path_;
  Region region_ = Region::allocate(1 << 20);
};

TEST_F(Doubles, ManualReaderKeepsTheOrderOfTheTest) {
  ManualReader reader({&path_, 1});
  const ReadRequest requests[3] = {request(1, 10, 0), request(5000, 5000, 1), request(99'990, 100, 2)};
  ASSERT_EQ(reader.submit(requests), 0);
  ReadCompletion out[4];
  EXPECT_EQ(reader.poll(out), 0u);
  EXPECT_EQ(reader.wait(out, std::chrono::milliseconds(1)), 0u);
  reader.complete(2);
  reader.fail(0, EIO);
  ASSERT_EQ(reader.wait(out, std::chrono::seconds(1)), 2u);
  EXPECT_EQ(out[0].tag, 2u);
  EXPECT_EQ(out[0].bytes, 10u);
  EXPECT_EQ(data(requests[2], 10), text_.substr(99'990));
  EXPECT_EQ(out[1].status, EIO);
  std::thread later([&] { reader.complete(0, 123); });
  ASSERT_EQ(reader.wait(out, std::chrono::seconds(30)), 1u);
  later.join();
  EXPECT_EQ(out[0].tag, 1u);
  EXPECT_EQ(out[0].bytes, 123u);
  EXPECT_EQ(data(requests[1], 123), text_.substr(5000, 123));
}

TEST_F(Doubles, ManualReaderWithAChooserNeedsNobodyElse) {
  ManualReader reader({&path_, 1}, [](std::span<const ReadRequest> pending) { return pending.size() - 1; });
  const ReadRequest requests[3] = {request(1, 10, 0), request(5000, 5000, 1), request(99, 100, 2)};
  ASSERT_EQ(reader.submit(requests), 0);
  ReadCompletion out[4];
  for (const std::uint64_t tag : {2u, 1u, 0u}) {
    ASSERT_EQ(reader.wait(out, std::chrono::seconds(1)), 1u);
    EXPECT_EQ(out[0].tag, tag);
  }
  EXPECT_EQ(reader.wait(out, std::chrono::seconds(60)), 0u);
}

TEST_F(Doubles, FaultReaderDoesWhatTheRulesSay) {
  FaultReader reader(make_reader({&path_, 1}, {region_.span()}, {.kind = ReaderKind::Pread}));
  const auto tagged = [](std::uint64_t tag) { return [tag](const ReadRequest& r) { return r.tag == tag; }; };
  reader.add({.matches = tagged(0), .error = EIO});
  reader.add({.matches = tagged(1), .keep_bytes = 7});
  reader.add({.matches = tagged(2), .flip_bit = 8 * 100 + 3});
  reader.add({.matches = tagged(3), .delay = std::chrono::milliseconds(20)});
  std::vector<ReadRequest> requests;
  for (std::uint64_t i = 0; i < 5; ++i) requests.push_back(request(1000 + i, 5000, i));
  for (int round = 0; round < 2; ++round) {
    const auto start = std::chrono::steady_clock::now();
    ASSERT_EQ(reader.submit(requests), 0);
    std::vector<ReadCompletion> done(5);
    ReadCompletion out[5];
    for (std::size_t total = 0; total < 5;) {
      const std::size_t n = reader.wait(out, std::chrono::seconds(30));
      ASSERT_NE(n, 0u);
      for (std::size_t i = 0; i < n; ++i) done[out[i].tag] = out[i];
      total += n;
    }
    const bool broken = round == 0;
    EXPECT_EQ(done[0].status, broken ? EIO : 0);
    EXPECT_EQ(done[1].bytes, broken ? 7u : 5000u);
    std::string expected = text_.substr(1002, 5000);
    if (broken) expected[100] = static_cast<char>(expected[100] ^ 8);
    EXPECT_EQ(data(requests[2], 5000), expected);
    EXPECT_EQ(data(requests[4], 5000), text_.substr(1004, 5000));
    if (broken) {
      EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(20));
    }
  }
  EXPECT_EQ(reader.n_injected(), 4u);
  EXPECT_EQ(reader.outstanding(), 0u);
}

}  // namespace
}  // namespace moeflux::io
