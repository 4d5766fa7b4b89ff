#include "bench/peaks.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "io/region_allocator.h"

namespace moeflux::bench {
namespace {

constexpr std::size_t kBytesPerThread = std::size_t{128} << 20;
constexpr std::int64_t kSteps = 4'000'000;
constexpr int kChains = 12;  // more than latency (4 cycles) times two units
constexpr int kTries = 5;

template <class F>
double seconds_of(int n_threads, const F& fn) {
  if (n_threads == 1) {
    const std::clock_t from = std::clock();
    fn(0);
    return static_cast<double>(std::clock() - from) / CLOCKS_PER_SEC;
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 1; i < n_threads; ++i) threads.emplace_back([&fn, i] { fn(i); });
  fn(0);
  for (std::thread& t : threads) t.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void read_all(const std::uint8_t* p, std::size_t n) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (std::size_t i = 0; i < n; i += 256) {
    a = _mm512_or_si512(a, _mm512_loadu_si512(p + i));
    b = _mm512_or_si512(b, _mm512_loadu_si512(p + i + 64));
    c = _mm512_or_si512(c, _mm512_loadu_si512(p + i + 128));
    d = _mm512_or_si512(d, _mm512_loadu_si512(p + i + 192));
  }
  a = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
  asm volatile("" : : "v"(a));
}

__attribute__((target("avx512f,avx512vnni"))) void int_loop() {
  __m512i acc[kChains];
  const __m512i u = _mm512_set1_epi8(3), s = _mm512_set1_epi8(5);
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_setzero_si512();
  for (std::int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      acc[c] = _mm512_dpbusd_epi32(acc[c], u, s);
      asm volatile("" : "+v"(acc[c]));
    }
  }
}

__attribute__((target("avx512f"))) void f32_loop() {
  __m512 acc[kChains];
  const __m512 u = _mm512_set1_ps(0.5f);
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      acc[c] = _mm512_fmadd_ps(u, u, acc[c]);
      asm volatile("" : "+v"(acc[c]));
    }
  }
}
bool has_avx512() { return __builtin_cpu_supports("avx512f") != 0; }
bool has_vnni() { return __builtin_cpu_supports("avx512vnni") != 0; }
#else
void int_loop() {}
void f32_loop() {}
void read_all(const std::uint8_t*, std::size_t) {}
bool has_avx512() { return false; }
bool has_vnni() { return false; }
#endif

void read_portable(const std::uint8_t* p, std::size_t n) {
  std::uint64_t sum[8] = {};
  for (std::size_t i = 0; i < n; i += 64)
    for (std::size_t k = 0; k < 8; ++k) {
      std::uint64_t v;
      std::memcpy(&v, p + i + 8 * k, 8);
      sum[k] |= v;
    }
  for (std::uint64_t s : sum) asm volatile("" : : "r"(s));
}

double best_read(int n_threads) {
  io::RegionAllocator allocator;  // where weights lie
  std::vector<Buffer> memory;
  for (int i = 0; i < n_threads; ++i) memory.push_back(allocator.allocate(kBytesPerThread, 64));
  seconds_of(n_threads, [&](int i) { std::memset(memory[static_cast<std::size_t>(i)].data(), 1, kBytesPerThread); });
  double best = 0.0;
  for (int k = 0; k < kTries; ++k) {
    const double s = seconds_of(n_threads, [&](int i) {
      const auto* p = memory[static_cast<std::size_t>(i)].as<std::uint8_t>();
      has_avx512() ? read_all(p, kBytesPerThread) : read_portable(p, kBytesPerThread);
    });
    best = std::max(best, static_cast<double>(n_threads) * static_cast<double>(kBytesPerThread) / s * 1e-9);
  }
  return best;
}

template <class F>
double best_gop(int n_threads, double ops_per_step, const F& loop) {
  double best = 0.0;
  for (int k = 0; k < kTries; ++k) {
    const double s = seconds_of(n_threads, [&](int) { loop(); });
    best = std::max(best, static_cast<double>(n_threads) * static_cast<double>(kSteps) * kChains *
                              ops_per_step / s * 1e-9);
  }
  return best;
}

}  // namespace

Peaks probe_peaks(int n_threads) {
  Peaks p;
  p.read_gb_s = best_read(n_threads);
  if (has_vnni()) p.int_gop_s = best_gop(n_threads, 128.0, int_loop);
  if (has_avx512()) p.f32_gop_s = best_gop(n_threads, 32.0, f32_loop);
  return p;
}

}  // namespace moeflux::bench
