#include "store/resident_store.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "model/binder.h"
#include "model/family.h"
#include "quant/bands.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::store {
namespace {

struct Fixture {
  explicit Fixture(const std::filesystem::path& path)
      : folder(format::ModelFolder::open(path)), parsed(model::parse_model(folder)), binding(model::bind(folder, parsed.spec, parsed.names)) {}
  format::ModelFolder folder;
  model::ParsedModel parsed;
  model::Binding binding;
  HostAllocator allocator;
  HostCopier copier;
};

TEST(ResidentStore, RecordsHoldTheTensorsOfTheFile) {
  Fixture f(test::fixtures() / "qwen3_5_moe-mlx4");
  ResidentStore store(f.binding.experts, f.folder, f.allocator, f.copier, {});
  const auto file = test::TensorFile::load(test::fixtures() / "qwen3_5_moe-mlx4/model.safetensors");
  const std::vector<ExpertIdx> wanted{ExpertIdx(5), ExpertIdx(0)};
  ExpertLease lease = store.acquire(LayerIdx(2), wanted);
  ASSERT_EQ(lease.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(lease.ready(i));
    const ExpertView view = lease.wait(i);
    const auto same = [&](const std::byte* got, std::uint64_t bytes, const std::string& name) {
      const auto& t = file.at("language_model.model.layers.2.mlp.switch_mlp." + name);
      EXPECT_EQ(t.data.size(), bytes * 8);
      EXPECT_EQ(std::memcmp(got, t.data.data() + bytes * static_cast<std::uint64_t>(raw(wanted[i])), bytes), 0) << name;
    };
    const auto rows = [](const quant::MatrixView& m) { return static_cast<std::uint64_t>(m.rows); };
    same(view.gate.data, rows(view.gate) * view.gate.row_bytes(), "gate_proj.weight");
    same(view.up.scales, rows(view.up) * view.up.scale_row_bytes(), "up_proj.scales");
    same(view.down.biases, rows(view.down) * view.down.scale_row_bytes(), "down_proj.biases");
    same(view.down.data, rows(view.down) * view.down.row_bytes(), "down_proj.weight");
  }
  EXPECT_EQ(store.stats().requests, 2u);
  EXPECT_EQ(store.stats().hits, 2u);
}

TEST(ResidentStore, LeasesFromManyThreads) {
  Fixture f(test::fixtures() / "qwen3_5_moe-bf16");
  ResidentStore store(f.binding.experts, f.folder, f.allocator, f.copier, {});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const std::vector<ExpertIdx> wanted{ExpertIdx((i + t) % 8), ExpertIdx((i + t + 3) % 8)};
        ExpertLease a = store.acquire(LayerIdx(i % 4), wanted);
        ExpertLease b = store.acquire(LayerIdx((i + 1) % 4), wanted);
        EXPECT_EQ(a.wait(0).gate.rows, 64);
        a = std::move(b);
        EXPECT_EQ(a.wait(1).down.rows, 128);
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(store.stats().requests, 4u * 200 * 4);
}

TEST(ResidentStore, AFileCutShortNamesLayerAndExpert) {
  const test::TempDir dir;
  test::copy_configs(test::fixtures() / "qwen3_5_moe-bf16", dir.path());
  std::filesystem::copy_file(test::fixtures() / "qwen3_5_moe-bf16/model.safetensors", dir / "model.safetensors");
  Fixture f(dir.path());
  std::filesystem::resize_file(dir / "model.safetensors", 200000);  // after the headers were read
  test::expect_error([&] { ResidentStore(f.binding.experts, f.folder, f.allocator, f.copier, {}); }, ErrorCode::Io,
                     {"model.safetensors", "layer", "expert"});
}

// What has bands is in them, everything else as the file has it, for every layout a file can have.
TEST(ResidentStore, Bands) {
  std::size_t n_banded = 0, n_plain = 0;
  for (const std::filesystem::directory_entry& entry : std::filesystem::directory_iterator(test::fixtures())) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    SCOPED_TRACE(entry.path().filename());
    Fixture f(entry.path());
    ResidentStore plain(f.binding.experts, f.folder, f.allocator, f.copier, {});
    ResidentStore bands(f.binding.experts, f.folder, f.allocator, f.copier, {}, true);
    for (std::size_t l = 0; l < f.binding.experts.layers.size(); ++l) {
      const ExpertLayer& layer = f.binding.experts.layers[l];
      for (std::int64_t e = 0; e < layer.n_experts; ++e) {
        const std::vector<ExpertIdx> wanted{ExpertIdx(static_cast<std::int32_t>(e))};
        ExpertLease want = plain.acquire(LayerIdx(static_cast<std::int32_t>(l)), wanted), got = bands.acquire(LayerIdx(static_cast<std::int32_t>(l)), wanted);
        const ExpertView a = want.wait(0), b = got.wait(0);
        std::vector<std::byte> record(a.gate.data, a.gate.data + layer.layout.bytes);
        to_bands(layer.layout, record.data(), f.allocator);
        EXPECT_EQ(std::memcmp(b.gate.data, record.data(), record.size()), 0) << l << " " << e;
        for (const quant::MatrixView* m : {&b.gate, &b.up, &b.down}) {
          const bool banded = quant::has_bands(m->format, m->rows, m->cols);
          EXPECT_EQ(m->order, banded ? quant::Order::Bands : quant::Order::Rows);
          ++(banded ? n_banded : n_plain);
        }
      }
    }
  }
  EXPECT_GT(n_banded, 100u);
  EXPECT_GT(n_plain, 100u);
}

TEST(ResidentStore, ReportsProgress) {
  Fixture f(test::fixtures() / "qwen3_5_moe-bf16");
  std::uint64_t last = 0, all = 0;
  ResidentStore(f.binding.experts, f.folder, f.allocator, f.copier, [&](std::string_view what, std::uint64_t done, std::uint64_t total) {
    EXPECT_EQ(what, "experts");
    EXPECT_GT(done, last);
    last = done;
    all = total;
  });
  EXPECT_EQ(last, all);
  EXPECT_GT(all, 0u);
}

}  // namespace
}  // namespace moeflux::store
