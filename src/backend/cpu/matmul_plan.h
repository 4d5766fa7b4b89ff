// What MatMul and ExpertFfn share: activations in 8 bits, and many matrices cut into tasks of rows for one
// fork-join.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/cpu/cpu_internal.h"
#include "backend/ops.h"
#include "core/checked.h"

namespace moeflux::backend::cpu {

inline bool is_fast(const quant::MatrixView& w, Precision p) noexcept { return p == Precision::Fast && w.format.integer_codes(); }

// Group sizes in use: activations are quantized once for each that occurs.
inline constexpr std::int64_t kGroups[] = {32, 64, 128};
inline constexpr std::size_t kGroupSizes = 3;
inline std::size_t group_slot(const quant::MatrixView& w) noexcept {
  return w.format.group == 32 ? 0u : w.format.group == 64 ? 1u : 2u;
}

// Rows of activations in 8 bits while they are being written; see QuantizedRows for the layout.
struct QuantizedBuffer {
  std::int8_t* x8 = nullptr;
  float* d = nullptr;
  std::int32_t* sx = nullptr;
  std::int64_t cols = 0, group = 1;

  static std::size_t bytes(std::int64_t n, std::int64_t cols, std::int64_t group) noexcept {
    const auto count = static_cast<std::size_t>(n), groups = static_cast<std::size_t>(cols / group);
    return round_up(count * static_cast<std::size_t>(cols), 64) + 2 * round_up(count * groups * 4, 64);
  }
  static QuantizedBuffer at(std::byte* memory, std::int64_t n, std::int64_t cols,
                            std::int64_t group) noexcept {
    const auto count = static_cast<std::size_t>(n), groups = static_cast<std::size_t>(cols / group);
    QuantizedBuffer q;
    q.x8 = reinterpret_cast<std::int8_t*>(memory);
    q.d = reinterpret_cast<float*>(memory + round_up(count * static_cast<std::size_t>(cols), 64));
    q.sx =
        reinterpret_cast<std::int32_t*>(reinterpret_cast<std::byte*>(q.d) + round_up(count * groups * 4, 64));
    q.cols = cols;
    q.group = group;
    return q;
  }
  // From row `row` on.
  QuantizedRows rows(std::int64_t row, std::int64_t tile) const noexcept {
    return {x8 + row * cols, d + row * (cols / group), sx + row * (cols / group), tile};
  }
};

inline constexpr std::int64_t kMaxTokenTile = 16;

// For several matrices that meet the same activations: the largest.
inline std::int64_t tokens_per_tile(const KernelTable& k, const quant::MatrixView& w, std::int64_t n_tokens) noexcept {
  return k.token_tile == nullptr ? 1 : k.token_tile(w, n_tokens);
}

// Columns [c0, c1) (whole groups) of the tile of n <= `tile` rows that starts at row `first`; row i of the tile is
// x_of(i), pointing at column c0. `scratch` is a worker's (matmul_scratch_bytes of the columns).
template <class RowOf>
void quantize_tile(const KernelTable& k, const QuantizedBuffer& q, std::int64_t first, std::int64_t n, std::int64_t tile,
                   std::int64_t c0, std::int64_t c1, std::byte* scratch, const RowOf& x_of) noexcept {
  const std::int64_t groups = q.cols / q.group, g0 = c0 / q.group, width = c1 - c0,
                     n_groups = width / q.group;
  if (n == 1) {
    k.quantize_row(x_of(0), width, q.group, q.x8 + first * q.cols + c0, q.d + first * groups + g0,
                   q.sx + first * groups + g0);
    return;
  }
  const QuantizedBuffer tmp = QuantizedBuffer::at(scratch, n, width, q.group);
  const std::int8_t* x8[kMaxTokenTile];
  const float* d[kMaxTokenTile];
  const std::int32_t* sx[kMaxTokenTile];
  for (std::int64_t i = 0; i < n; ++i) {
    k.quantize_row(x_of(i), width, q.group, tmp.x8 + i * width, tmp.d + i * n_groups, tmp.sx + i * n_groups);
    x8[i] = tmp.x8 + i * width, d[i] = tmp.d + i * n_groups, sx[i] = tmp.sx + i * n_groups;
  }
  k.interleave(x8, d, sx, n, tile, width, n_groups, q.x8 + first * q.cols + c0 * n, q.d + first * groups + g0 * n,
               q.sx + first * groups + g0 * n);
}

// One matrix of a fork-join.
struct MatMulJob {
  MatMulBlock block;
  MatMulFn fn = nullptr;
  std::int64_t first_task = 0, rows_per_task = 1;
};

// Bytes of weights a task reads when tokens are few: many tasks per thread, so that the threads end together, each long enough to
// read memory at full speed, short enough to be handed to another thread when its own is held up. Smaller ones only so that every thread has
// some.
inline std::int64_t bytes_per_task(std::uint64_t total_bytes, int n_threads) noexcept {
  constexpr std::int64_t kTasksPerThread = 16, kLeastTasksPerThread = 2;
  const auto bytes = static_cast<std::int64_t>(total_bytes);
  const std::int64_t least = std::clamp<std::int64_t>(bytes / (kLeastTasksPerThread * n_threads), 8 << 10, 64 << 10);
  return std::clamp<std::int64_t>(bytes / (kTasksPerThread * n_threads), least, 256 << 10);
}

// Rows a task computes; one panel when tokens are many, whole tiles of rows when they are few.
inline std::int64_t rows_per_task(const quant::MatrixView& w, std::int64_t n_tokens,
                                  std::int64_t bytes) noexcept {
  if (n_tokens >= 64) return 32;
  const std::int64_t row = std::max<std::int64_t>(static_cast<std::int64_t>(w.bytes()) / std::max<std::int64_t>(w.rows, 1), 1);
  const std::int64_t tile = n_tokens > 1 ? 32 : 16;
  return std::max<std::int64_t>((bytes / row + tile / 2) / tile * tile, tile);
}

inline MatMulFn kernel_for(const KernelTable& k, const quant::MatrixView& w, Precision p) noexcept {
  const auto slot = static_cast<std::size_t>(format_slot(w.format));
  return is_fast(w, p) ? k.fast[slot] : k.exact[slot];
}

// Cuts the jobs into tasks and runs them in one fork-join. Worker scratch must be large enough already.
void run_jobs(ThreadPool& pool, CpuStream& s, std::span<MatMulJob> jobs);

}  // namespace moeflux::backend::cpu
