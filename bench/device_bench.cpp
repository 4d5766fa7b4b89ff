// Times ops of a decoded token on a CUDA device, as they run there: recorded, behind each other, kernels overlapping.
//
//   device_bench [--device N] [--only matvec|experts|latent]
//
// A row is one op repeated over memory of its own (over a gigabyte in all, so that nothing comes from a cache). Its time is what a step
// of twice as many takes longer, divided by their number: what a step itself costs is not the op's. Its bytes are shown as a share of what
// `moeflux doctor` probes.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "backend/cuda_backend.h"
#include "core/error.h"

namespace moeflux::bench {
namespace {

using backend::Backend;
constexpr int kReplays = 50, kRounds = 7;

class Device {
 public:
  explicit Device(int device) : backend(backend::make_cuda_backend({device})) {
    memory_rate = backend::probe_cuda_rates(device).memory;
  }

  // Not zeros everywhere, and no NaN: any bits are a code, 0x3c a small scale.
  Buffer bytes(std::size_t n) {
    Buffer b = backend->allocator().allocate(n, 256);
    if (pattern_.empty()) {
      std::mt19937 rng(1);
      while (pattern_.size() < kPatternBytes) pattern_.push_back(static_cast<std::byte>(rng() >> 8 & 0x3f));
    }
    for (std::size_t at = 0; at < n; at += kPatternBytes) backend->copier().to_device(b.data() + at, pattern_.data(), std::min(kPatternBytes, n - at));
    return b;
  }

  // Microseconds of one of n ops.
  double time(int n, std::int64_t pos, const std::function<void(Backend&, backend::Stream&)>& ops) { return (step_time(2, pos, ops) - step_time(1, pos, ops)) / n; }

  // Of a step of all of them, so many times: the median of some rounds of replays.
  double step_time(int times, std::int64_t pos, const std::function<void(Backend&, backend::Stream&)>& ops) {
    const std::vector<std::int32_t> tokens{1};
    const auto stream = backend->create_stream();  // with recordings of its own
    const auto step = [&] {
      if (backend->begin_step(*stream, tokens, pos, true)) return;
      for (int i = 0; i < times; ++i) ops(*backend, *stream);
      backend->end_step(*stream, true);
    };
    for (int i = 0; i < 4; ++i) step();
    backend->synchronize(*stream);
    std::vector<double> rounds;
    for (int r = 0; r < kRounds; ++r) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kReplays; ++i) step();
      backend->synchronize(*stream);
      rounds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / kReplays);
    }
    std::sort(rounds.begin(), rounds.end());
    return rounds[kRounds / 2];
  }

  void row(const std::string& name, double us, double op_bytes) const {
    fmt::print("{:44} {:8.2f} us {:8.2f} MB {:6.2f} TB/s {:5.1f} %\n", name, us, op_bytes / 1e6, op_bytes / us / 1e6, op_bytes / us * 1e6 / memory_rate * 100);
  }

  std::unique_ptr<Backend> backend;
  double memory_rate = 0;

 private:
  static constexpr std::size_t kPatternBytes = 8u << 20;
  std::vector<std::byte> pattern_;
};

// Matrices where a model has them: tensors lie behind each other in blocks, large ones have their own (store/trunk_store.cpp).
class Trunk {
 public:
  explicit Trunk(Device& device) : device_(device) {}

  quant::MatrixView matrix(std::int64_t rows, std::int64_t cols) {
    quant::MatrixView v;
    v.format = quant::Format::affine(4, 64, DType::BF16);
    v.rows = rows, v.cols = cols;
    v.data = add(static_cast<std::size_t>(rows) * v.row_bytes());
    v.scales = add(static_cast<std::size_t>(rows) * v.scale_row_bytes());
    v.biases = add(static_cast<std::size_t>(rows) * v.scale_row_bytes());
    return v;
  }

 private:
  static constexpr std::size_t kBlockBytes = 16u << 20, kAlign = 64;

  const std::byte* add(std::size_t bytes) {
    if (bytes >= kBlockBytes) return buffers_.emplace_back(device_.bytes(bytes)).data();
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
    if (bytes > free_bytes_) free_ = buffers_.emplace_back(device_.bytes(kBlockBytes)).data(), free_bytes_ = kBlockBytes;
    free_bytes_ -= bytes;
    return std::exchange(free_, free_ + bytes);
  }

  Device& device_;
  std::vector<Buffer> buffers_;
  const std::byte* free_ = nullptr;
  std::size_t free_bytes_ = 0;
};

