#include "format/pack_index.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "core/json.h"
#include "format/model_folder.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::format {
namespace {

using quant::Format;
using test::expect_error;
using test::TempDir;

Digest some_digest(int n) { return digest_bytes(std::to_string(n)); }

PackIndex example() {
  PackIndex index;
  index.writer = "moeflux test";
  index.files = {{"config.json", 17, some_digest(1)}, {"tokenizer.json", 0, some_digest(2)}};
  index.trunk_bytes = 1000;
  index.trunk_header_bytes = 200;
  index.trunk_header = some_digest(3);
  index.trunk = {some_digest(4), some_digest(5), some_digest(6)};
  const PackMatrix wide{Format::affine(4, 64, DType::BF16), 64, 128}, tall{Format::mxfp4(), 128, 64};
  index.layers.push_back({1, 0, 8192, wide, wide, tall, false, {some_digest(7), some_digest(8)}});
  index.layers.push_back({4, 16384, 4096, {Format::fp8(), 8, 130}, {Format::bf16(), 8, 130}, {Format::f32(), 130, 8}, true, {some_digest(9)}});
  index.experts_bytes = 20480;
  return index;
}

class PackIndexTest : public testing::Test {
 protected:
  PackIndex read(std::string_view bytes) const {
    const io::File file = io::File::open(dir_.write("pack.index", bytes));
    std::filesystem::remove(file.path());  // replacing one by one is slow where a file system flushes what replaces
    return read_pack_index(file);
  }

  // The index with its text changed and its checksum made right again: what an adversary would write.
  std::string with_text(const std::function<void(Json&)>& change) const {
    std::string bytes = write_pack_index(example());
    std::uint32_t n = 0;
    std::memcpy(&n, bytes.data() + 12, 4);
    Json json = parse_json(std::string_view(bytes).substr(32, n), "index");
    change(json);
    return sealed(bytes.substr(0, 16), json.dump(), bytes.substr(32 + n));
  }
  static std::string sealed(std::string start, std::string text, const std::string& table) {
    text.resize((text.size() + 15) / 16 * 16, ' ');
    const auto n = static_cast<std::uint32_t>(text.size());
    std::memcpy(start.data() + 12, &n, 4);
    const Digest d = DigestStream().add(std::as_bytes(std::span(start))).add(std::as_bytes(std::span(text))).add(std::as_bytes(std::span(table))).digest();
    return start + std::string(reinterpret_cast<const char*>(d.bytes.data()), 16) + text + table;
  }
  void refused(const std::function<void(Json&)>& change, const std::vector<std::string>& fragments, ErrorCode code = ErrorCode::InvalidModel) const {
    expect_error([&] { read(with_text(change)); }, code, fragments);
  }

