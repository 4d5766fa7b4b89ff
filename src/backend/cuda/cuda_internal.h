// What the files of the CUDA backend share: the backend class, its streams with their scratch memory and recordings.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/units.h"
#include "backend/cuda_backend.h"
#include "core/buffer.h"

namespace moeflux::backend::cuda {

// Throws Internal (OutOfMemory where that is the reason) with what was being done.
[[noreturn]] void raise(cudaError_t status, const char* what);
inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) raise(status, what);
}

// What kernels may count on: what the device has, less what the code lacks that its driver has chosen. Code for 8.x has none of the three
// and takes no more shared memory than every device of 8.x has.
struct Traits {
  std::size_t shared_bytes = 0;  // most of a block
  bool overlap = false;          // kernels that start before the one before has ended (device.h)
  bool clusters = false;         // blocks that wait for each other in groups (cluster.h)
  bool warpgroups = false;       // products of four warps (warpgroup.h)
  // Per cent of a processor's cache that overlapping kernels want as shared memory, all of them the same; 0: as the driver likes. With more than
  // a matvec's own blocks need, those of the next one find room beside them (docs/experiments/gpu.md).
  unsigned shared_percent = 0;
};
// Unsupported where this build has no code for the device.
Traits traits_of(int device);
// The capability this build's code for the current device was made for, 90 for 9.0; 0: there is none.
int code_capability();

// Memory of one device; zero-filled.
class DeviceAllocator final : public Allocator {
 public:
  explicit DeviceAllocator(int device) : device_(device) {}
  Buffer allocate(std::size_t bytes, std::size_t alignment) override;

 protected:
  void release(std::byte* data, std::size_t bytes) noexcept override;

 private:
  int device_;
};

// Host memory that the device reads at full speed: that of `host` where there is one and a block is worth it, else the driver's.
class PinnedAllocator final : public Allocator {
 public:
  PinnedAllocator(int device, Allocator* host) : device_(device), host_(host) {}
  Buffer allocate(std::size_t bytes, std::size_t alignment) override;

 protected:
  void release(std::byte* data, std::size_t bytes) noexcept override;

 private:
  std::byte* pin_of_host(std::size_t bytes);

  int device_;
  Allocator* host_;
  std::mutex mutex_;
  std::vector<Buffer> pinned_;  // of host_
};

// Blocking copies on a stream of its own: independent of what sessions compute.
class DeviceCopier final : public Copier {
 public:
  explicit DeviceCopier(int device);
  ~DeviceCopier() override;
  void to_device(std::byte* device, const std::byte* host, std::size_t bytes) override;
  void to_host(std::byte* host, const std::byte* device, std::size_t bytes) override;

 private:
  void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
  int device_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
};

// Two streams, one a direction; a job ends with an event that is asked for. Waiting asks again and again: a copy takes some tens of
// microseconds, and waking up a thread as much.
class DeviceAsyncCopier final : public AsyncCopier {
 public:
  explicit DeviceAsyncCopier(int device);
  ~DeviceAsyncCopier() override;
  bool start(CopyDirection direction, std::uint64_t tag, std::span<const CopyPart> parts) noexcept override;
  std::size_t poll(std::span<CopyCompletion> out) noexcept override;
  std::size_t wait(std::span<CopyCompletion> out, std::chrono::nanoseconds timeout) noexcept override;
  std::size_t outstanding() const noexcept override;
  std::string failure() const override;

 private:
  struct Job {
    std::uint64_t tag;
    cudaEvent_t end;
  };
  struct Lane {
    cudaStream_t stream = nullptr;
    std::vector<Job> jobs;   // from `first` on: in flight
    std::size_t first = 0;
  };
  cudaError_t queue(Lane& lane, CopyDirection direction, std::uint64_t tag, std::span<const CopyPart> parts);
  // mutex_ held.
  std::size_t take(std::span<CopyCompletion> out) noexcept;

  int device_;
  mutable std::mutex mutex_;
  std::array<Lane, 2> lanes_;
  std::vector<cudaEvent_t> free_events_;
  std::string failure_;
};

