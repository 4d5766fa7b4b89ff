// Devices, streams and recordings of steps.
#include "backend/cuda_backend.h"

#include <algorithm>

#include "backend/cuda/cuda_internal.h"
#include "core/error.h"
#include "core/units.h"

namespace moeflux::backend {
namespace cuda {

Traits traits_of(int device) {
  constexpr std::size_t kShared8 = std::size_t{99} << 10;
  const int code = code_capability();
  cudaDeviceProp p{};
  check_cuda(cudaGetDeviceProperties(&p, device), "asking for the device's properties");
  if (code == 0) {
    fail(ErrorCode::Unsupported, "{} has compute capability {}.{}, and this build has no code for it (see docs/gpu.md): run on the CPU with --backend cpu", p.name, p.major, p.minor);
  }
  Traits t;
  t.shared_bytes = p.sharedMemPerBlockOptin;
  if (code < 90) t.shared_bytes = std::min(t.shared_bytes, kShared8);
  t.overlap = t.clusters = code >= 90;
  t.warpgroups = code >= 90 && p.major == 9 && p.minor == 0;  // no part of later capabilities
  if (t.overlap && p.major == 9 && p.minor == 0) t.shared_percent = 75;  // 196 KiB; not measured elsewhere
  return t;
}

StreamHandles::~StreamHandles() {
  cudaSetDevice(device_);
  for (cudaStream_t s : free_) cudaStreamDestroy(s);
}

cudaStream_t StreamHandles::take() {
  const std::lock_guard lock(mutex_);
  if (!free_.empty()) {
    const cudaStream_t s = free_.back();
    free_.pop_back();
    return s;
  }
  free_.reserve(free_.capacity() + 1);  // for give_back
  check_cuda(cudaSetDevice(device_), "choosing the device");
  cudaStream_t s = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "creating a stream");
  return s;
}

void StreamHandles::give_back(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &capture) == cudaSuccess && capture == cudaStreamCaptureStatusNone) {
    const std::lock_guard lock(mutex_);
    free_.push_back(stream);
    return;
  }
  cudaGetLastError();
  cudaStreamDestroy(stream);
}

CudaStream::CudaStream(int device, const Traits& t, StreamHandles& handles, DeviceAllocator& allocator)
    : traits(t), device_(device), handle_(handles), allocator_(allocator) {
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&step_inputs), (kStepTokens + 1) * 4), "allocating a stream's inputs");
  check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&step_host), (kStepTokens + 1) * 4, cudaHostAllocPortable), "pinning a stream's inputs");
}

CudaStream::~CudaStream() {
  cudaSetDevice(device_);
  cudaStreamSynchronize(handle());
  forget_recordings();
  units.release();
  cudaFree(step_inputs);
  cudaFreeHost(step_host);
}

void CudaStream::forget_recordings() noexcept {
  for (auto& [key, r] : recordings)
    if (r.exec != nullptr) cudaGraphExecDestroy(r.exec);
  recordings.clear();
  recording = nullptr;
  units.forget();
}

std::byte* CudaStream::scratch(Scratch which, std::size_t bytes) {
  Buffer& buffer = scratch_[static_cast<std::size_t>(which)];
  if (buffer.bytes() >= bytes) return buffer.data();
  if (capturing) fail(ErrorCode::Internal, "a recorded step needs {} bytes of scratch memory, {} were there", bytes, buffer.bytes());
  check_cuda(cudaStreamSynchronize(handle()), "waiting for the stream");
  forget_recordings();
  buffer = Buffer();
  buffer = allocator_.allocate(bytes + bytes / 8, 256);
  return buffer.data();
}

std::byte* CudaStream::know(const TensorView& y) {
  constexpr std::int64_t kGroup = 64;
  const std::int64_t cols = y.rank == 3 ? y.dim(1) * y.dim(2) : y.dim(1);
  known_x = nullptr;
  if (y.dim(0) != 1 || cols % kGroup != 0) return nullptr;
  if (y.rank == 3 && (y.stride(1) != y.dim(2) || y.dim(2) % kGroup != 0)) return nullptr;
  known = scratch(Scratch::Known, static_cast<std::size_t>(cols + cols / kGroup * 8 + 15));  // in every step: the one that is recorded needs it there
  if (!overlap) return nullptr;
  known_x = y.f32();
  known_cols = cols;
  return known;
}

CudaStream::Position CudaStream::position(std::int64_t pos) const {
  if (pos == step_pos) return {step_inputs, static_cast<std::int32_t>(pos)};
  return {nullptr, static_cast<std::int32_t>(pos)};
}

CudaBackend::CudaBackend(const CudaOptions& options)
    : device_(options.device),
      traits_(traits_of(device_)),
      handles_(device_),
      allocator_(device_),
      pinned_(device_, options.host),
      copier_(device_),
      units_(device_) {
  cudaDeviceProp p{};
  check_cuda(cudaGetDeviceProperties(&p, device_), "asking for the device's properties");
  name_ = fmt::format("cuda {}, {}", device_, p.name);
}

std::unique_ptr<Stream> CudaBackend::create_stream() {
  check_cuda(cudaSetDevice(device_), "choosing the device");
  return std::make_unique<CudaStream>(device_, traits_, handles_, allocator_);
}