// A norm and n matvecs of its result.
void matvec(Device& d, const std::vector<std::int64_t>& rows, std::int64_t cols) {
  std::int64_t all_rows = 0;
  std::string name = "matvec";
  for (std::int64_t r : rows) all_rows += r, name += fmt::format("{}{}", r == rows.front() ? " " : "+", r);
  const double op_bytes = static_cast<double>(quant::Format::affine(4, 64, DType::BF16).matrix_bytes(static_cast<std::uint64_t>(all_rows), static_cast<std::uint64_t>(cols)));
  const int n = std::max(4, static_cast<int>(1.2e9 / op_bytes));
  Trunk trunk(d);
  std::vector<std::vector<backend::MatMulPart>> parts(static_cast<std::size_t>(n));
  Buffer x = d.bytes(static_cast<std::size_t>(cols) * 4), factors = d.bytes(static_cast<std::size_t>(cols) * 4), normed = d.bytes(static_cast<std::size_t>(cols) * 4);
  Buffer y = d.bytes(static_cast<std::size_t>(all_rows) * 4);
  for (auto& p : parts) {
    std::int64_t at = 0;
    for (std::int64_t r : rows) {
      p.push_back({trunk.matrix(r, cols), {}, view_f32(y.as<float>() + at, {1, r})});
      at += r;
    }
  }
  const double us = d.time(n, 0, [&](Backend& b, backend::Stream& s) {
    b.run(s, backend::RmsNorm{view_f32(x.as<float>(), {1, cols}), view_f32(factors.as<float>(), {cols}), view_f32(normed.as<float>(), {1, cols}), 1e-6f});
    for (const auto& p : parts) b.run(s, backend::MatMul{view_f32(normed.as<float>(), {1, cols}), p, Precision::Fast});
  });
  d.row(fmt::format("{} x {}, {} in a row", name, cols, n), us, op_bytes);
}

// One token over a latent cache.
void latent(Device& d, std::int64_t n_keys, DType dtype) {
  constexpr std::int64_t kHeads = 128, kRow = 576, kValues = 512;
  const double op_bytes = static_cast<double>(n_keys * kRow) * (dtype == DType::F16 ? 2 : 4);
  constexpr int kOps = 64;
  const int n_caches = std::clamp(static_cast<int>(1.2e9 / op_bytes), 4, kOps);
  std::vector<Buffer> caches;
  for (int i = 0; i < n_caches; ++i) caches.push_back(d.bytes(static_cast<std::size_t>(op_bytes)));
  Buffer q = d.bytes(kHeads * kRow * 4), y = d.bytes(kHeads * kValues * 4);
  const double us = d.time(kOps, n_keys - 1, [&](Backend& b, backend::Stream& s) {
    for (int i = 0; i < kOps; ++i) {
      backend::Attention a;
      a.q = view_f32(q.as<float>(), {1, kHeads, kRow});
      a.k = make_view(caches[static_cast<std::size_t>(i % n_caches)].data(), dtype, {n_keys, 1, kRow});
      a.v = a.k;
      a.v.dims[2] = kValues;
      a.y = view_f32(y.as<float>(), {1, kHeads, kValues});
      a.pos0 = n_keys - 1, a.scale = 0.01f, a.precision = Precision::Fast;
      b.run(s, a);
    }
  });
  d.row(fmt::format("latent attention, {} keys, {}, {} in a row", n_keys, dtype == DType::F16 ? "f16" : "f32", kOps), us, op_bytes);
}

