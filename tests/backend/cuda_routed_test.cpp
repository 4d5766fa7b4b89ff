// One token's experts on the device, some of them in main memory: the same bytes as with all in device memory, and what is read there is
// left in the slots that were lent for it. Skipped where there is no device.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda_backend.h"

namespace moeflux::backend {
namespace {

constexpr std::int64_t kTopK = 6, kExperts = 12, kSlots = 16, kLent = 3;  // kSlots: of each memory

// Codes in 4 bits with groups of 64, or Mxfp4 with biases, as gpt-oss has them.
struct Layout {
  Layout(std::int64_t dim_, std::int64_t inner_, bool mx_) : dim(dim_), inner(inner_), mx(mx_) { at(nullptr); }
  FfnMatrices at(std::byte* base) {
    FfnMatrices m;
    std::size_t used = 0;
    const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
      quant::MatrixView v;
      v.format = mx ? quant::Format::mxfp4() : quant::Format::affine(4, 64, DType::BF16);
      v.rows = rows, v.cols = cols;
      const auto take = [&](std::size_t n) {
        std::byte* const here = base + used;
        used += (n + 63) / 64 * 64;
        return here;
      };
      const auto n = static_cast<std::size_t>(rows);
      v.data = take(n * v.row_bytes());
      v.scales = take(n * v.scale_row_bytes());
      if (!mx) v.biases = take(n * v.scale_row_bytes());
      return v;
    };
    const auto bias = [&](std::int64_t n) {
      if (!mx) return TensorView{};
      auto* const here = reinterpret_cast<float*>(base + used);
      used += static_cast<std::size_t>(n + 15) / 16 * 64;
      return view_f32(here, {n});
    };
    m.gate = matrix(inner, dim), m.up = matrix(inner, dim), m.down = matrix(dim, inner);
    m.gate_bias = bias(inner), m.up_bias = bias(inner), m.down_bias = bias(dim);
    bytes = used;
    return m;
  }
  // All bytes of an expert; those between its parts are nobody's.
  std::vector<std::byte> parts_of(std::vector<std::byte> record) {
    std::vector<std::byte> out;
    const auto add = [&](const void* p, std::size_t n) { out.insert(out.end(), static_cast<const std::byte*>(p), static_cast<const std::byte*>(p) + n); };
    const FfnMatrices m = at(record.data());
    for (const quant::MatrixView* v : {&m.gate, &m.up, &m.down}) {
      const auto n = static_cast<std::size_t>(v->rows);
      add(v->data, n * v->row_bytes()), add(v->scales, n * v->scale_row_bytes());
      if (!mx) add(v->biases, n * v->scale_row_bytes());
    }
    if (mx)
      for (const TensorView* v : {&m.gate_bias, &m.up_bias, &m.down_bias}) add(v->data, static_cast<std::size_t>(v->dim(0)) * 4);
    return out;
  }
  std::int64_t dim, inner;
  bool mx;
  std::size_t bytes = 0;
};

struct Device {
  Device(Backend& b, Layout l) : backend(b), layout(l) {
    near = b.allocator().allocate(layout.bytes * kSlots, 256);
    far = b.pinned_allocator().allocate(layout.bytes * kSlots, 4096);
    std::mt19937 random(7);
    // Any bits are a code, and with this mask any scale is small and no NaN.
    for (std::int64_t e = 0; e < kExperts; ++e) {
      auto& r = records.emplace_back(layout.bytes);
      for (std::byte& byte : r) byte = static_cast<std::byte>(random() >> 8 & 0x3f);
      if (!layout.mx) continue;
      const FfnMatrices m = layout.at(r.data());
      for (const quant::MatrixView* v : {&m.gate, &m.up, &m.down})  // scales of 2^-9 to 2^-2
        for (std::int64_t i = 0; i < v->rows * static_cast<std::int64_t>(v->scale_row_bytes()); ++i) const_cast<std::byte*>(v->scales)[i] = static_cast<std::byte>(118 + random() % 8);
    }
    x = b.allocator().allocate(static_cast<std::size_t>(layout.dim) * 4, 256), factors = b.allocator().allocate(x.bytes(), 256), normed = b.allocator().allocate(x.bytes(), 256);
    std::vector<float> values(static_cast<std::size_t>(layout.dim));
    for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 1e-3f;
    b.copier().to_device(x.data(), reinterpret_cast<const std::byte*>(values.data()), x.bytes());
    b.copier().to_device(factors.data(), reinterpret_cast<const std::byte*>(values.data()), x.bytes());
    ids = b.allocator().allocate(kTopK * 4, 256), table = b.allocator().allocate((kExperts + kLent) * 4, 256);
    y = b.allocator().allocate(static_cast<std::size_t>(kTopK * layout.dim) * 4, 256);
  }
  std::vector<std::byte> slot(std::int32_t s) {
    std::vector<std::byte> out(layout.bytes);
    backend.copier().to_host(out.data(), near.data() + static_cast<std::size_t>(s) * layout.bytes, out.size());
    return out;
  }
  void put(std::int64_t expert, std::int32_t entry) {
    const std::vector<std::byte>& r = records[static_cast<std::size_t>(expert)];
    if (entry >= 0)
      backend.copier().to_device(near.data() + static_cast<std::size_t>(entry) * layout.bytes, r.data(), r.size());
    else
      std::memcpy(far.data() + static_cast<std::size_t>(-2 - entry) * layout.bytes, r.data(), r.size());
  }
  // The result of one step; `entries` is the table with the lent slots behind it.
  std::vector<std::byte> run(std::span<const std::int32_t> chosen, std::span<const std::int32_t> entries, std::int64_t n_lent, bool& leaves) {
    backend.copier().to_device(ids.data(), reinterpret_cast<const std::byte*>(chosen.data()), kTopK * 4);
    backend.copier().to_device(table.data(), reinterpret_cast<const std::byte*>(entries.data()), entries.size() * 4);
    const std::vector<std::int32_t> tokens{1};
    const auto stream = backend.create_stream();  // without recordings of earlier runs
    if (!backend.begin_step(*stream, tokens, 0, true)) {
      backend.run(*stream, RmsNorm{view_f32(x.as<float>(), {1, layout.dim}), view_f32(factors.as<float>(), {layout.dim}), view_f32(normed.as<float>(), {1, layout.dim}), 1e-6f});
      RoutedFfn op;
      op.x = view_f32(normed.as<float>(), {1, layout.dim});
      op.ids = make_view(ids.data(), DType::I32, {1, kTopK});
      op.first = layout.at(near.data());
      op.stride = layout.bytes;
      op.slot_of = table.as<std::int32_t>();
      op.host_offset = far.data() - near.data();
      op.n_experts = kExperts;
      op.n_lent = n_lent;
      op.y = view_f32(y.as<float>(), {kTopK, layout.dim});
      op.precision = Precision::Fast;
      leaves = backend.run_routed(*stream, op);
      backend.end_step(*stream, true);
    }
    backend.synchronize(*stream);
    std::vector<std::byte> out(y.bytes());
    backend.copier().to_host(out.data(), y.data(), out.size());
    return out;
  }

