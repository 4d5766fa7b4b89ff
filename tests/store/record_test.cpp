#include <gtest/gtest.h>

#include "quant/encode.h"
#include "store/expert_record.h"
#include "support/expect_error.h"

namespace moeflux::store {
namespace {

RecordMatrix matrix(const quant::Format& f, std::int64_t rows, std::int64_t cols) { return {f, rows, cols, 0, 0, 0}; }

TEST(Record, PublishedShapesFillTheirPages) {
  // 4.5 bits a weight: the record is the bytes themselves.
  const auto f = quant::Format::affine(4, 64, DType::BF16);
  const auto layout = RecordLayout::plan(matrix(f, 512, 2048), matrix(f, 512, 2048), matrix(f, 2048, 512));
  EXPECT_EQ(layout.bytes, 1'769'472u);
  EXPECT_LT(layout.gate.data_at, layout.up.data_at);
  EXPECT_LT(layout.up.biases_at, layout.down.data_at);
}

TEST(Record, ComponentsAreAlignedAndApart) {
  const auto f = quant::Format::affine(3, 32, DType::F16);
  const auto layout = RecordLayout::plan(matrix(f, 5, 96), matrix(quant::Format::bf16(), 5, 96), matrix(quant::Format::mxfp4(), 96, 32));
  std::vector<std::pair<std::uint64_t, std::uint64_t>> parts;
  for (const RecordMatrix* m : {&layout.gate, &layout.up, &layout.down}) {
    parts.emplace_back(m->data_at, m->data_bytes());
    if (m->format.quantized()) parts.emplace_back(m->scales_at, m->scale_bytes());
    if (m->format.has_biases()) parts.emplace_back(m->biases_at, m->scale_bytes());
  }
  std::uint64_t end = 0;
  for (const auto& [at, bytes] : parts) {
    EXPECT_EQ(at % kComponentAlign, 0u);
    EXPECT_GE(at, end);
    EXPECT_GT(bytes, 0u);
    end = at + bytes;
  }
  EXPECT_LE(end, layout.bytes);
  EXPECT_EQ(layout.bytes % kRecordAlign, 0u);
}

TEST(Record, AnUndefinedScaleIsRefused) {
  const std::vector<float> values(64, 1.0f);
  quant::EncodedMatrix m = quant::encode(values, 2, 32, quant::Format::mxfp4());
  check_scales(m.view(), "fine");
  m.scales[1] = std::byte{255};
  test::expect_error([&] { check_scales(m.view(), "layer 3"); }, ErrorCode::InvalidModel, {"layer 3", "255"});
}

}  // namespace
}  // namespace moeflux::store
