#include "backend/cuda_backend.h"

#include "core/error.h"

namespace moeflux::backend {

int count_cuda_devices() noexcept { return 0; }

CudaDeviceInfo cuda_device_info(int) { fail(ErrorCode::Unsupported, "this build of moeflux has no CUDA support"); }

CudaRates probe_cuda_rates(int) { fail(ErrorCode::Unsupported, "this build of moeflux has no CUDA support"); }

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions&) {
  fail(ErrorCode::Unsupported,
       "this build of moeflux has no CUDA support; configure with -DMOEFLUX_CUDA=ON or run on the CPU");
}

}  // namespace moeflux::backend