// The driver's streams that ops run on, kept for the next session: on one that is made after two others have been used, kernels follow each
// other a quarter of a microsecond later (docs/experiments/gpu.md).
class StreamHandles {
 public:
  explicit StreamHandles(int device) : device_(device) {}
  ~StreamHandles();
  cudaStream_t take();
  void give_back(cudaStream_t stream) noexcept;  // at rest

 private:
  int device_;
  std::mutex mutex_;
  std::vector<cudaStream_t> free_;
};
class StreamHandle {
 public:
  explicit StreamHandle(StreamHandles& from) : from_(from), stream_(from.take()) {}
  ~StreamHandle() { from_.give_back(stream_); }
  StreamHandle(const StreamHandle&) = delete;
  StreamHandle& operator=(const StreamHandle&) = delete;
  cudaStream_t get() const noexcept { return stream_; }

 private:
  StreamHandles& from_;
  cudaStream_t stream_;
};

// Scratch buffers of a stream, by purpose. They grow to the largest need seen and stay.
enum class Scratch : std::uint8_t { Quantized, Quantized2, Inner, Partials, Tables, Lists, Tokens, Decoded, Known, Count };

class CudaStream;

// An op of a step of one token that is not launched yet, because the next one may go along with it. Ops that could are asked with
// CudaBackend::goes_along(); everything else launches it alone first (CudaBackend::use).
class WaitingOp {
 public:
  virtual ~WaitingOp() = default;
  virtual void launch_alone(CudaStream& s) = 0;
  // Both in one launch; false: they do not belong together, and nothing happened.
  virtual bool launch_with(CudaStream&, const RmsNorm&) { return false; }
  virtual bool launch_with(CudaStream&, const ChoiceCheck&) { return false; }
};

class CudaStream final : public Stream {
 public:
  CudaStream(int device, const Traits& traits, StreamHandles& handles, DeviceAllocator& allocator);
  ~CudaStream() override;

  const Traits traits;

  cudaStream_t handle() const noexcept { return handle_.get(); }
  // At least `bytes`; contents are not kept when it grows. Growing waits for the stream and forgets recordings, whose
  // kernels point into the old memory.
  std::byte* scratch(Scratch which, std::size_t bytes);
  template <class T>
  T* scratch_of(Scratch which, std::size_t count) {
    return reinterpret_cast<T*>(scratch(which, count * sizeof(T)));
  }
  // A position as a kernel parameter: a pointer where the step's own position is meant, so that a recording can be
  // replayed at another one.
  struct Position {
    const std::int32_t* at = nullptr;
    std::int32_t value = 0;
    __host__ __device__ std::int32_t get() const { return at != nullptr ? *at : value; }
  };
  Position position(std::int64_t pos) const;

  struct Recording {
    cudaGraphExec_t exec = nullptr;
    int seen = 0;  // eager runs before: the first one sizes the scratch memory
  };
  void forget_recordings() noexcept;

  // The step under way.
  std::span<const std::int32_t> step_tokens;
  std::int64_t step_pos = -1;
  bool capturing = false;
  bool overlap = false;  // kernels may start before the one before has ended: steps of few tokens
  Recording* recording = nullptr;
  std::map<std::uint64_t, Recording> recordings;
  std::int32_t* step_inputs = nullptr;  // device: [0] the position, [1..] tokens
  std::int32_t* step_host = nullptr;    // pinned, the same
  static constexpr std::size_t kStepTokens = 15;
  std::unique_ptr<WaitingOp> waiting;
  void launch_waiting() {
    if (waiting != nullptr) std::exchange(waiting, nullptr)->launch_alone(*this);
  }

  // One token's activations that the kernel which made them has also written in 8 bits, for the matvecs that read them next.
  // know(): where to write those of y; null where nobody would look (no step of one token, or a shape they do not take).
  // known_of(): them, or null.
  std::byte* know(const TensorView& y);
  const std::byte* known_of(const float* x, std::int64_t cols) const { return x == known_x && cols == known_cols ? known : nullptr; }
  const float* known_x = nullptr;
  std::int64_t known_cols = 0;
  std::byte* known = nullptr;
  UnitState units;

