// How long the processor takes for some of one token's experts in pinned memory, which is what a device would
// wait for: with the driver's pages and huge ones, the link idle and in use, right after the last ones and
// after a pause. Random experts of 1.77 MB among 16 GB.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cuda_backend.h"
#include "core/clock.h"
#include "io/region_allocator.h"

using namespace moeflux;
using quant::Format;
using quant::MatrixView;

namespace {

constexpr std::int64_t kWidth = 2048, kInner = 512;
constexpr int kExperts = 9000, kRounds = 200, kMost = 8, kOnDevice = 64;

double microseconds(std::uint64_t from, std::uint64_t to) { return static_cast<double>(to - from) * 1e-3; }

struct Experts {
  Format format = Format::affine(4, 64, DType::BF16);
  std::size_t up = format.matrix_bytes(kInner, kWidth), down = format.matrix_bytes(kWidth, kInner),
              each = 2 * up + down;
  Buffer memory;

  // Any codes, scales that are small numbers.
  Experts(Allocator& allocator, int n)
      : memory(allocator.allocate(each * static_cast<std::size_t>(n), 4096)) {
    std::mt19937 rng(1);
    std::vector<std::uint32_t> words(each / 4);
    for (std::uint32_t& w : words) w = (rng() & 0x00ff00ffu) | 0x3c003c00u;
    for (int i = 0; i < n; ++i)
      std::memcpy(memory.data() + static_cast<std::size_t>(i) * each, words.data(), each);
  }
  MatrixView matrix(std::byte* at, std::int64_t rows, std::int64_t cols) const {
    MatrixView w;
    w.format = format, w.rows = rows, w.cols = cols, w.data = at;
    w.scales = at + static_cast<std::size_t>(rows) * format.row_bytes(static_cast<std::uint64_t>(cols));
    w.biases = w.scales + static_cast<std::uint64_t>(rows) * w.scale_row_bytes();
    return w;
  }
  backend::FfnMatrices expert(std::size_t i) const {
    std::byte* const at = memory.data() + i * each;
    return {matrix(at, kInner, kWidth),
            matrix(at + up, kInner, kWidth),
            matrix(at + 2 * up, kWidth, kInner),
            {},
            {},
            {}};
  }
};

// One copy after the other while it lives.
class BusyLink {
 public:
  BusyLink(backend::Backend& device, const Experts& from, std::byte* to)
      : thread_([&device, &from, to, this] {
          for (std::size_t i = 0; !stop_; ++i)
            device.copier().to_device(to + i % kOnDevice * from.each,
                                      from.memory.data() + i * 7 % kExperts * from.each, from.each);
        }) {}
  ~BusyLink() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

double median_of(backend::Backend& cpu, backend::Stream& stream, const Experts& experts, int n,
                 double pause) {
  std::mt19937 rng(2);
  std::vector<float> x(kWidth), y(kMost * kWidth);
  for (float& v : x) v = static_cast<float>(rng() % 1000) * 1e-3f - 0.5f;
  const std::int32_t row = 0;
  std::vector<std::int32_t> slots(kMost);
  for (int i = 0; i < kMost; ++i) slots[static_cast<std::size_t>(i)] = i;
  std::vector<double> taken;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<backend::ExpertWork> works;
    for (int i = 0; i < n; ++i)
      works.push_back({experts.expert(rng() % kExperts), std::span(&row, 1),
                       std::span(slots).subspan(static_cast<std::size_t>(i), 1)});
    for (const std::uint64_t start = now_ns(); microseconds(start, now_ns()) < pause;) {
    }
    backend::ExpertFfn op;
    op.x = view_f32(x.data(), {1, kWidth}), op.works = works, op.y = view_f32(y.data(), {kMost, kWidth}),
    op.precision = Precision::Fast;
    const std::uint64_t start = now_ns();
    cpu.run(stream, op);
    taken.push_back(microseconds(start, now_ns()));
  }
  std::nth_element(taken.begin(), taken.begin() + kRounds / 2, taken.end());
  return taken[kRounds / 2];
}

void table(std::string_view pages, backend::Backend& device) {
  const Experts experts(device.pinned_allocator(), kExperts);
  const Buffer on_device = device.allocator().allocate(experts.each * kOnDevice, 256);
  const auto cpu = backend::make_cpu_backend({});
  const auto stream = cpu->create_stream();
  cpu->expect(true);
  for (const bool busy : {false, true})
    for (const double pause : {0.0, 200.0}) {
      std::unique_ptr<BusyLink> link;
      if (busy) link = std::make_unique<BusyLink>(device, experts, on_device.data());
      fmt::print("{:6} {:5} {:4.0f} us pause:", pages, busy ? "busy" : "idle", pause);
      for (const int n : {1, 2, 3, 4, kMost}) {
        const double us = median_of(*cpu, *stream, experts, n, pause);
        fmt::print("  {}: {:5.1f} us {:4.0f} GB/s", n, us, static_cast<double>(experts.each) * n / us * 1e-3);
      }
      fmt::print("\n");
    }
  cpu->expect(false);
}

}  // namespace

int main() {
  if (backend::count_cuda_devices() == 0) {
    fmt::print("no CUDA device\n");
    return 0;
  }
  io::RegionAllocator huge;
  table("small", *backend::make_cuda_backend({0}));
  table("huge", *backend::make_cuda_backend({0, &huge}));
}
