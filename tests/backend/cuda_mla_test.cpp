// Attention over a latent cache in precision fast on the device: against sums in f64, and the same bytes for every chunking, position
// and recording. Skipped where there is no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda_backend.h"
#include "core/float_bits.h"

namespace moeflux::backend {
namespace {

constexpr std::int64_t kValues = 512;

Backend* device() {
  static const std::unique_ptr<Backend> backend = count_cuda_devices() > 0 ? make_cuda_backend({}) : nullptr;
  return backend.get();
}

// Where not, attention over a latent cache computes the formula.
bool rounds_to_f16() {
  const CudaDeviceInfo info = cuda_device_info(0);
  return info.capability == 90 && info.code >= 90;
}

#define MOEFLUX_NEEDS_DEVICE() \
  if (device() == nullptr) GTEST_SKIP() << "no CUDA device here (or a build without CUDA): the device's attention was not run"

struct Shape {
  std::int64_t n_tokens = 1, n_keys = 1, n_heads = 128, hd = 576, gap = 0;  // keys of the last token; unused elements behind a row
  bool f16 = false;
  float scale = 0.3f;  // scores deviate by some 2.4: a part of the keys counts
  std::string name() const {
    return std::to_string(n_tokens) + " tokens, " + std::to_string(n_keys) + " keys, " + std::to_string(n_heads) + " heads of " + std::to_string(hd) + (f16 ? ", f16" : ", f32");
  }
  std::int64_t pos0() const { return n_keys - n_tokens; }
  std::int64_t row() const { return hd + gap; }
};

// Host copies of what an op reads, and the memory of the device. Rows of the cache behind the last key, and gaps, are NaN.
class Data {
 public:
  static constexpr std::int64_t kRowsBehind = 70;

  explicit Data(const Shape& s, unsigned seed = 1) : shape(s), stream(device()->create_stream()) {
    std::mt19937 rng(seed);
    const auto uniform = [&] { return static_cast<float>(rng() >> 8) * 0x1p-23f - 1.0f; };
    q.resize(static_cast<std::size_t>(s.n_tokens * s.n_heads * s.hd));
    for (float& x : q) x = uniform();
    k.assign(static_cast<std::size_t>((s.n_keys + kRowsBehind) * s.row()), std::numeric_limits<float>::quiet_NaN());
    for (std::int64_t j = 0; j < s.n_keys; ++j)
      for (std::int64_t i = 0; i < s.hd; ++i) k[static_cast<std::size_t>(j * s.row() + i)] = s.f16 ? f16_to_f32(f32_to_f16(uniform())) : uniform();
    q_memory = upload(q.data(), q.size() * 4);
    std::vector<std::uint16_t> halves;
    if (s.f16)
      for (const float x : k) halves.push_back(f32_to_f16(x));
    k_memory = s.f16 ? upload(halves.data(), halves.size() * 2) : upload(k.data(), k.size() * 4);
    y_memory = device()->allocator().allocate(static_cast<std::size_t>(s.n_tokens * s.n_heads * kValues) * 4, 256);
  }

  // Tokens [first, first + n) of the shape.
  Attention op(std::int64_t first, std::int64_t n, Precision precision = Precision::Fast) const {
    const DType dtype = shape.f16 ? DType::F16 : DType::F32;
    Attention a;
    a.q = view_f32(q_memory.as<float>(), {shape.n_tokens, shape.n_heads, shape.hd}).slice(first, n);
    a.k = make_view(k_memory.data(), dtype, {shape.n_keys + kRowsBehind, 1, shape.row()});
    a.k.dims[2] = shape.hd;
    a.v = a.k;
    a.v.dims[2] = kValues;
    a.y = view_f32(y_memory.as<float>(), {shape.n_tokens, shape.n_heads, kValues}).slice(first, n);
    a.pos0 = shape.pos0() + first, a.scale = shape.scale, a.precision = precision;
    return a;
  }

