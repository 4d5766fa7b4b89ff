#include "format/model_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "core/json.h"
#include "format/model_config.h"
#include "format/raw_safetensors.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace moeflux::format {
namespace {

using test::expect_error;
using test::raw_safetensors;
using test::slurp;
using test::TempDir;

const std::filesystem::path kSource = MOEFLUX_SOURCE_DIR;

// A shard with these one-byte tensors.
std::string shard(const std::vector<std::string>& names, const std::string& format = "") {
  std::string header = "{";
  if (!format.empty()) header += R"("__metadata__":{"format":")" + format + "\"},";
  for (std::size_t i = 0; i < names.size(); ++i)
    header += "\"" + names[i] + R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + std::to_string(i) + "," +
              std::to_string(i + 1) + "]},";
  header.back() = names.empty() && format.empty() ? ' ' : '}';
  return raw_safetensors(header, names.size());
}

// A model of two shards, tensors a, b in the first and c in the second.
class Sharded : public testing::Test {
 protected:
  Sharded() {
    dir.write("config.json", R"({"model_type":"x"})");
    dir.write("model-1.safetensors", shard({"a", "b"}));
    dir.write("model-2.safetensors", shard({"c"}));
    index(kMap);
  }
  void index(const std::string& weight_map, const std::string& metadata = R"({"total_size":3})") {
    dir.write("model.safetensors.index.json",
              R"({"metadata":)" + metadata + R"(,"weight_map":)" + weight_map + "}");
  }
  ModelFolder open() const { return ModelFolder::open(dir.path()); }
  void refused(const std::vector<std::string>& fragments) const {
    expect_error([&] { open(); }, ErrorCode::InvalidModel, fragments);
  }

  static constexpr const char* kMap =
      R"({"c":"model-2.safetensors","a":"model-1.safetensors","b":"model-1.safetensors"})";
  TempDir dir;
};

TEST_F(Sharded, Opens) {
  const ModelFolder folder = open();
  EXPECT_EQ(folder.path(), dir.path());
  EXPECT_EQ(folder.n_files(), 2u);
  EXPECT_EQ(folder.tensors().size(), 3u);
  EXPECT_TRUE(folder.warnings().empty()) << folder.warnings().front();
  EXPECT_EQ(folder.writer_format(), "");
  EXPECT_TRUE(folder.generation_config().is_object());
  EXPECT_TRUE(folder.generation_config().empty());
  const FolderTensor* b = folder.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(folder.file(b->file).path().filename(), "model-1.safetensors");
  std::byte value{};
  folder.file(b->extent().file).read_exact(b->extent().offset, std::span(&value, 1));
  EXPECT_EQ(std::to_integer<int>(value), 1) << "the second byte of the first shard's data";
  EXPECT_EQ(folder.file(folder.find("c")->file).path().filename(), "model-2.safetensors");
  EXPECT_EQ(folder.find("d"), nullptr);
  EXPECT_EQ(folder.find(""), nullptr);
}

TEST_F(Sharded, SurvivesAMove) {
  ModelFolder folder = open();
  const ModelFolder moved = std::move(folder);
  ASSERT_NE(moved.find("c"), nullptr);
  EXPECT_EQ(moved.config_origin(), (dir / "config.json").string());
}

// Download caches: the folder holds links, the data lies elsewhere.
TEST_F(Sharded, ShardsMayBeLinks) {
  TempDir blobs;
  blobs.write("0123abcd", shard({"c"}));
  std::filesystem::remove(dir / "model-2.safetensors");
  std::filesystem::create_symlink(blobs / "0123abcd", dir / "model-2.safetensors");
  EXPECT_NE(open().find("c"), nullptr);
  std::filesystem::remove(blobs / "0123abcd");
  refused({"1 of 2 shards missing", "model-2.safetensors"});
}

TEST_F(Sharded, MissingShards) {
  std::filesystem::remove(dir / "model-2.safetensors");
  refused({dir.path().string(), "1 of 2 shards missing", "model-2.safetensors"});
  std::filesystem::remove(dir / "model-1.safetensors");
  refused({"2 of 2 shards missing", "model-1.safetensors", "model-2.safetensors"});
}

TEST_F(Sharded, ShardNamesStayInTheFolder) {
  for (const char* name :
       {"../model-2.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "a\\\\b.safetensors",
        "x..safetensors", "model\\u0000.safetensors", "model\\n.safetensors", "./model-2.safetensors"}) {
    SCOPED_TRACE(name);
    index(R"({"a":"model-1.safetensors","b":"model-1.safetensors","c":")" + std::string(name) + "\"}");
    refused({"model.safetensors.index.json", "tensor \"c\"", "not a plain file name"});
  }
  index(R"({"c":")" + std::string(256, 'n') + "\"}");
  refused({"tensor \"c\"", "not a plain file name"});
}