 private:
  int device_;
  StreamHandle handle_;
  DeviceAllocator& allocator_;
  std::array<Buffer, static_cast<std::size_t>(Scratch::Count)> scratch_;
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const CudaOptions& options);

  std::string name() const override { return name_; }
  std::unique_ptr<Stream> create_stream() override;
  void synchronize(Stream& stream) override;
  Allocator& allocator() noexcept override { return allocator_; }
  Allocator& pinned_allocator() noexcept override { return pinned_; }
  Copier& copier() noexcept override { return copier_; }
  bool reads_pinned() const noexcept override { return true; }
  std::unique_ptr<AsyncCopier> make_async_copier() override { return std::make_unique<DeviceAsyncCopier>(device_); }
  void run_sequence(Stream& stream, const DeltaMix& m) override;
  void run_sequence(Stream& stream, const HeadInputs& m) override;
  bool routes_on_device() const noexcept override { return true; }
  bool run_routed(Stream& stream, const RoutedFfn& op) override;
  bool begin_step(Stream& stream, std::span<const std::int32_t> tokens, std::int64_t pos0, bool repeatable) override;
  void end_step(Stream& stream, bool complete) override;
  UnitRunner* units() noexcept override { return &units_; }

 protected:
#define MOEFLUX_CUDA_OP(Op) void execute(Stream& stream, const Op& op) override;
  MOEFLUX_FOR_EACH_OP(MOEFLUX_CUDA_OP)
#undef MOEFLUX_CUDA_OP

 private:
  // The stream as its own type, with the device made current for this thread. Known::Stays: the op about to run writes nothing that
  // CudaStream::known_x may stand for.
  enum class Known : std::uint8_t { Goes, Stays };
  CudaStream& use(Stream& stream, Known known = Known::Goes) const;
  // Launches the waiting op together with this one, where they belong together.
  template <class Op>
  bool goes_along(Stream& stream, const Op& op) const {
    auto& s = static_cast<CudaStream&>(stream);
    if (s.waiting == nullptr) return false;
    set_device();
    if (!s.waiting->launch_with(s, op)) return false;
    s.waiting.reset();
    return true;
  }
  void set_device() const { check_cuda(cudaSetDevice(device_), "choosing the device"); }

  int device_;
  Traits traits_;
  std::string name_;
  StreamHandles handles_;
  DeviceAllocator allocator_;
  PinnedAllocator pinned_;
  DeviceCopier copier_;
  CudaUnits units_;
};

// Dynamic shared memory that a kernel may have without asking.
constexpr std::size_t kUsualShared = 48u << 10;

// Launches a kernel that begins with wait_inputs() and release_next() (device.h); `what` is for messages. `cluster` neighbouring blocks
// run at the same time and may wait for each other (Traits::clusters).
template <class... Params, class... Args>
void launch_clusters(CudaStream& s, const char* what, void (*kernel)(Params...), dim3 grid, int cluster, int threads, std::size_t shared_bytes, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = s.handle();
  cudaLaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  if (s.overlap && s.traits.overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
#if CUDART_VERSION >= 12080  // earlier ones do not have it
    if (s.traits.shared_percent != 0 && shared_bytes <= kUsualShared) {  // larger blocks need what the driver gives them
      attributes[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
      attributes[config.numAttrs++].val.sharedMemCarveout = s.traits.shared_percent;
    }
#endif
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, Params(args)...), what);
}

template <class... Params, class... Args>
void launch(CudaStream& s, const char* what, void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared_bytes, const Args&... args) {
  launch_clusters(s, what, kernel, grid, 1, threads, shared_bytes, args...);
}

// Kernels with more dynamic shared memory must ask for it.
template <class Kernel>
void allow_shared(Kernel kernel, std::size_t bytes) {
  if (bytes > kUsualShared)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), "shared memory of a kernel");
}

template <class Kernel>
void launch_large(CudaStream& s, const char* what, Kernel kernel, dim3 grid, int threads, std::size_t shared_bytes, const auto&... args) {
  allow_shared(kernel, shared_bytes);
  launch(s, what, kernel, grid, threads, shared_bytes, args...);
}

}  // namespace moeflux::backend::cuda