  std::vector<float> result() const {
    device()->synchronize(*stream);
    std::vector<float> y(static_cast<std::size_t>(shape.n_tokens * shape.n_heads * kValues));
    device()->copier().to_host(reinterpret_cast<std::byte*>(y.data()), y_memory.data(), y.size() * 4);
    return y;
  }
  void clear() const {
    device()->synchronize(*stream);
    const std::vector<float> nan(static_cast<std::size_t>(shape.n_tokens * shape.n_heads * kValues), std::numeric_limits<float>::quiet_NaN());
    device()->copier().to_device(y_memory.data(), reinterpret_cast<const std::byte*>(nan.data()), nan.size() * 4);
  }
  // In calls of `chunk` tokens.
  std::vector<float> run(std::int64_t chunk, Precision precision = Precision::Fast) const {
    clear();
    for (std::int64_t t = 0; t < shape.n_tokens; t += chunk) device()->run(*stream, op(t, std::min(chunk, shape.n_tokens - t), precision));
    return result();
  }

  Shape shape;
  std::unique_ptr<Stream> stream;
  std::vector<float> q, k;
  Buffer q_memory, k_memory, y_memory;

 private:
  static Buffer upload(const void* data, std::size_t bytes) {
    Buffer b = device()->allocator().allocate(bytes, 256);
    device()->copier().to_device(b.data(), static_cast<const std::byte*>(data), bytes);
    return b;
  }
};

double half(float x) { return static_cast<double>(f16_to_f32(f32_to_f16(x))); }

// One row in f64 from factors rounded to f16 (or as they are), with the error that may be.
//
// U = 2^-11 rounds a factor to f16, V = 2^-23 is a truncated sum's. Score: 36 steps of 16 products added up, each cut off at most: 612 V of
// the sum of magnitudes, 2 U more where the reference's factors are not rounded. Weight: what its score is off by (all logarithms are below
// 1: a factor of 1.5 holds), U of its rounding, exp and rescalings (10 of up to 2^-20 with their arguments' rounding), and 2^-37 of
// the largest, below which nothing is left of one. The divisor is the sum of the same weights, so an error e_j of weight p_j counts as
// p_j e_j |v_j - y|. Sums: 32 steps of 17 cuts a split, 64 roundings to merge; a value's U where it is not rounded in the reference. The
// result of a split's own keys is rounded to f16 before it counts: U of it (or half of the least f16, 2^-25) times the split's weight.
constexpr std::size_t kSplit = 512;
struct Row {
  std::vector<double> y, bound;
};
Row expected_row(const Data& d, std::int64_t t, std::int64_t h, bool rounded) {
  constexpr double kU = 0x1p-11, kV = 0x1p-23;
  const Shape& s = d.shape;
  const std::int64_t n = s.pos0() + t + 1;
  const float* q = &d.q[static_cast<std::size_t>((t * s.n_heads + h) * s.hd)];
  const auto value = [&](float x) { return rounded ? half(x) : static_cast<double>(x); };
  std::vector<double> qv(static_cast<std::size_t>(s.hd)), kv(static_cast<std::size_t>(n * s.hd)), p(static_cast<std::size_t>(n)), e(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < qv.size(); ++i) qv[i] = value(q[i]);
  double top = -HUGE_VAL, sum = 0.0;
  for (std::size_t j = 0; j < p.size(); ++j) {
    double dot = 0.0, size = 0.0;
    for (std::size_t i = 0; i < qv.size(); ++i) {
      const double x = kv[j * qv.size() + i] = value(d.k[j * static_cast<std::size_t>(s.row()) + i]);
      dot += qv[i] * x, size += std::fabs(qv[i] * x);
    }
    p[j] = dot * static_cast<double>(s.scale);
    e[j] = 1.5 * static_cast<double>(s.scale) * size * (612.0 * kV + (rounded ? 0.0 : 2.01 * kU)) + kU + 10 * 0x1p-20;
    top = std::max(top, p[j]);
  }
  for (double& x : p) x = std::exp(x - top), sum += x;
  Row row{std::vector<double>(kValues, 0.0), std::vector<double>(kValues, 0.0)};
  for (std::size_t first = 0; first < p.size(); first += kSplit)
    for (std::size_t i = 0; i < row.y.size(); ++i) {
      double part = 0.0;
      for (std::size_t j = first; j < std::min(p.size(), first + kSplit); ++j) part += p[j] / sum * kv[j * qv.size() + i];
      row.y[i] += part, row.bound[i] += std::fabs(part) * kU;
    }
  for (double& b : row.bound) b += 0x1p-25;
  for (std::size_t j = 0; j < p.size(); ++j)
    for (std::size_t i = 0; i < row.y.size(); ++i) {
      const double v = kv[j * qv.size() + i], w = p[j] / sum;
      row.bound[i] += (w * e[j] + 0x1p-37) * std::fabs(v - row.y[i]) + w * std::fabs(v) * ((32.0 * 17.0 + 64.0) * kV + (rounded ? 0.0 : kU));
    }
  return row;
}

void expect_close(const Data& d, const std::vector<float>& y) {
  const Shape& s = d.shape;
  for (std::int64_t t = 0; t < s.n_tokens; ++t)
    for (std::int64_t h = (t * 5) % 16; h < s.n_heads; h += 13) {
      for (const bool rounded : {true, false}) {
        const Row want = expected_row(d, t, h, rounded);
        for (std::size_t i = 0; i < want.y.size(); ++i) {
          const double got = static_cast<double>(y[static_cast<std::size_t>((t * s.n_heads + h) * kValues) + i]);
          if (std::fabs(got - want.y[i]) <= want.bound[i]) continue;
          ADD_FAILURE() << s.name() << ": token " << t << ", head " << h << ", value " << i << " is " << got << ", expected " << want.y[i] << " +- "
                        << want.bound[i] << (rounded ? " from rounded factors" : "");
          return;
        }
      }
    }
}

bool same_bytes(const std::vector<float>& a, const std::vector<float>& b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0; }

TEST(CudaLatentAttention, OneKeyIsItsValue) {
  MOEFLUX_NEEDS_DEVICE();
  const Data d({.n_tokens = 1, .n_keys = 1});
  const std::vector<float> y = d.run(1);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const float value = d.k[i % kValues];
    ASSERT_EQ(static_cast<double>(y[i]), rounds_to_f16() ? half(value) : static_cast<double>(value)) << i;
  }
}

TEST(CudaLatentAttention, EqualsSumsInDouble) {
  MOEFLUX_NEEDS_DEVICE();
  for (const bool f16 : {false, true})
    for (const std::int64_t n_heads : {16, 64, 128})
      for (const std::int64_t n_keys : {1, 2, 31, 513, 1500, 5000})
        for (const std::int64_t n_tokens : {1, 3, 7}) {
          if (n_tokens > n_keys) continue;
          const Data d({.n_tokens = n_tokens, .n_keys = n_keys, .n_heads = n_heads, .f16 = f16});
          expect_close(d, d.run(n_tokens));
          if (HasFailure()) return;
        }
}

TEST(CudaLatentAttention, OddShapes) {
  MOEFLUX_NEEDS_DEVICE();
  for (const bool f16 : {false, true})
    for (const Shape& shape : {Shape{.n_tokens = 2, .n_keys = 700, .n_heads = 48, .hd = 528, .f16 = f16}, Shape{.n_tokens = 2, .n_keys = 130, .n_heads = 192, .gap = 64, .f16 = f16},
                               Shape{.n_tokens = 1, .n_keys = 1025, .n_heads = 256, .hd = 544, .gap = 8, .f16 = f16}, Shape{.n_keys = 3000, .f16 = f16, .scale = 3.0f}}) {
      const Data d(shape);
      expect_close(d, d.run(shape.n_tokens));
    }
}

// What is too large for 16 bits is cut, nothing becomes infinite.
TEST(CudaLatentAttention, LargeValues) {
  MOEFLUX_NEEDS_DEVICE();
  Data d({.n_tokens = 1, .n_keys = 200, .n_heads = 64});
  std::vector<float> k(d.k.size());
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = d.k[i] * 1e6f;
  device()->copier().to_device(d.k_memory.data(), reinterpret_cast<const std::byte*>(k.data()), k.size() * 4);
  const float most = rounds_to_f16() ? 65504.5f : 1.001e6f;
  for (const float y : d.run(1)) ASSERT_LE(std::fabs(y), most);
}

// All scores below what 2^x can be: only their differences count, and splits that are not there do not.
TEST(CudaLatentAttention, LowScores) {
  MOEFLUX_NEEDS_DEVICE();
  Data d({.n_tokens = 1, .n_keys = 700, .n_heads = 64, .scale = 1.5f});
  for (float& x : d.q) x = std::fabs(x);
  for (float& x : d.k) x = -std::fabs(x);
  device()->copier().to_device(d.q_memory.data(), reinterpret_cast<const std::byte*>(d.q.data()), d.q.size() * 4);
  device()->copier().to_device(d.k_memory.data(), reinterpret_cast<const std::byte*>(d.k.data()), d.k.size() * 4);
  expect_close(d, d.run(1));
}

TEST(CudaLatentAttention, EveryChunkingTheSameBytes) {
  MOEFLUX_NEEDS_DEVICE();
  for (const bool f16 : {false, true})
    for (const Shape& shape : {Shape{.n_tokens = 7, .n_keys = 7, .f16 = f16}, Shape{.n_tokens = 75, .n_keys = 1060, .f16 = f16}, Shape{.n_tokens = 30, .n_keys = 2600, .n_heads = 16, .f16 = f16}}) {
      const Data d(shape);
      const std::vector<float> whole = d.run(shape.n_tokens);
      for (const std::int64_t chunk : {1, 3, 16, 64}) EXPECT_TRUE(same_bytes(d.run(chunk), whole)) << shape.name() << " in chunks of " << chunk;
      EXPECT_TRUE(same_bytes(d.run(shape.n_tokens), whole)) << shape.name() << " again";
    }
}

// A step is recorded once and replayed at the other positions of its group of keys.
TEST(CudaLatentAttention, RecordedStepsTheSameBytes) {
  MOEFLUX_NEEDS_DEVICE();
  constexpr std::int64_t kFirst = 1500, kLast = 1560;  // 1536: another split
  const Data d({.n_tokens = kLast + 1 - kFirst, .n_keys = kLast + 1});
  const std::vector<float> want = d.run(1);
  d.clear();
  const std::int32_t token = 0;
  // A recording has its operands' addresses: every step computes the first row at its own position.
  Attention op = d.op(0, 1);
  for (std::int64_t t = 0; t < d.shape.n_tokens; ++t) {
    device()->copier().to_device(d.q_memory.data(), reinterpret_cast<const std::byte*>(&d.q[static_cast<std::size_t>(t * 128 * 576)]), 128 * 576 * 4);
    op.pos0 = kFirst + t;
    if (!device()->begin_step(*d.stream, {&token, 1}, op.pos0, true)) {
      device()->run(*d.stream, op);
      device()->end_step(*d.stream, true);
    } else {
      EXPECT_GT(t, 1);
    }
    std::vector<float> y = d.result();
    y.resize(128 * kValues);
    const auto from = want.begin() + t * 128 * kValues;
    EXPECT_TRUE(same_bytes(y, std::vector<float>(from, from + 128 * kValues))) << "position " << op.pos0;
  }
}

TEST(CudaLatentAttention, OnlyWhereItIsAllowed) {
  MOEFLUX_NEEDS_DEVICE();
  const Data d({.n_tokens = 2, .n_keys = 300});
  EXPECT_NE(same_bytes(d.run(2), d.run(2, Precision::Exact)), rounds_to_f16()) << "precision fast computes the formula exactly where the tensor cores are not used";
  for (const Shape& shape : {Shape{.n_tokens = 2, .n_keys = 300, .n_heads = 8}, Shape{.n_tokens = 2, .n_keys = 300, .n_heads = 128, .hd = 512}}) {
    const Data other(shape);
    EXPECT_TRUE(same_bytes(other.run(2), other.run(2, Precision::Exact))) << shape.name();
  }
}

}  // namespace
}  // namespace moeflux::backend
