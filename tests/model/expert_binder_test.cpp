// Experts of every fixture through both stores: the same bytes, whatever the file's layout.
#include <gtest/gtest.h>

#include <cstring>

#include "backend/cpu/cpu_backend.h"
#include "model/binder.h"
#include "model/family.h"
#include "store/resident_store.h"
#include "store/streaming_store.h"
#include "support/tensor_file.h"

namespace moeflux::model {
namespace {

void expect_same(const quant::MatrixView& a, const quant::MatrixView& b) {
  ASSERT_EQ(a.format, b.format);
  ASSERT_EQ(a.rows, b.rows);
  ASSERT_EQ(a.cols, b.cols);
  const auto rows = static_cast<std::uint64_t>(a.rows);
  EXPECT_EQ(std::memcmp(a.data, b.data, rows * a.row_bytes()), 0);
  if (a.format.quantized()) {
    EXPECT_EQ(std::memcmp(a.scales, b.scales, rows * a.scale_row_bytes()), 0);
  }
  if (a.format.has_biases()) {
    EXPECT_EQ(std::memcmp(a.biases, b.biases, rows * a.scale_row_bytes()), 0);
  }
}

void expect_same(const TensorView& a, const TensorView& b) {
  ASSERT_EQ(a.count(), b.count());
  if (a.count() > 0) {
    EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<std::size_t>(a.count()) * 4), 0);
  }
}

void expect_same(const store::ExpertView& a, const store::ExpertView& b) {
  expect_same(a.gate, b.gate), expect_same(a.up, b.up), expect_same(a.down, b.down);
  expect_same(a.gate_bias, b.gate_bias), expect_same(a.up_bias, b.up_bias), expect_same(a.down_bias, b.down_bias);
}

TEST(ExpertBinder, BothStoresGiveTheSameExperts) {
  for (const auto& entry : std::filesystem::directory_iterator(test::fixtures())) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    SCOPED_TRACE(entry.path().filename().string());
    const auto folder = format::ModelFolder::open(entry.path());
    const ParsedModel parsed = parse_model(folder);
    const Binding binding = bind(folder, parsed.spec, parsed.names);
    const auto backend = backend::make_cpu_backend({.n_threads = 1, .isa = ""});
    store::ResidentStore resident(binding.experts, folder, backend->allocator(), backend->copier(), {});
    const std::vector<std::filesystem::path> files{folder.file(0).path()};
    store::StreamingStore streaming(binding.experts, {files[0].string()}, {.n_slots = 3, .max_lease = 2, .make_reader = [&](const io::MemoryRegions& r) {
                                      return io::make_reader(files, r, {.kind = io::ReaderKind::Pread, .n_threads = 1});
                                    }});
    for (std::size_t l = 0; l < binding.experts.layers.size(); ++l)
      for (std::int32_t e = 0; e + 1 < binding.experts.layers[l].n_experts; e += 2) {
        const ExpertIdx wanted[] = {ExpertIdx(e + 1), ExpertIdx(e)};
        auto a = resident.acquire(LayerIdx(static_cast<std::int32_t>(l)), wanted), b = streaming.acquire(LayerIdx(static_cast<std::int32_t>(l)), wanted);
        for (std::size_t i = 0; i < 2; ++i) expect_same(a.wait(i), b.wait(i));
      }
  }
}

// A source that two pieces share is read once.
TEST(ExpertBinder, InterleavedExpertsAreReadOnce) {
  const auto folder = format::ModelFolder::open(test::fixtures() / "gpt_oss-bf16");
  const ParsedModel parsed = parse_model(folder);
  const Binding binding = bind(folder, parsed.spec, parsed.names);
  const auto pieces = binding.experts.layers[0].expert(ExpertIdx(3));
  std::uint64_t bytes = 0;
  for (std::size_t p = 0; p < pieces.size(); ++p)
    if (store::SlotLayout::needs_read(pieces, p)) bytes += pieces[p].source.bytes;
  EXPECT_EQ(bytes, 2u * (3 * 128 * 96 + 2 * 96 + 128));
}

}  // namespace
}  // namespace moeflux::model