  const TempDir dir_;
};

TEST_F(PackIndexTest, ReadsWhatItWrites) {
  EXPECT_EQ(read(write_pack_index(example())), example());
  EXPECT_EQ(read(with_text([](Json&) {})), example());
  EXPECT_EQ(example().n_records(), 3u);
}

// Byte by byte what docs/format.md says.
TEST_F(PackIndexTest, Layout) {
  const std::string bytes = write_pack_index(example());
  EXPECT_EQ(bytes.substr(0, 12), std::string("MFLXPACK\1\0\0\0", 12));
  std::uint32_t n = 0;
  std::memcpy(&n, bytes.data() + 12, 4);
  EXPECT_EQ(n % 16, 0u);
  EXPECT_EQ(bytes.size(), 32 + n + 6 * 16);
  EXPECT_EQ(std::memcmp(bytes.data() + 32 + n, some_digest(4).bytes.data(), 16), 0);
  EXPECT_EQ(std::memcmp(bytes.data() + bytes.size() - 16, some_digest(9).bytes.data(), 16), 0);
  const Digest own = DigestStream()
                         .add(std::as_bytes(std::span(bytes).first(16)))
                         .add(std::as_bytes(std::span(bytes).subspan(32)))
                         .digest();
  EXPECT_EQ(std::memcmp(bytes.data() + 16, own.bytes.data(), 16), 0);
}

TEST_F(PackIndexTest, SeedsBindModelLayerAndExpert) {
  const std::uint64_t seed = record_seed(some_digest(1), 2, 3);
  EXPECT_NE(record_seed(some_digest(2), 2, 3), seed);
  EXPECT_NE(record_seed(some_digest(1), 3, 2), seed);
  EXPECT_NE(record_seed(some_digest(1), 2, 4), seed);
  PackIndex other = example();
  other.files[0].digest = some_digest(77);
  EXPECT_NE(other.model_id(), example().model_id());
  other = example();
  other.trunk[1] = some_digest(77);
  EXPECT_NE(other.model_id(), example().model_id());
}

TEST_F(PackIndexTest, RefusesWhatDoesNotFit) {
  const auto layer = [](Json& j, std::size_t i) -> Json& { return j["experts"]["layers"][i]; };
  refused([](Json& j) { j.erase("writer"); }, {"writer"});
  refused([](Json& j) { j["model"] = std::string(32, '0'); }, {"model"});
  refused([](Json& j) { j["files"][1]["name"] = "../x"; }, {"plain file name"});
  refused([](Json& j) { j["files"][1]["name"] = "a/b"; }, {"plain file name"});
  refused([](Json& j) { j["files"][1]["name"] = "config.json"; }, {"twice"});
  refused([](Json& j) { j["files"].erase(0); }, {"config.json"});
  refused([](Json& j) { j["files"] = 3; }, {"files"});
  refused([](Json& j) { j["trunk"]["tensors"] = 4; }, {"checksum"});
  refused([](Json& j) { j["trunk"]["tensors"] = 2'000'000'000; }, {"checksums"});
  refused([](Json& j) { j["trunk"]["tensors"] = 2; }, {"belong to nothing"});
  refused([](Json& j) { j["trunk"]["header_bytes"] = 1001; }, {"header"});
  refused([](Json& j) { j["trunk"]["header_xxh3_128"] = "12"; }, {"hex"});
  refused([](Json& j) { j["experts"]["bytes"] = 20481; }, {"20481"});
  refused([](Json& j) { j["experts"]["bytes"] = -1; }, {"bytes"});
  refused([&](Json& j) { layer(j, 1)["layer"] = 1; }, {"layers[1]", "layer"});
  refused([&](Json& j) { layer(j, 0)["record_bytes"] = 8000; }, {"layers[0]", "4096"});
  refused([&](Json& j) { layer(j, 0)["record_bytes"] = 0; }, {"4096"});
  refused([&](Json& j) { layer(j, 0)["record_bytes"] = std::int64_t{1} << 60; }, {"do not follow"});
  refused([&](Json& j) { layer(j, 0)["record_bytes"] = 1e30; }, {"record_bytes"});
  refused([&](Json& j) { layer(j, 1)["offset"] = 8192; }, {"do not follow"});
  refused([&](Json& j) { layer(j, 1)["experts"] = 0; }, {"experts"});
  refused([&](Json& j) { layer(j, 0)["experts"] = 65536; }, {"experts"});
  refused([&](Json& j) { layer(j, 0)["gate"]["rows"] = 0; }, {"gate", "rows"});
  refused([&](Json& j) { layer(j, 0)["gate"]["cols"] = std::int64_t{1} << 40; }, {"cols"});
  refused([&](Json& j) { layer(j, 0)["gate"]["scales"] = "X"; }, {"scales"});
  refused([&](Json& j) { layer(j, 0)["gate"]["format"] = "q4_k"; }, {"q4_k"}, ErrorCode::Unsupported);
  refused([&](Json& j) { layer(j, 0)["gate"]["bits"] = 7; }, {"7 bits"}, ErrorCode::Unsupported);
  refused([&](Json& j) { layer(j, 0).erase("biases"); }, {"biases"});
}

TEST_F(PackIndexTest, RefusesOtherFiles) {
  const std::string good = write_pack_index(example());
  expect_error([&] { read(""); }, ErrorCode::InvalidModel, {"0 bytes"});
  expect_error([&] { read(good.substr(0, 31)); }, ErrorCode::InvalidModel, {"31 bytes"});
  expect_error([&] { read(std::string(100, 'x')); }, ErrorCode::InvalidModel, {"not the index"});
  std::string later = good;
  later[8] = 2;
  expect_error([&] { read(later); }, ErrorCode::Unsupported, {"version 2"});
  expect_error([&] { read(good + std::string(16, '\0')); }, ErrorCode::InvalidModel, {"checksum"});
  expect_error([&] { read(sealed(good.substr(0, 16), "{", "")); }, ErrorCode::InvalidModel, {"JSON"});
  expect_error([&] { read(sealed(good.substr(0, 16), "[]", "")); }, ErrorCode::InvalidModel, {"object"});
  expect_error([&] { read(sealed(good.substr(0, 16), std::string(2 << 20, ' '), "")); }, ErrorCode::InvalidModel, {"does not fit"});
}

// Random damage under a right checksum: refused, or read as something whose parts fit each other.
TEST_F(PackIndexTest, Fuzz) {
  const std::string good = write_pack_index(example());
  std::uint32_t n = 0;
  std::memcpy(&n, good.data() + 12, 4);
  const std::string start = good.substr(0, 16), table = good.substr(32 + n);
  std::mt19937_64 random(11);
  const auto pick = [&](std::size_t m) { return static_cast<std::size_t>(random() % m); };
  const std::string telling("{}[]\",:0123456789-.eE\\ \0\xFF", 25);
  int opened = 0, refused = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string text = good.substr(32, n), digests = table;
    for (std::size_t k = 1 + pick(4); k > 0; --k) text[pick(text.size())] = round % 2 == 0 ? telling[pick(telling.size())] : static_cast<char>(random());
    if (round % 16 == 0) text.resize(pick(text.size()));
    if (round % 8 == 0) {  // a number anywhere becomes another
      const std::size_t at = text.find_first_of("0123456789", pick(text.size()));
      if (at != std::string::npos) text.replace(at, 1, std::to_string(random() >> pick(64)));
    }
    if (round % 32 == 0) digests.resize(pick(digests.size() + 1));
    try {
      const PackIndex index = read(sealed(start, text, digests));
      ++opened;
      std::uint64_t end = 0;
      for (const PackLayer& l : index.layers) {
        EXPECT_EQ(l.offset, end);
        end += l.bytes();
      }
      EXPECT_EQ(end, index.experts_bytes);
    } catch (const Error& e) {
      ++refused;
      EXPECT_NE(std::string(e.what()), "");
    }
  }
  EXPECT_GT(opened, 10) << "some damage (a letter of the writer's name) is not visible";
  EXPECT_GT(refused, 3000);
  for (int round = 0; round < 2000; ++round) {  // without mending the checksum nothing passes
    std::string bytes = good;
    bytes[pick(bytes.size())] ^= static_cast<char>(1 << pick(8));
    EXPECT_THROW(read(bytes), Error);
    bytes = good.substr(0, pick(good.size()));
    EXPECT_THROW(read(bytes), Error);
  }
}

}  // namespace
}  // namespace moeflux::format
