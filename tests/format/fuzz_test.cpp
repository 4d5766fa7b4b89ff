// Random damage: whatever happens to a file, opening it succeeds or throws moeflux::Error.
#include <gtest/gtest.h>
#include <moeflux/error.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "format/model_config.h"
#include "format/model_folder.h"
#include "format/raw_safetensors.h"
#include "format/safetensors.h"
#include "support/temp_dir.h"

namespace moeflux::format {
namespace {

using test::slurp;
using test::TempDir;

const std::filesystem::path kFixture =
    std::filesystem::path(MOEFLUX_SOURCE_DIR) / "tests/fixtures/qwen3_5_moe-mlx4";

struct Outcome {
  int opened = 0;
  int refused = 0;
};

std::size_t pick(std::mt19937_64& random, std::size_t n) { return static_cast<std::size_t>(random() % n); }

// Overwrites bytes of a file that exists.
void patch(std::fstream& file, std::size_t offset, std::string_view bytes) {
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.flush();
  ASSERT_TRUE(file.good());
}

template <class F>
void attempt(Outcome& outcome, F&& f) {
  try {
    f();
    ++outcome.opened;
  } catch (const Error& e) {
    ++outcome.refused;
    EXPECT_NE(std::string(e.what()), "");
  }
}

TEST(Fuzz, HeaderBytes) {
  TempDir dir;
  const std::string good = slurp(kFixture / "model.safetensors");
  const std::filesystem::path path = dir.write("model.safetensors", good);
  const SafetensorsHeader header = read_safetensors_header(io::File::open(path));
  const std::size_t header_end = header.tensors.at(0).offset;
  std::mt19937_64 random(20240607);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  Outcome outcome;
  // Structure characters and digits find more than random bytes do.
  const std::string telling("{}[]\",:0123456789-.eE\\ \0\xFF", 25);
  for (int round = 0; round < 1600; ++round) {
    std::vector<std::size_t> places(1 + pick(random, 4));
    for (std::size_t& place : places) {
      place = round % 8 == 0 ? pick(random, 8) : pick(random, header_end);
      const char c = round % 2 == 0 ? telling[pick(random, telling.size())] : static_cast<char>(random());
      patch(file, place, {&c, 1});
    }
    attempt(outcome, [&] {
      const io::File damaged = io::File::open(path);
      for (const TensorInfo& t : read_safetensors_header(damaged).tensors)
        if (t.offset > damaged.size() || t.bytes > damaged.size() - t.offset)
          ADD_FAILURE() << "extent outside the file";
    });
    for (const std::size_t place : places) patch(file, place, {&good[place], 1});
  }
  EXPECT_GT(outcome.opened, 10) << "some damage (a letter of a name) is not visible";
  EXPECT_GT(outcome.refused, 800);
  EXPECT_EQ(slurp(path), good);
}

TEST(Fuzz, Truncations) {
  TempDir dir;
  const std::string good = slurp(kFixture / "model.safetensors");
  std::mt19937_64 random(7);
  Outcome outcome;
  for (int round = 0; round < 400; ++round) {
    const std::size_t length =
        round < 40 ? static_cast<std::size_t>(round) : pick(random, round % 8 == 0 ? good.size() : 30'000);
    const std::filesystem::path path = dir.write("cut.safetensors", std::string_view(good).substr(0, length));
    attempt(outcome, [&] { read_safetensors_header(io::File::open(path)); });
  }
  EXPECT_EQ(outcome.opened, 0);
  EXPECT_EQ(outcome.refused, 400);
}

TEST(Fuzz, IndexAndConfig) {
  TempDir dir;
  const auto shard = [](const std::string& name) {
    return test::raw_safetensors("{\"" + name + R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4);
  };
  dir.write("model-1.safetensors", shard("a.weight"));
  dir.write("model-2.safetensors", shard("b.weight"));
  const std::string index =
      R"({"metadata":{"total_size":8},"weight_map":{"a.weight":"model-1.safetensors","b.weight":"model-2.safetensors"}})";
  const std::string config = slurp(kFixture / "config.json");
  std::mt19937_64 random(99);
  Outcome outcome;
  for (int round = 0; round < 600; ++round) {
    std::string damaged_index = index, damaged_config = config;
    std::string& target = round % 2 == 0 ? damaged_index : damaged_config;
    for (std::size_t n = 1 + pick(random, 3); n > 0; --n)
      target[pick(random, target.size())] = static_cast<char>(random());
    if (round % 16 == 0) target.resize(pick(random, target.size()));
    dir.write("model.safetensors.index.json", damaged_index);
    dir.write("config.json", damaged_config);
    attempt(outcome, [&] {
      const ModelFolder folder = ModelFolder::open(dir.path());
      ModelConfig model(folder.config(), folder.config_origin());
      model.text_model_type();
      model.need_int({"hidden_size"}, 1, 1 << 20);
      model.unknown_keys();
      const QuantConfig quant(folder.config(), folder.config_origin());
      quant.lookup("language_model.model.layers.0.mlp.gate");
    });
  }
  EXPECT_GT(outcome.opened, 10);
  EXPECT_GT(outcome.refused, 300);
}

}  // namespace
}  // namespace moeflux::format
