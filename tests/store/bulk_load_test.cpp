#include "store/bulk_load.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <vector>

#include "support/expect_error.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::store {
namespace {

// One tensor of 9 MB: several blocks and a last one that is not full.
class Bulk : public testing::Test {
 protected:
  static constexpr std::uint64_t kBytes = 9'000'001;
  Bulk() : bytes_(kBytes) {
    std::mt19937 rng(7);
    for (std::byte& b : bytes_) b = static_cast<std::byte>(rng());
    test::TensorFile file;
    file.tensors["w"] = {DType::U8, {static_cast<std::int64_t>(kBytes)}, bytes_};
    file.save(dir_ / "model.safetensors");
    dir_.write("config.json", "{}");
    folder_ = format::ModelFolder::open(dir_.path());
    begin_ = folder_.find("w")->extent().offset;
  }
  BulkRead read(std::uint64_t at, std::uint64_t n, std::byte* to, std::uint64_t id = 0) const { return {{0, begin_ + at, n}, to, id}; }

  test::TempDir dir_;
  std::vector<std::byte> bytes_;
  format::ModelFolder folder_;
  std::uint64_t begin_ = 0;
  HostCopier copier_;
};

TEST_F(Bulk, PiecesOfEverySizeInAnyOrder) {
  std::mt19937 rng(11);
  std::vector<std::byte> out(kBytes);
  std::vector<BulkRead> reads;
  for (std::uint64_t at = 0; at < kBytes;) {  // small ones, large ones, gaps
    const std::uint64_t want = rng() % 3 == 0 ? rng() % 5'000'000 : rng() % 70'000;
    const std::uint64_t n = std::min(want, kBytes - at);
    reads.push_back(read(at, n, out.data() + at));
    at += n + (rng() % 4 == 0 ? rng() % 9000 : 0);
  }
  std::vector<std::byte> expected(kBytes);
  for (const BulkRead& r : reads)
    std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(r.source.offset - begin_), r.source.bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(r.source.offset - begin_));
  std::shuffle(reads.begin(), reads.end(), rng);
  std::uint64_t last = 0, sum = 0;
  for (const BulkRead& r : reads) sum += r.source.bytes;
  BulkHooks hooks;
  hooks.progress = [&](std::uint64_t done) {
    EXPECT_GE(done, last);
    last = done;
  };
  bulk_load(folder_, reads, copier_, hooks);
  EXPECT_EQ(last, sum);
  EXPECT_TRUE(out == expected);
}

TEST_F(Bulk, TheSameBytesToTwoPlaces) {
  std::vector<std::byte> a(3'000'000), b(3'000'000);
  std::vector<BulkRead> reads = {read(5, a.size(), a.data()), read(5, b.size(), b.data())};
  bulk_load(folder_, reads, copier_);
  EXPECT_TRUE(a == b);
  EXPECT_TRUE(std::equal(a.begin(), a.end(), bytes_.begin() + 5));
}

TEST_F(Bulk, NothingToDo) {
  std::vector<BulkRead> reads;
  bulk_load(folder_, reads, copier_);
  reads.push_back(read(0, 0, nullptr));
  bulk_load(folder_, reads, copier_);
}

TEST_F(Bulk, AFileCutShortNamesTheReadThatLacksBytes) {
  std::filesystem::resize_file(dir_ / "model.safetensors", begin_ + 7'000'000);
  std::vector<std::byte> out(kBytes);
  std::vector<BulkRead> reads = {read(0, 6'000'000, out.data(), 1), read(6'000'000, 1'500'000, out.data() + 6'000'000, 2)};
  BulkHooks hooks;
  hooks.describe = [](std::uint64_t id) { return "read " + std::to_string(id) + ": "; };
  test::expect_error([&] { bulk_load(folder_, reads, copier_, hooks); }, ErrorCode::Io, {"read 2: ", "model.safetensors"});
}

}  // namespace
}  // namespace moeflux::store
