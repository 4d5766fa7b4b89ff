// Blocks of a cluster and the barriers between them, by name: what compute capability 9.0 and newer have (MOEFLUX_CLUSTERS). Only for
// CUDA sources; code for older devices has kernels of clusters without a body, and they are never launched (Traits).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moeflux::backend::cuda {

__device__ inline std::uint32_t shared_address(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MOEFLUX_CLUSTERS 1

// ---- barriers: `address` is 8 bytes of shared memory

__device__ inline void barrier_init(std::uint32_t address, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
}
// Initialized barriers are seen by the cluster once it has met (cluster_come, cluster_go).
__device__ inline void barriers_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Says to the barrier at `address` that what this thread did before is done: of this block, or (neighbour()) of another of the cluster.
// What was done is seen by threads of this block only; nothing stronger is asked for, because that waits for global memory.
__device__ inline void barrier_arrive(std::uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ inline void barrier_arrive_there(std::uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
// The same of this block, and that the phase needs `bytes` of copies as well.
__device__ inline void barrier_arrive_expecting(std::uint32_t address, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}

// Until all arrivals (and bytes) of the barrier's phase number `phase` (only its last bit counts) are there.
__device__ inline void barrier_wait(std::uint32_t address, int phase) {
  std::uint32_t done = 0;
  while (done == 0)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(address), "r"(phase & 1)
        : "memory");
}

// ---- clusters

__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// This block's shared address as one of block `rank` of the cluster.
__device__ inline std::uint32_t neighbour(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
  return out;
}
// All threads of the cluster come, and go on when all have come. Orders no memory but barriers_done().
__device__ inline void cluster_come() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_go() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Stores to another block's shared memory (neighbour()), whose barrier counts the four bytes when they are there.
__device__ inline void store_there(std::uint32_t to, float v, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(__float_as_uint(v)), "r"(barrier) : "memory");
}

#endif

}  // namespace moeflux::backend::cuda
