// What this machine can do at most: the yardsticks of the micro-benchmarks.
#pragma once

namespace moeflux::bench {

struct Peaks {
  double read_gb_s = 0.0;  // memory read by all threads at once, buffers far larger than the caches
  double int_gop_s = 0.0;  // 8-bit multiply-adds in registers, two operations each, all threads; 0: no VNNI
  double f32_gop_s = 0.0;  // f32 fma in registers, two operations each, all threads; 0: no AVX-512
};

// Takes about a second; the best of several tries, because a probe that was disturbed is no peak. One thread
// is measured in processor time, which other processes disturb less than real time.
Peaks probe_peaks(int n_threads);

}  // namespace moeflux::bench
