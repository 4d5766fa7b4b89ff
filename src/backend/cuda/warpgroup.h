// Instructions of compute capability 9.0 by name: products of a warpgroup (four warps) from shared memory, copies between blocks. Only
// for CUDA sources that are compiled for sm_90a as well (see CMakeLists.txt).
//
// Products read shared memory past the generic path: whoever wrote it calls fence_async() before saying so. Tiles are rows of 128 bytes
// (64 values of 16 bits) in blocks of eight rows, 1024 bytes, aligned to that; the 16-byte unit u of row r is stored at place u ^ (r % 8).
#pragma once

#include <cstdint>

#include "backend/cuda/cluster.h"

namespace moeflux::backend::cuda {

// 2^x but for some 2^-22 of it; 0 for -inf.
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two f16 as f32, the low half first.
__device__ inline float2 from_halves(std::uint32_t two) {
  float2 out;
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}" : "=f"(out.x), "=f"(out.y) : "r"(two));
  return out;
}

}  // namespace moeflux::backend::cuda

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOEFLUX_WARPGROUPS 1

namespace moeflux::backend::cuda {

// Two values as f16, the first in the low half; what is too large becomes the largest f16.
__device__ inline std::uint32_t to_halves(float low, float high) {
  std::uint32_t out;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// What follows from x is computed here and not before the loop around: for kernels that have no registers for that.
__device__ inline std::uint64_t computed_here(std::uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ inline int computed_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- tiles

// Offset of unit `unit` (16 bytes) of a row in a tile of 128-byte rows.
__device__ inline std::uint32_t swizzled(int row, int unit) { return static_cast<std::uint32_t>(row * 128 + ((unit ^ (row & 7)) << 4)); }

// Where an operand lies. Rows are its outer dimension (heads or keys with the summed dimension inside a row): eight rows are `block`
// bytes from the next eight, `panel` is not used. Rows are the summed dimension: eight of them are `block` bytes from the next eight, 64
// values of the outer dimension `panel` bytes from the next 64. Adding bytes / 16 moves it.
__device__ inline std::uint64_t operand(std::uint32_t address, int panel, int block) {
  return static_cast<std::uint64_t>((address & 0x3ffffu) >> 4) | static_cast<std::uint64_t>(panel >> 4) << 16 |
         static_cast<std::uint64_t>(block >> 4) << 32 | std::uint64_t{1} << 62;
}

// Before the first product of a batch: registers that were written are seen by it. Then products, commit, and wait until at most
// `Left` batches are not done.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// The compiler must not move uses of accumulators over a wait.
template <int N>
__device__ inline void pin(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// c (64 x 64) = or += a (64 x 16) b (16 x 64), both with the summed dimension inside rows. f16 in, f32 sums. Thread t of the warpgroup has
// c[4 i + 2 j + e] = C[t / 32 * 16 + t % 32 / 4 + 8 j][8 i + t % 4 * 2 + e].
__device__ inline void product_64x64(float (&c)[32], std::uint64_t a, std::uint64_t b, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n"
      "}\n"
      :
        "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
        "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
        "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
        "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// c (64 x 128) += a (64 x 16) b (16 x 128): the rows of b are the summed dimension.
__device__ inline void product_64x128(float (&c)[64], std::uint64_t a, std::uint64_t b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 1;\n"
      "}\n"
      :
        "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
        "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
        "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
        "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
        "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]),
        "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
        "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
        "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
      : "l"(a), "l"(b));
}

// Starts bringing bytes (16 at a time, so aligned) of global memory to the second-level cache.
__device__ inline void fetch_to_cache(const void* global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Of shared memory alone: with global memory it would wait for everything that is under way there (1000 cycles and more).
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of a thread from here on, for a whole warpgroup.
template <int N>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// `threads` threads of the block, which name the barrier `id` (1 to 15).
__device__ inline void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Starts copying bytes (16 at a time) of this block's shared memory to another block's, whose barrier counts them. Past the generic path.
__device__ inline void copy_there(std::uint32_t to, std::uint32_t from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ inline void store_shared(std::uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void store_shared(std::uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
__device__ inline void store_shared(std::uint32_t address, std::uint32_t v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }

// Starts copying bytes (16 at a time) of shared memory to global memory; the thread waits until all of its copies
// have read theirs. They are there when the kernel has ended.
__device__ inline void copy_out(void* global, std::uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(from), "r"(bytes) : "memory");
}
__device__ inline void copies_out_wait() { asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace moeflux::backend::cuda

#endif
