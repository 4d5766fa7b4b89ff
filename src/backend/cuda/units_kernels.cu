// The two kernels of steps in units: the gate before a unit, and the check of a choice against the table of slots.
#include "backend/cuda/cuda_internal.h"
#include "backend/cuda/device.h"
#include "backend/cuda/units.h"

namespace moeflux::backend::cuda {
namespace {

__global__ void gate_kernel(cudaGraphConditionalHandle body, const std::int32_t* mark) { cudaGraphSetConditional(body, *mark == 0 ? 1u : 0u); }

// One warp.
__global__ void slot_check_kernel(std::int32_t* ids, int top_k, const std::int32_t* forced, const std::int32_t* slot_of, const std::int32_t* serial,
                                  UnitPostMemory* post, std::int32_t* mark) {
  begin_kernel();
  bool missed = false;
  for (int r = threadIdx.x; r < top_k; r += kWarp) {
    const std::int32_t id = forced != nullptr ? forced[r] : ids[r];
    if (forced != nullptr) ids[r] = id;
    post->ids[r] = id;
    missed = missed || slot_of[id] == -1;
  }
  missed = __any_sync(kAll, missed);
  __threadfence_system();
  __syncwarp();
  if (threadIdx.x != 0) return;
  post->missed = missed ? 1 : 0;
  if (missed) *mark = 1;
  __threadfence_system();
  *const_cast<volatile std::int32_t*>(&post->serial) = *serial;
}

// The same where nothing can be missed. Shares only of up to 32 experts.
__global__ void choice_check_kernel(std::int32_t* ids, int top_k, const ChoiceCheck check) {
  begin_kernel();
  const int lane = threadIdx.x;
  if (blockIdx.x > 0) return post_x(check, *check.serial);
  const std::int32_t share = check.shares != nullptr && lane < SlotCheck::kShares ? check.shares[lane] : 0;
  for (int r0 = 0; r0 < top_k; r0 += kWarp) {
    const int r = r0 + lane;
    const bool chosen = r < top_k;
    std::int32_t id = 0, slot = -1;
    if (chosen) {
      id = ids[r] = check.forced != nullptr ? check.forced[r] : ids[r];
      slot = check.slot_of[id];
    }
    const std::int32_t from = with_share(check, chosen, slot, share, lane);
    if (chosen) post_choice(check, id, r, slot, from, *check.serial);
  }
}

// Kernels read a step's inputs before they wait for the one before: this one overlaps with none.
__global__ void pull_kernel(const __grid_constant__ Pulls pulls) {
  for (std::uint32_t p = 0; p < pulls.n; ++p) {
    const Pulls::Pull& pull = pulls.pull[p];
    for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < pull.n_words; i += gridDim.x * blockDim.x) pull.to[i] = __ldcv(pull.from + i);
  }
}

}  // namespace

void launch_pulls(CudaStream& s, Pulls& pulls) {
  if (pulls.n == 0) return;
  constexpr int kThreads = 256, kMostBlocks = 64;
  std::uint32_t most = 0;
  for (std::uint32_t p = 0; p < pulls.n; ++p) most = most < pulls.pull[p].n_words ? pulls.pull[p].n_words : most;
  const int blocks = ceil_div(most, kThreads);
  pull_kernel<<<static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 0, s.handle()>>>(pulls);
  check_cuda(cudaGetLastError(), "copying a step's inputs");
  pulls.n = 0;
}

int code_capability() {
  cudaFuncAttributes a{};
  const cudaError_t status = cudaFuncGetAttributes(&a, slot_check_kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidKernelImage || status == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    return 0;
  }
  check_cuda(status, "asking for a kernel's code");
  return a.ptxVersion;
}

void* gate_function() { return reinterpret_cast<void*>(gate_kernel); }

void launch_slot_check(CudaStream& s, const SlotCheck& c, const std::int32_t* serial, UnitPostMemory* post, std::int32_t* mark) {
  launch(s, "slot check", slot_check_kernel, dim3(1), kWarp, 0, c.ids.i32(), static_cast<int>(c.ids.dim(1)), c.forced, c.slot_of, serial, post, mark);
}

void launch_choice_check(CudaStream& s, const SlotCheck& c, const ChoiceCheck& choice) {
  launch(s, "slot check", choice_check_kernel, dim3(choice.shares != nullptr ? 2 : 1), kWarp, 0, c.ids.i32(), static_cast<int>(c.ids.dim(1)), choice);
}

}  // namespace moeflux::backend::cuda
