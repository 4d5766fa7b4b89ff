#include "store/trunk_store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "format/model_folder.h"
#include "quant/bands.h"
#include "support/temp_dir.h"
#include "support/tensor_file.h"

namespace moeflux::store {
namespace {

class Trunk : public testing::Test {
 protected:
  Trunk() {
    std::vector<float> values;
    for (int i = 0; i < 24; ++i) values.push_back(static_cast<float>(i) * 0.25f - 2.0f);
    test::Tensor t{DType::F32, {6, 4}, std::vector<std::byte>(96)};
    std::memcpy(t.data.data(), values.data(), 96);
    file_.tensors["m.weight"] = t;
    file_.save(dir_ / "model.safetensors");
    dir_.write("config.json", "{}");
    folder_ = format::ModelFolder::open(dir_.path());
  }
  format::Extent extent() const { return folder_.find("m.weight")->extent(); }

  test::TempDir dir_;
  test::TensorFile file_;
  format::ModelFolder folder_;
  HostAllocator allocator_;
  HostCopier copier_;
};

TEST_F(Trunk, RowRunsPermute) {
  TrunkStore trunk(folder_, allocator_, copier_);
  MatrixSource s;
  s.name = "m";
  s.format = quant::Format::f32();
  s.rows = 6;
  s.cols = 4;
  s.data = extent();
  s.runs = {{4, 2}, {0, 1}, {2, 2}, {1, 1}};
  const quant::MatrixView v = trunk.load(s);
  trunk.finish();
  const auto* f = reinterpret_cast<const float*>(v.data);
  const int rows[] = {4, 5, 0, 2, 3, 1};
  for (int r = 0; r < 6; ++r)
    for (int c = 0; c < 4; ++c) EXPECT_EQ(f[r * 4 + c], static_cast<float>(rows[r] * 4 + c) * 0.25f - 2.0f);
  EXPECT_EQ(trunk.bytes(), 96u);
}

TEST_F(Trunk, Transforms) {
  TrunkStore trunk(folder_, allocator_, copier_);
  VectorSource s;
  s.name = "m.weight";
  s.data = extent();
  s.count = 24;
  for (const auto t : {VectorSource::Transform::None, VectorSource::Transform::PlusOne, VectorSource::Transform::NegExp}) {
    s.transform = t;
    const TensorView v = trunk.load(s);
    for (int i = 0; i < 24; ++i) {
      const float w = static_cast<float>(i) * 0.25f - 2.0f;
      const float want = t == VectorSource::Transform::None ? w : t == VectorSource::Transform::PlusOne ? 1.0f + w : -std::exp(w);
      EXPECT_FLOAT_EQ(v.f32()[i], want);
    }
  }
}

// A quantized matrix is brought into bands when it has arrived; rows in another order, scales from elsewhere and widths that have no
// bands among them.
TEST_F(Trunk, Bands) {
  const quant::Format format = quant::Format::affine(4, 64, DType::BF16);
  const auto bytes = [&](const std::string& name, std::size_t n) {
    test::Tensor t{DType::U8, {n}, std::vector<std::byte>(n)};
    for (std::size_t i = 0; i < n; ++i) t.data[i] = static_cast<std::byte>((i * 2654435761u) >> 11);
    file_.tensors[name] = t;
  };
  bytes("w", 48 * 64), bytes("s", 48 * 4), bytes("b", 48 * 4);
  file_.save(dir_ / "model.safetensors");
  folder_ = format::ModelFolder::open(dir_.path());
  MatrixSource s;
  s.name = "w";
  s.format = format;
  s.cols = 128;
  s.data = folder_.find("w")->extent(), s.scales = folder_.find("s")->extent(), s.biases = folder_.find("b")->extent();
  for (const std::int64_t rows : {48, 47})
    for (const bool turned : {false, true}) {
      s.rows = rows;
      s.runs.clear();
      if (turned) s.runs = {{20, rows - 20}, {0, 20}};
      if (rows != 48 && !turned) continue;  // less than the tensor has: only by runs
      TrunkStore plain(folder_, allocator_, copier_), bands(folder_, allocator_, copier_);
      const quant::MatrixView a = plain.load(s), b = bands.load(s, true);
      plain.finish(), bands.finish();
      EXPECT_EQ(a.order, quant::Order::Rows);
      EXPECT_EQ(plain.bytes(), bands.bytes());
      std::vector<std::byte> memory(a.data, a.biases + rows * 4);
      if (rows == 48) {
        EXPECT_EQ(b.order, quant::Order::Bands);
        quant::MatrixView own = a;
        own.data = memory.data(), own.scales = own.data + (a.scales - a.data), own.biases = own.data + (a.biases - a.data);
        quant::to_bands(own, memory.data(), allocator_);
      } else {
        EXPECT_EQ(b.order, quant::Order::Rows);
      }
      EXPECT_EQ(std::memcmp(b.data, memory.data(), b.bytes()), 0) << rows << " " << turned;
    }
}

TEST_F(Trunk, NothingIsAnEmptyView) {
  TrunkStore trunk(folder_, allocator_, copier_);
  EXPECT_TRUE(trunk.load(MatrixSource{}).empty());
  EXPECT_TRUE(trunk.load(VectorSource{}).empty());
  EXPECT_EQ(trunk.bytes(), 0u);
}

}  // namespace
}  // namespace moeflux::store