TEST_F(Sharded, TensorAbsentFromItsShard) {
  index(
      R"({"a":"model-1.safetensors","b":"model-1.safetensors","c":"model-2.safetensors","d":"model-2.safetensors"})");
  refused({"model.safetensors.index.json", "tensor \"d\"", "model-2.safetensors"});
  index(R"({"a":"model-1.safetensors","b":"model-2.safetensors","c":"model-2.safetensors"})");
  refused({"tensor \"b\"", "not in its shard \"model-2.safetensors\"", "it is in \"model-1.safetensors\""});
}

TEST_F(Sharded, TensorInTwoShards) {
  dir.write("model-2.safetensors", shard({"b", "c"}));
  refused({"model-2.safetensors", "tensor \"b\"", "also in model-1.safetensors"});
}

TEST_F(Sharded, ExtraTensorsAreKeptWithAWarning) {
  dir.write("model-2.safetensors", shard({"c", "mtp.x", "mtp.y"}));
  const ModelFolder folder = open();
  EXPECT_NE(folder.find("mtp.y"), nullptr);
  ASSERT_EQ(folder.warnings().size(), 2u);
  EXPECT_THAT(folder.warnings()[0], testing::HasSubstr("2 tensors"));
  EXPECT_THAT(folder.warnings()[0], testing::HasSubstr("\"mtp.x\", \"mtp.y\""));
  EXPECT_THAT(folder.warnings()[1], testing::HasSubstr("total_size is 3, the tensors take 5"));
}

TEST_F(Sharded, TotalSizeIsOnlyAWarning) {
  for (const char* metadata : {"{}", "null", "3", R"({"total_size":"3"})", R"({"total_size":3.0})"}) {
    index(kMap, metadata);
    EXPECT_TRUE(open().warnings().empty()) << metadata;
  }
  index(kMap, R"({"total_size":1e30})");
  EXPECT_EQ(open().warnings().size(), 1u);
}

TEST_F(Sharded, UnusedWeightFilesAreTold) {
  dir.write("model.safetensors", "not even read");
  dir.write("golden.safetensors", "somebody else's");
  const ModelFolder folder = open();
  ASSERT_EQ(folder.warnings().size(), 1u);
  EXPECT_THAT(folder.warnings()[0], testing::HasSubstr("not used: \"model.safetensors\""));
}

TEST_F(Sharded, BrokenIndex) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "not valid JSON"},
      {"{", "not valid JSON"},
      {"[]", "not a JSON object"},
      {"{\"weight_map\":{\"a\":\"\xFF\"}}", "UTF-8"},
      {R"({"metadata":{}})", "\"weight_map\" is missing"},
      {R"({"weight_map":[]})", "\"weight_map\" is missing or not an object"},
      {R"({"weight_map":{}})", "names no tensor"},
      {R"({"weight_map":{"a":1}})", "tensor \"a\""},
      {R"({"weight_map":{"a":"model-1.safetensors","a":"model-2.safetensors"}})",
       "tensor \"a\" appears twice"},
      {R"({"weight_map":{"a":"model-1.safetensors"},"weight_map":{}})", "\"weight_map\" appears twice"},
      {R"({"weight_map":)" + std::string(1000, '[') + std::string(1000, ']') + "}", "nested deeper than 64"},
  };
  for (const auto& [text, rule] : cases) {
    SCOPED_TRACE(text);
    dir.write("model.safetensors.index.json", text);
    refused({"model.safetensors.index.json", rule});
  }
}

TEST_F(Sharded, IndexTooLarge) {
  std::filesystem::resize_file(dir / "model.safetensors.index.json", (256u << 20) + 1);  // sparse
  refused({"model.safetensors.index.json", "too large"});
}

TEST_F(Sharded, BrokenShardIsNamed) {
  dir.write("model-2.safetensors", shard({"c"}) + "tail");
  refused({"model-2.safetensors", "4 bytes", "no tensor"});
  dir.write("model-2.safetensors", "");
  refused({"model-2.safetensors", "too short"});
}

TEST_F(Sharded, WriterFormat) {
  dir.write("model-1.safetensors", shard({"a", "b"}, "mlx"));
  EXPECT_EQ(open().writer_format(), "mlx") << "a shard that does not say does not contradict";
  dir.write("model-2.safetensors", shard({"c"}, "mlx"));
  EXPECT_EQ(open().writer_format(), "mlx");
  dir.write("model-2.safetensors", shard({"c"}, "pt"));
  refused({"model-2.safetensors", "\"pt\"", "\"mlx\"", "model-1.safetensors"});
}