// One token's routed experts and a shared one, `far` of them in main memory, which the device reads over the link.
void experts(Device& d, std::int64_t dim, std::int64_t inner, std::int64_t top_k, int far) {
  const std::int64_t n_ops = std::clamp<std::int64_t>(std::int64_t{1200000000} / (dim * inner * 3 * 9 / 16 * (top_k + 1)), 8, 64);
  const quant::Format format = quant::Format::affine(4, 64, DType::BF16);
  std::size_t slot_bytes = 0;
  const auto matrices = [&](std::byte* base) {
    std::size_t at = 0;
    const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
      quant::MatrixView v;
      v.format = format, v.rows = rows, v.cols = cols;
      v.data = base + at, at += static_cast<std::size_t>(rows) * v.row_bytes();
      v.scales = base + at, at += static_cast<std::size_t>(rows) * v.scale_row_bytes();
      v.biases = base + at, at += static_cast<std::size_t>(rows) * v.scale_row_bytes();
      return v;
    };
    backend::FfnMatrices m;
    m.gate = matrix(inner, dim), m.up = matrix(inner, dim), m.down = matrix(dim, inner);
    slot_bytes = at;
    return m;
  };
  matrices(nullptr);
  const Buffer near_slots = d.bytes(slot_bytes * static_cast<std::size_t>(n_ops * (top_k + 1 - far)));
  const Buffer far_slots = d.backend->pinned_allocator().allocate(slot_bytes * std::max<std::size_t>(1, static_cast<std::size_t>(n_ops * far)), 4096);
  std::memset(far_slots.data(), 0x3c, far_slots.bytes());
  std::vector<std::int32_t> ids(static_cast<std::size_t>(n_ops * top_k)), slots(ids.size());
  std::int32_t near = 0, distant = 0;
  for (std::int32_t i = 0; i < n_ops * top_k; ++i) ids[static_cast<std::size_t>(i)] = i, slots[static_cast<std::size_t>(i)] = i * 5 % static_cast<std::int32_t>(top_k) < far ? -2 - distant++ : near++;
  Buffer device_ids = d.bytes(ids.size() * 4), device_slots = d.bytes(slots.size() * 4);
  d.backend->copier().to_device(device_ids.data(), reinterpret_cast<const std::byte*>(ids.data()), ids.size() * 4);
  d.backend->copier().to_device(device_slots.data(), reinterpret_cast<const std::byte*>(slots.data()), slots.size() * 4);
  const auto floats = [&](std::int64_t n) { return d.bytes(static_cast<std::size_t>(n) * 4); };
  Buffer x = floats(dim), factors = floats(dim), normed = floats(dim), y = floats(top_k * dim), shared_y = floats(dim);
  const double us = d.time(static_cast<int>(n_ops), 0, [&](Backend& b, backend::Stream& s) {
    b.run(s, backend::RmsNorm{view_f32(x.as<float>(), {1, dim}), view_f32(factors.as<float>(), {dim}), view_f32(normed.as<float>(), {1, dim}), 1e-6f});
    for (std::int64_t i = 0; i < n_ops; ++i) {
      backend::RoutedFfn op;
      op.x = view_f32(normed.as<float>(), {1, dim});
      op.ids = make_view(device_ids.data() + i * top_k * 4, DType::I32, {1, top_k});
      op.first = matrices(near_slots.data());
      op.stride = slot_bytes, op.slot_of = device_slots.as<std::int32_t>();
      op.host_offset = far_slots.data() - near_slots.data();
      op.n_experts = n_ops * top_k;
      op.y = view_f32(y.as<float>(), {top_k, dim});
      op.shared = matrices(near_slots.data() + slot_bytes * static_cast<std::size_t>(near + i));
      op.shared_y = view_f32(shared_y.as<float>(), {1, dim});
      op.precision = Precision::Fast;
      b.run_routed(s, op);
    }
  });
  d.row(fmt::format("{} + 1 experts of {} x {}, {} over the link", top_k, inner, dim, far), us, static_cast<double>(slot_bytes) * static_cast<double>(top_k + 1));
}

int run(int argc, char** argv) {
  int device = 0;
  std::string_view only;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view option = argv[i];
    if (i + 1 == argc || (option != "--device" && option != "--only")) {
      fmt::print(stderr, "usage: device_bench [--device N] [--only matvec|experts|latent]\n");
      return 2;
    }
    if (option == "--device")
      device = std::atoi(argv[i + 1]);
    else
      only = argv[i + 1];
  }
  const auto wanted = [only](std::string_view kind) { return only.empty() || only == kind; };
  Device d(device);
  fmt::print("device memory reads {:.2f} TB/s\n", d.memory_rate / 1e12);
  if (wanted("matvec")) {
    matvec(d, {248320}, 2048);
    matvec(d, {8192, 4096}, 2048);
    matvec(d, {8192}, 2048);
    matvec(d, {8192, 512, 512}, 2048);
    matvec(d, {2048}, 4096);
    matvec(d, {5120}, 2880);
    matvec(d, {2048}, 5632);
  }
  if (wanted("experts")) {
    for (int far : {0, 1, 2, 3}) experts(d, 2048, 512, 8, far);
    experts(d, 2048, 768, 8, 0);
    experts(d, 2880, 2880, 4, 0);
    experts(d, 4096, 1408, 8, 0);
  }
  if (wanted("latent"))
    for (DType dtype : {DType::F32, DType::F16})
      for (std::int64_t n_keys : {32768, 4096}) latent(d, n_keys, dtype);
  return 0;
}

}  // namespace
}  // namespace moeflux::bench

int main(int argc, char** argv) {
  try {
    return moeflux::bench::run(argc, argv);
  } catch (const moeflux::Error& e) {
    fmt::print(stderr, "device_bench: {}\n", e.what());
    return 1;
  }
}
