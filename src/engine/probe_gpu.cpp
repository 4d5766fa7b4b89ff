// The GPU section of `moeflux doctor`: all it knows comes through backend/cuda_backend.h.
#include <moeflux/probe.h>

#include <fmt/format.h>

#include "backend/cuda_backend.h"
#include "core/error.h"

namespace moeflux {
namespace {

std::string cuda_version(int version) { return version == 0 ? "" : fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace

GpuDevice probe_gpu(int index, bool rates) {
  GpuDevice out;
  out.index = index;
  try {
    const backend::CudaDeviceInfo info = backend::cuda_device_info(index);
    out.name = info.name;
    out.capability = fmt::format("{}.{}", info.capability / 10, info.capability % 10);
    out.total_bytes = info.total_bytes;
    out.free_bytes = info.free_bytes;
    backend::make_cuda_backend({index});  // says why it cannot be used
    if (!rates) return out;
    const backend::CudaRates r = backend::probe_cuda_rates(index);
    out.memory_bytes_per_second = r.memory;
    out.to_device_bytes_per_second = r.to_device;
    out.to_host_bytes_per_second = r.to_host;
  } catch (const Error& error) {
    out.note = error.what();
  }
  return out;
}

GpuReport probe_gpus(bool rates) {
  GpuReport report;
  const int n = backend::count_cuda_devices();
  if (n == 0) {
    try {
      backend::make_cuda_backend({});
    } catch (const Error& error) {
      report.note = error.what();
    }
    return report;
  }
  for (int i = 0; i < n; ++i) report.devices.push_back(probe_gpu(i, rates));
  try {
    const backend::CudaDeviceInfo info = backend::cuda_device_info(0);
    report.driver = cuda_version(info.driver);
    report.runtime = cuda_version(info.runtime);
  } catch (const Error& error) {
    report.note = error.what();
  }
  return report;
}

}  // namespace moeflux
