// The door to the CUDA backend. A build without CUDA has it too: there it throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "backend/backend.h"

namespace moeflux::backend {

// Tokens of a prompt that are best computed together: some hundred an expert fill the tensor cores' tiles.
inline constexpr std::int64_t kCudaChunk = 8192;

struct CudaOptions {
  int device = 0;
  Allocator* host = nullptr;  // whose memory is pinned; outlives the backend. Null: the driver's own, in small pages
};

struct CudaDeviceInfo {
  std::string name;
  int n_processors = 0;
  int capability = 0;  // 90 for 9.0
  int code = 0;        // the capability that this build's code for it was made for; 0: there is none
  std::size_t free_bytes = 0, total_bytes = 0;
  int driver = 0, runtime = 0;  // versions of CUDA: 12040 for 12.4
};

// Bytes per second, the best of several tries.
struct CudaRates {
  double memory = 0;               // reading device memory
  double to_device = 0, to_host = 0;  // copies of pinned memory, one direction at a time
};

// 0 where this build, this machine or its driver has no CUDA.
int count_cuda_devices() noexcept;
// Unsupported or Internal as make_cuda_backend.
CudaDeviceInfo cuda_device_info(int device);

// Takes some tenths of a second, half a gigabyte of device memory and an eighth of pinned memory while it runs. Throws as
// make_cuda_backend.
CudaRates probe_cuda_rates(int device);

// Ops are queued on the stream of a session; results equal the CPU backend's bit for bit. Memory of allocator() belongs to
// the device; host code reaches it by copier() alone. Throws Unsupported where this build or this machine has no CUDA or
// the driver is too old, InvalidArgument for a device that is not there. A failing device is Internal, a full one
// OutOfMemory.
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);

}  // namespace moeflux::backend