  Backend& backend;
  Layout layout;
  std::vector<std::vector<std::byte>> records;
  Buffer near, far, x, factors, normed, ids, table, y;
};

TEST(CudaRouted, LeavesWhatItReadsInMainMemory) {
  if (count_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device here (or a build without CUDA): the device's experts were not run";
  const auto backend = make_cuda_backend({});
  // 512 (of down), 2048 and 4096 columns are cut differently; 6144 take several steps; others are cut without regard to rows.
  struct Widths {
    std::int64_t dim, inner;
    bool mx = false;
  };
  for (const auto& [dim, inner, mx] : {Widths{1024, 512}, {2048, 512}, {2048, 768}, {4096, 512}, {6144, 2048}, {2880, 1408}, {704, 64}, {2880, 2880, true}, {704, 96, true}}) {
    Device s(*backend, Layout(dim, inner, mx));
    std::vector<std::int32_t> near_only;
    for (std::int32_t e = 0; e < kExperts; ++e) near_only.push_back(e), s.put(e, e);
    near_only.resize(kExperts + kLent, -1);
    const std::vector<std::int32_t> chosen{7, 2, 11, 0, 5, 9};
    bool leaves = true;
    const auto want = s.run(chosen, near_only, 0, leaves);
    EXPECT_FALSE(leaves);

    std::vector<std::int32_t> entries = near_only;
    const auto far = [&](std::int32_t e, std::int32_t slot) { entries[static_cast<std::size_t>(e)] = -2 - slot, s.put(e, -2 - slot); };
    far(2, 3), far(11, 0), far(5, 8), far(9, 15), far(4, 1);  // 4 is not chosen
    EXPECT_EQ(s.run(chosen, entries, 0, leaves), want) << dim << " x " << inner;
    EXPECT_FALSE(leaves);
    entries[kExperts] = 14, entries[kExperts + 1] = -1, entries[kExperts + 2] = 13;
    const std::vector<std::byte> trash(s.layout.bytes, std::byte{0xa5});
    for (std::int32_t slot : {12, 13, 14, 15}) s.backend.copier().to_device(s.near.data() + static_cast<std::size_t>(slot) * s.layout.bytes, trash.data(), trash.size());
    EXPECT_EQ(s.run(chosen, entries, kLent, leaves), want) << dim << " x " << inner;
    EXPECT_TRUE(leaves) << dim << " x " << inner;
    const auto same = [&](std::int32_t slot, std::size_t expert) { return s.layout.parts_of(s.slot(slot)) == s.layout.parts_of(s.records[expert]); };
    EXPECT_TRUE(same(14, 2)) << dim << " x " << inner << ": the first that was read in main memory";
    EXPECT_TRUE(same(13, 5)) << dim << " x " << inner << ": the third; no slot was lent to the second";
    EXPECT_TRUE(s.slot(12) == trash && s.slot(15) == trash) << "nobody's";
    EXPECT_TRUE(s.slot(7) == s.records[7] && s.slot(0) == s.records[0]);
  }
}

}  // namespace
}  // namespace moeflux::backend