CudaStream& CudaBackend::use(Stream& stream, Known known) const {
  set_device();
  auto& s = static_cast<CudaStream&>(stream);
  s.launch_waiting();
  if (known == Known::Goes) s.known_x = nullptr;
  return s;
}

void CudaBackend::synchronize(Stream& stream) {
  CudaStream& s = use(stream);
  if (s.capturing) return;  // nothing runs yet; what is recorded keeps its order
  check_cuda(cudaStreamSynchronize(s.handle()), "computing");
}

// A step is recorded the second time it comes along: the first sizes the scratch memory. Attention over another number
// of key groups is another step, as it needs other blocks.
bool CudaBackend::begin_step(Stream& stream, std::span<const std::int32_t> tokens, std::int64_t pos0, bool repeatable) {
  CudaStream& s = use(stream);
  s.step_tokens = {};
  s.step_pos = -1;
  s.recording = nullptr;
  s.overlap = repeatable;
  if (!repeatable || tokens.size() > CudaStream::kStepTokens) return false;
  check_cuda(cudaStreamSynchronize(s.handle()), "computing");  // the pinned inputs of the step before are free
  s.step_host[0] = static_cast<std::int32_t>(pos0);
  std::copy(tokens.begin(), tokens.end(), s.step_host + 1);
  check_cuda(cudaMemcpyAsync(s.step_inputs, s.step_host, (tokens.size() + 1) * 4, cudaMemcpyHostToDevice, s.handle()), "copying a step's inputs");
  s.step_tokens = tokens;
  s.step_pos = pos0;
  constexpr std::int64_t kGroupKeys = Attention::kTile * Attention::kGroupTiles;
  const std::uint64_t key = tokens.size() << 32 | static_cast<std::uint64_t>(pos0 / kGroupKeys);
  CudaStream::Recording& r = s.recordings[key];
  if (r.exec != nullptr) {
    check_cuda(cudaGraphLaunch(r.exec, s.handle()), "replaying a step");
    return true;
  }
  s.recording = &r;
  if (r.seen++ == 0) return false;
  check_cuda(cudaStreamBeginCapture(s.handle(), cudaStreamCaptureModeThreadLocal), "recording a step");
  s.capturing = true;
  return false;
}

void CudaBackend::end_step(Stream& stream, bool complete) {
  CudaStream& s = use(stream);
  if (s.capturing) {
    s.capturing = false;
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(s.handle(), &graph);
    cudaError_t made = cudaSuccess;
    if (ended == cudaSuccess && complete) made = cudaGraphInstantiate(&s.recording->exec, graph, 0);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (complete) {
      check_cuda(ended, "recording a step");
      check_cuda(made, "preparing a recorded step");
      check_cuda(cudaGraphLaunch(s.recording->exec, s.handle()), "running a recorded step");
    } else {
      cudaGetLastError();
    }
  }
  s.step_tokens = {};
  s.step_pos = -1;
  s.recording = nullptr;
  s.overlap = false;
}

}  // namespace cuda

int count_cuda_devices() noexcept {
  int n = 0;
  const cudaError_t status = cudaGetDeviceCount(&n);
  if (status != cudaSuccess) cudaGetLastError();
  return status == cudaSuccess ? n : 0;
}

CudaDeviceInfo cuda_device_info(int device) {
  cudaDeviceProp p{};
  cuda::check_cuda(cudaGetDeviceProperties(&p, device), "asking for the device's properties");
  cuda::check_cuda(cudaSetDevice(device), "choosing the device");
  CudaDeviceInfo info;
  info.name = p.name;
  info.n_processors = p.multiProcessorCount;
  info.capability = p.major * 10 + p.minor;
  info.code = cuda::code_capability();
  cudaDriverGetVersion(&info.driver);
  cudaRuntimeGetVersion(&info.runtime);
  cuda::check_cuda(cudaMemGetInfo(&info.free_bytes, &info.total_bytes), "asking for free memory");
  return info;
}

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  int n = 0;
  const cudaError_t status = cudaGetDeviceCount(&n);
  if (status == cudaErrorNoDevice || (status == cudaSuccess && n == 0)) {
    cudaGetLastError();
    fail(ErrorCode::Unsupported, "this machine has no CUDA device; run on the CPU with --backend cpu");
  }
  if (status == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) fail(ErrorCode::Unsupported, "no CUDA driver was found; run on the CPU with --backend cpu");
    fail(ErrorCode::Unsupported, "the CUDA driver is for CUDA {}.{}, this build needs {}.{}: update the driver or run on the CPU", driver / 1000,
         driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  }
  cuda::check_cuda(status, "looking for devices");
  if (options.device < 0 || options.device >= n)
    fail(ErrorCode::InvalidArgument, "there is no CUDA device {}: this machine has {}", options.device, n);
  const CudaDeviceInfo info = cuda_device_info(options.device);
  constexpr int kOldest = 80;  // the first with 8-bit products of this shape and copies past the registers
  if (info.capability < kOldest)
    fail(ErrorCode::Unsupported, "{} has compute capability {}.{}, 8.0 is the oldest that is supported: run on the CPU with --backend cpu", info.name, info.capability / 10, info.capability % 10);
  return std::make_unique<cuda::CudaBackend>(options);
}

}  // namespace moeflux::backend
