// The GPU section of `moeflux doctor`: all it knows comes through backend/cuda_backend.h.
#include <moeflux/probe.h>

#include "backend/cuda_backend.h"
#include "core/error.h"

namespace moeflux {

GpuReport probe_gpus() {
  GpuReport report;
  try {
    report.devices.push_back({backend::make_cuda_backend({})->name()});
  } catch (const Error& error) {
    report.note = error.what();
  }
  return report;
}

}  // namespace moeflux
