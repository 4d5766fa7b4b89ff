#include <algorithm>
#include <thread>

#include "backend/cuda/cuda_internal.h"
#include "core/error.h"

namespace moeflux::backend::cuda {

DeviceAsyncCopier::DeviceAsyncCopier(int device) : device_(device) {
  check_cuda(cudaSetDevice(device_), "choosing the device");
  for (Lane& lane : lanes_) check_cuda(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "creating a copy stream");
}

DeviceAsyncCopier::~DeviceAsyncCopier() {
  cudaSetDevice(device_);
  for (Lane& lane : lanes_) {
    cudaStreamSynchronize(lane.stream);
    for (std::size_t i = lane.first; i < lane.jobs.size(); ++i) cudaEventDestroy(lane.jobs[i].end);
    cudaStreamDestroy(lane.stream);
  }
  for (cudaEvent_t e : free_events_) cudaEventDestroy(e);
}

cudaError_t DeviceAsyncCopier::queue(Lane& lane, CopyDirection direction, std::uint64_t tag, std::span<const CopyPart> parts) {
  cudaError_t status = cudaSetDevice(device_);
  cudaEvent_t end = nullptr;
  if (status == cudaSuccess && free_events_.empty()) {
    status = cudaEventCreateWithFlags(&end, cudaEventDisableTiming);
  } else if (status == cudaSuccess) {
    end = free_events_.back();
    free_events_.pop_back();
  }
  const cudaMemcpyKind kind = direction == CopyDirection::ToDevice ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  for (const CopyPart& p : parts)
    if (status == cudaSuccess && p.bytes > 0) status = cudaMemcpyAsync(p.to, p.from, p.bytes, kind, lane.stream);
  if (status == cudaSuccess) status = cudaEventRecord(end, lane.stream);
  if (status == cudaSuccess)
    lane.jobs.push_back({tag, end});
  else if (end != nullptr)
    free_events_.push_back(end);
  return status;
}

bool DeviceAsyncCopier::start(CopyDirection direction, std::uint64_t tag, std::span<const CopyPart> parts) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    const cudaError_t status = queue(lanes_[static_cast<std::size_t>(direction)], direction, tag, parts);
    if (status == cudaSuccess) return true;
    // Parts that were queued before the refusal may still write: nobody may use the memory before they have ended.
    cudaStreamSynchronize(lanes_[static_cast<std::size_t>(direction)].stream);
    cudaGetLastError();
    failure_ = fmt::format("{} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
  } catch (const std::exception& e) {
    failure_ = e.what();
  }
  return false;
}

std::size_t DeviceAsyncCopier::take(std::span<CopyCompletion> out) noexcept {
  std::size_t n = 0;
  for (std::size_t d = 0; d < lanes_.size(); ++d) {
    Lane& lane = lanes_[d];
    while (n < out.size() && lane.first < lane.jobs.size()) {
      const Job& job = lane.jobs[lane.first];
      const cudaError_t status = cudaEventQuery(job.end);
      if (status == cudaErrorNotReady) break;
      if (status != cudaSuccess) {
        cudaGetLastError();
        failure_ = fmt::format("{} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
      }
      out[n++] = {job.tag, static_cast<CopyDirection>(d), status == cudaSuccess};
      free_events_.push_back(job.end);
      ++lane.first;
    }
    if (lane.first == lane.jobs.size()) {
      lane.jobs.clear();
      lane.first = 0;
    } else if (lane.first > 1024) {  // a lane that never runs dry must not grow
      lane.jobs.erase(lane.jobs.begin(), lane.jobs.begin() + static_cast<std::ptrdiff_t>(lane.first));
      lane.first = 0;
    }
  }
  return n;
}

std::size_t DeviceAsyncCopier::poll(std::span<CopyCompletion> out) noexcept {
  const std::lock_guard lock(mutex_);
  return take(out);
}

std::size_t DeviceAsyncCopier::wait(std::span<CopyCompletion> out, std::chrono::nanoseconds timeout) noexcept {
  const auto end = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (const std::size_t n = take(out); n > 0) return n;
      if (std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& l) { return l.first == l.jobs.size(); })) return 0;
    }
    if (std::chrono::steady_clock::now() >= end) return 0;
    std::this_thread::yield();
  }
}

std::size_t DeviceAsyncCopier::outstanding() const noexcept {
  const std::lock_guard lock(mutex_);
  std::size_t n = 0;
  for (const Lane& l : lanes_) n += l.jobs.size() - l.first;
  return n;
}

std::string DeviceAsyncCopier::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace moeflux::backend::cuda
