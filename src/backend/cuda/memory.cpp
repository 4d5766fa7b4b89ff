// Device and pinned memory, copies.
#include <algorithm>
#include <utility>

#include "backend/cuda/cuda_internal.h"
#include "core/error.h"
#include "core/units.h"

namespace moeflux::backend::cuda {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kWorthPinning = std::size_t{4} << 20;  // some huge pages

// Errors after which nothing works in this process any more, whatever is asked of the device.
bool device_is_lost(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorDevicesUnavailable:
    case cudaErrorContextIsDestroyed:
      return true;
    default:
      return false;
  }
}

}  // namespace

void raise(cudaError_t status, const char* what) {
  cudaGetLastError();  // the runtime keeps the last error until it is asked
  const ErrorCode code = status == cudaErrorMemoryAllocation ? ErrorCode::OutOfMemory
                         : status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice || status == cudaErrorNoKernelImageForDevice ||
                                 status == cudaErrorUnsupportedPtxVersion
                             ? ErrorCode::Unsupported
                             : ErrorCode::Internal;
  const char* const advice = device_is_lost(status) ? "; the device is lost to this process: nothing more can be computed on it, start again or use --backend cpu" : "";
  fail(code, "CUDA: {}: {} ({}){}", what, cudaGetErrorString(status), cudaGetErrorName(status), advice);
}

Buffer DeviceAllocator::allocate(std::size_t bytes, std::size_t) {  // cudaMalloc aligns to 256 at least
  if (bytes == 0) return {};
  check_cuda(cudaSetDevice(device_), "choosing the device");
  void* p = nullptr;
  const cudaError_t status = cudaMalloc(&p, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t available = 0, total = 0;
    cudaMemGetInfo(&available, &total);
    fail(ErrorCode::OutOfMemory, "cannot allocate {} of device memory: {} of {} are free; lower --vram, -c or --chunk, or end what else uses the device",
         format_bytes(bytes), format_bytes(available), format_bytes(total));
  }
  check_cuda(status, "allocating device memory");
  Buffer buffer(this, static_cast<std::byte*>(p), bytes);
  check_cuda(cudaMemset(p, 0, bytes), "clearing device memory");
  check_cuda(cudaDeviceSynchronize(), "clearing device memory");
  return buffer;
}

void DeviceAllocator::release(std::byte* data, std::size_t) noexcept {
  cudaSetDevice(device_);
  cudaFree(data);
}

// Null: the driver does not pin it.
std::byte* PinnedAllocator::pin_of_host(std::size_t bytes) {
  Buffer memory = host_->allocate(bytes, kPage);
  if (cudaHostRegister(memory.data(), bytes, cudaHostRegisterPortable | cudaHostRegisterMapped) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  void* seen = nullptr;  // by the device: under the same address wherever this backend runs
  if (cudaHostGetDevicePointer(&seen, memory.data(), 0) != cudaSuccess || seen != memory.data()) {
    cudaGetLastError();
    cudaHostUnregister(memory.data());
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  return pinned_.emplace_back(std::move(memory)).data();
}

Buffer PinnedAllocator::allocate(std::size_t bytes, std::size_t) {  // page-aligned
  if (bytes == 0) return {};
  check_cuda(cudaSetDevice(device_), "choosing the device");
  if (host_ != nullptr && bytes >= kWorthPinning)
    if (std::byte* const pinned = pin_of_host(bytes)) return Buffer(this, pinned, bytes);
  void* p = nullptr;
  const cudaError_t status = cudaHostAlloc(&p, bytes, cudaHostAllocPortable);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ErrorCode::OutOfMemory, "cannot pin {} of main memory; lower --ram", format_bytes(bytes));
  }
  check_cuda(status, "pinning memory");
  std::fill_n(static_cast<std::byte*>(p), bytes, std::byte{0});
  return Buffer(this, static_cast<std::byte*>(p), bytes);
}

void PinnedAllocator::release(std::byte* data, std::size_t) noexcept {
  cudaSetDevice(device_);
  const std::lock_guard lock(mutex_);
  const auto of_host = std::find_if(pinned_.begin(), pinned_.end(), [&](const Buffer& b) { return b.data() == data; });
  if (of_host == pinned_.end()) {
    cudaFreeHost(data);
    return;
  }
  cudaHostUnregister(data);
  pinned_.erase(of_host);
}

DeviceCopier::DeviceCopier(int device) : device_(device) {
  check_cuda(cudaSetDevice(device_), "choosing the device");
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating the copy stream");
}

DeviceCopier::~DeviceCopier() {
  cudaSetDevice(device_);
  cudaStreamDestroy(stream_);
}

void DeviceCopier::copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  check_cuda(cudaSetDevice(device_), "choosing the device");
  check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream_), "copying");
  check_cuda(cudaStreamSynchronize(stream_), "copying");
}

void DeviceCopier::to_device(std::byte* device, const std::byte* host, std::size_t bytes) { copy(device, host, bytes, cudaMemcpyHostToDevice); }
void DeviceCopier::to_host(std::byte* host, const std::byte* device, std::size_t bytes) { copy(host, device, bytes, cudaMemcpyDeviceToHost); }

}  // namespace moeflux::backend::cuda
