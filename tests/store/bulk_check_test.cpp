// Bytes with a checksum, brought into memory in bulk.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "store/bulk_load.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::store {
namespace {

// Memory that the host may not look into.
class DeviceCopier final : public Copier {
 public:
  void to_device(std::byte* device, const std::byte* host, std::size_t bytes) override { std::memcpy(device, host, bytes); }
  void to_host(std::byte* host, const std::byte* device, std::size_t bytes) override { std::memcpy(host, device, bytes); }
};

// One file; reads of a few bytes, of a block and of several blocks.
class BulkCheck : public testing::Test {
 protected:
  void SetUp() override {
    std::mt19937_64 random(5);
    content_.resize(12'000'000);
    for (char& c : content_) c = static_cast<char>(random());
    dir_.write("config.json", "{}");
    test::TensorFile file;
    file.tensors["t"] = {DType::U8, {content_.size()}, {}};
    file.tensors["t"].data.resize(content_.size());
    std::memcpy(file.tensors["t"].data.data(), content_.data(), content_.size());
    file.save(dir_ / "model.safetensors");
    const auto folder = format::ModelFolder::open(dir_.path());
    begin_ = folder.tensors()[0].info.offset;
    memory_.resize(content_.size());
    std::uint64_t at = 0;
    for (const std::uint64_t bytes : {100u, 4096u, 1'769'472u, 1'769'472u, 5'000'001u, 77u, 2'097'152u}) {
      const auto part = std::as_bytes(std::span(content_)).subspan(at, bytes);
      reads_.push_back({{0, begin_ + at, bytes}, memory_.data() + at, at, RecordCheck{digest_bytes(part, at), at}});
      at += bytes;
    }
  }
  void load(Copier& copier) {
    const auto folder = format::ModelFolder::open(dir_.path());
    BulkHooks hooks;
    hooks.describe = [](std::uint64_t id) { return "read " + std::to_string(id) + ": "; };
    bulk_load(folder, reads_, copier, hooks);
  }

  const test::TempDir dir_;
  std::string content_;
  std::uint64_t begin_ = 0;
  std::vector<std::byte> memory_;
  std::vector<BulkRead> reads_;
  HostCopier host_;
  DeviceCopier device_;
};

TEST_F(BulkCheck, WhatPassesIsInPlace) {
  for (Copier* copier : {static_cast<Copier*>(&host_), static_cast<Copier*>(&device_)}) {
    std::fill(memory_.begin(), memory_.end(), std::byte{0});
    load(*copier);
    for (const BulkRead& r : reads_) EXPECT_EQ(std::memcmp(r.to, content_.data() + r.id, r.source.bytes), 0) << r.id;
  }
}

// One bit at the start, the end or in between of each read.
TEST_F(BulkCheck, EachDamagedReadIsNamed) {
  const auto reads = reads_;
  for (const BulkRead& bad : reads)
    for (const std::uint64_t at : {std::uint64_t{0}, bad.source.bytes / 2, bad.source.bytes - 1}) {
      std::fstream file(dir_ / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
      const auto turn = [&](char mask) {
        file.seekp(static_cast<std::streamoff>(bad.source.offset + at));
        file.put(static_cast<char>(content_[bad.id + at] ^ mask));
        file.flush();
      };
      turn(0x10);
      for (Copier* copier : {static_cast<Copier*>(&host_), static_cast<Copier*>(&device_)})
        test::expect_error([&] { load(*copier); }, ErrorCode::InvalidModel,
                           {"model.safetensors", "read " + std::to_string(bad.id) + ":", "offset " + std::to_string(bad.source.offset), "checksum"});
      turn(0);
    }
  EXPECT_NO_THROW(load(host_));
}

}  // namespace
}  // namespace moeflux::store