TEST_F(Sharded, ConfigProblems) {
  dir.write("config.json", "[1]");
  refused({"config.json", "not a JSON object"});
  dir.write("config.json", R"({"a":)");
  refused({"config.json", "not valid JSON", "line 1"});
  dir.write("config.json", R"({"a":1,"a":2})");
  refused({"config.json", "\"a\" appears twice"});
  std::filesystem::resize_file(dir / "config.json", (16u << 20) + 1);
  refused({"config.json", "too large"});
  std::filesystem::remove(dir / "config.json");
  refused({dir.path().string(), "no config.json"});
  std::filesystem::create_directory(dir / "config.json");
  expect_error([&] { open(); }, ErrorCode::Io, {"config.json", "folder"});
}

TEST_F(Sharded, GenerationConfig) {
  dir.write("generation_config.json", R"({"top_k":7})");
  EXPECT_EQ(open().generation_config().at("top_k"), 7);
  dir.write("generation_config.json", "7");
  refused({"generation_config.json", "not a JSON object"});
  dir.write("generation_config.json", "{");
  refused({"generation_config.json", "not valid JSON"});
}

TEST(ModelFolderOpen, FolderMissingOrNotAFolder) {
  TempDir dir;
  expect_error([&] { ModelFolder::open(dir / "none"); }, ErrorCode::InvalidArgument,
               {"none", "no such folder"});
  dir.write("model.safetensors", "x");
  expect_error([&] { ModelFolder::open(dir / "model.safetensors"); }, ErrorCode::InvalidArgument,
               {"model.safetensors", "not a folder"});
  expect_error([&] { ModelFolder::open(""); }, ErrorCode::InvalidArgument, {"no such folder"});
}

TEST(ModelFolderOpen, NoWeights) {
  TempDir dir;
  dir.write("config.json", "{}");
  expect_error([&] { ModelFolder::open(dir.path()); }, ErrorCode::InvalidModel,
               {dir.path().string(), "model.safetensors.index.json", "model.safetensors"});
  dir.write("model-00001-of-00002.safetensors", "x");
  expect_error([&] { ModelFolder::open(dir.path()); }, ErrorCode::InvalidModel,
               {"looked for", "found only \"model-00001-of-00002.safetensors\""});
}

TEST(ModelFolderOpen, SingleFile) {
  TempDir dir;
  dir.write("config.json", "{}");
  dir.write("model.safetensors", shard({"x", "y"}, "pt"));
  const ModelFolder folder = ModelFolder::open(dir.path());
  EXPECT_EQ(folder.n_files(), 1u);
  EXPECT_EQ(folder.writer_format(), "pt");
  EXPECT_NE(folder.find("y"), nullptr);
}

// Every model of the repository, read as a user's would be.
TEST(ModelFolderOpen, AllFixtures) {
  std::vector<std::filesystem::path> models{kSource / "models/demo"};
  for (const auto& entry : std::filesystem::directory_iterator(kSource / "tests/fixtures"))
    if (std::filesystem::exists(entry.path() / "config.json")) models.push_back(entry.path());
  ASSERT_GE(models.size(), 15u);
  for (const std::filesystem::path& path : models) {
    SCOPED_TRACE(path);
    const ModelFolder folder = ModelFolder::open(path);
    EXPECT_TRUE(folder.warnings().empty());
    EXPECT_FALSE(folder.tensors().empty());
    const bool mlx = path.filename() == "demo" || path.string().ends_with("-mlx4");
    const bool plain = path.string().ends_with("-bf16");
    if (mlx || plain) {
      EXPECT_EQ(folder.writer_format(), mlx ? "mlx" : "pt");
      EXPECT_EQ(QuantConfig(folder.config(), folder.config_origin()).present(), mlx);
    }
    std::uint64_t data = 0;
    for (const FolderTensor& t : folder.tensors()) {
      EXPECT_EQ(folder.find(t.info.name), &t);
      data += t.info.bytes;
    }
    EXPECT_EQ(folder.tensors().front().info.offset + data,
              std::filesystem::file_size(path / "model.safetensors"));
    EXPECT_FALSE(ModelConfig(folder.config(), folder.config_origin()).text_model_type().empty());
  }
}

TEST(ModelFolderOpen, FixtureTensor) {
  const ModelFolder folder = ModelFolder::open(kSource / "tests/fixtures/qwen3_5_moe-mlx4");
  const FolderTensor* t = folder.find("language_model.model.layers.0.mlp.switch_mlp.gate_proj.weight");
  ASSERT_NE(t, nullptr);
  EXPECT_EQ(t->info.dtype, DType::U32);
  EXPECT_EQ(t->info.shape, (std::vector<std::uint64_t>{8, 64, 16}));
  EXPECT_EQ(t->info.bytes, 8u * 64 * 16 * 4);
}

}  // namespace
}  // namespace moeflux::format
