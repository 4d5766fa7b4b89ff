// How fast this device reads its memory and copies to and from the host's.
#include <algorithm>

#include "backend/cuda/cuda_internal.h"

namespace moeflux::backend {
namespace cuda {
namespace {

constexpr std::size_t kMemoryBytes = std::size_t{1} << 30;  // far beyond the second-level cache, so that beginning and end count little
constexpr std::size_t kLinkBytes = std::size_t{128} << 20;
constexpr int kTries = 5;
constexpr int kReadThreads = 512, kReadBlocks = 16;  // of a processor: more than it holds at once, so that none runs dry

// Sums everything so that nothing can be left out.
__global__ void __launch_bounds__(kReadThreads) read_kernel(const uint4* data, std::size_t n, unsigned* sink) {
  unsigned sum = 0;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    const uint4 v = __ldcs(data + i);
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}

// RAII for the handles of the probe.
struct Timer {
  explicit Timer(int device) {
    check_cuda(cudaSetDevice(device), "choosing the device");
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    for (cudaEvent_t& e : events) check_cuda(cudaEventCreate(&e), "creating an event");
  }
  ~Timer() {
    for (cudaEvent_t e : events)
      if (e != nullptr) cudaEventDestroy(e);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  template <class F>
  double best(std::size_t bytes, const F& work) {
    double most = 0;
    for (int i = 0; i < kTries; ++i) {
      check_cuda(cudaEventRecord(events[0], stream), "probing");
      work();
      check_cuda(cudaEventRecord(events[1], stream), "probing");
      check_cuda(cudaEventSynchronize(events[1]), "probing");
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, events[0], events[1]), "probing");
      if (ms > 0) most = std::max(most, static_cast<double>(bytes) * 1e3 / static_cast<double>(ms));
    }
    return most;
  }
  cudaStream_t stream = nullptr;
  cudaEvent_t events[2] = {nullptr, nullptr};
};

}  // namespace
}  // namespace cuda

CudaRates probe_cuda_rates(int device) {
  using namespace cuda;
  const CudaDeviceInfo info = cuda_device_info(device);
  const std::size_t memory_bytes = std::clamp(info.free_bytes / 4 / kLinkBytes * kLinkBytes, kLinkBytes, kMemoryBytes);
  DeviceAllocator memory(device);
  PinnedAllocator pinned(device, nullptr);
  Timer timer(device);
  const Buffer large = memory.allocate(memory_bytes, 256), sink = memory.allocate(256, 256), host = pinned.allocate(kLinkBytes, 4096);
  CudaRates rates;
  rates.memory = timer.best(memory_bytes, [&] {
    read_kernel<<<info.n_processors * kReadBlocks, kReadThreads, 0, timer.stream>>>(large.as<const uint4>(), memory_bytes / sizeof(uint4), sink.as<unsigned>());
    check_cuda(cudaGetLastError(), "probing");
  });
  rates.to_device = timer.best(kLinkBytes, [&] { check_cuda(cudaMemcpyAsync(large.data(), host.data(), kLinkBytes, cudaMemcpyHostToDevice, timer.stream), "probing"); });
  rates.to_host = timer.best(kLinkBytes, [&] { check_cuda(cudaMemcpyAsync(host.data(), large.data(), kLinkBytes, cudaMemcpyDeviceToHost, timer.stream), "probing"); });
  return rates;
}

}  // namespace moeflux::backend
