#include "backend/cuda/units.h"

#include <algorithm>
#include <thread>

#include "backend/cuda/cuda_internal.h"
#include "core/error.h"

namespace moeflux::backend::cuda {
namespace {

// Words of a stream's inputs that a step of one token leaves free.
constexpr std::size_t kSerialWord = 14, kMarkWord = 15;
static_assert(CudaStream::kStepTokens >= kMarkWord);
constexpr int kSpins = 256;  // looks at a post between two looks at the stream

}  // namespace

void UnitState::forget() noexcept {
  for (auto& [key, r] : recordings)
    for (cudaGraphExec_t unit : r.units) cudaGraphExecDestroy(unit);
  recordings.clear();
  current = nullptr;
}

void UnitState::release() noexcept {
  forget();
  if (posts != nullptr) cudaFreeHost(posts);
  posts = nullptr;
}

CudaStream& CudaUnits::use(Stream& stream) const {
  check_cuda(cudaSetDevice(device_), "choosing the device");
  auto& s = static_cast<CudaStream&>(stream);
  s.launch_waiting();
  return s;
}

UnitRunner::Mode CudaUnits::begin(Stream& stream, std::span<const std::int32_t> tokens, std::int64_t pos0, bool whole) {
  CudaStream& s = use(stream);
  UnitState& u = s.units;
  if (tokens.size() != 1) fail(ErrorCode::Internal, "a step in units has {} tokens", tokens.size());
  check_cuda(cudaStreamSynchronize(s.handle()), "computing");
  if (u.posts == nullptr) {
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&u.posts), sizeof(UnitPostMemory) * UnitState::kChecks, cudaHostAllocPortable | cudaHostAllocMapped),
               "pinning a stream's posts");
    std::fill_n(reinterpret_cast<std::int32_t*>(u.posts), sizeof(UnitPostMemory) * UnitState::kChecks / 4, 0);
  }
  u.serial = u.serial == INT32_MAX ? 1 : u.serial + 1;
  s.step_host[0] = static_cast<std::int32_t>(pos0);
  s.step_host[1] = tokens[0];
  s.step_host[kSerialWord] = u.serial;
  s.step_host[kMarkWord] = 0;
  check_cuda(cudaMemcpyAsync(s.step_inputs, s.step_host, (CudaStream::kStepTokens + 1) * 4, cudaMemcpyHostToDevice, s.handle()), "copying a step's inputs");
  constexpr std::int64_t kGroupKeys = Attention::kTile * Attention::kGroupTiles;
  u.whole = whole;
  u.current = &u.recordings[static_cast<std::uint64_t>(pos0 / kGroupKeys) * 2 + (whole ? 1 : 0)];
  s.recording = nullptr;
  s.overlap = false;
  s.step_tokens = {};
  s.step_pos = -1;
  if (!u.current->units.empty()) return Mode::Replay;
  s.step_tokens = tokens;
  s.step_pos = pos0;
  if (u.current->seen++ == 0) return Mode::Eager;
  u.n_chosen.clear();
  u.recording = true;
  s.overlap = u.overlap;
  s.capturing = true;
  if (open(s) == cudaSuccess) return Mode::Record;
  cudaGetLastError();
  if (u.graph != nullptr) cudaGraphDestroy(u.graph);
  u.graph = nullptr;
  u.recording = s.overlap = s.capturing = false;
  return Mode::Eager;
}

// A new unit; what is queued from now on is its body.
cudaError_t CudaUnits::open(CudaStream& s) {
  UnitState& u = s.units;
  if (u.whole) return cudaStreamBeginCapture(s.handle(), cudaStreamCaptureModeThreadLocal);
  cudaGraphConditionalHandle handle{};
  const std::int32_t* mark = s.step_inputs + kMarkWord;
  cudaError_t status = cudaGraphCreate(&u.graph, 0);
  if (status == cudaSuccess) status = cudaGraphConditionalHandleCreate(&handle, u.graph, 0, cudaGraphCondAssignDefault);
  if (status != cudaSuccess) return status;
  void* arguments[] = {&handle, &mark};
  cudaKernelNodeParams gate{};
  gate.func = gate_function();
  gate.gridDim = gate.blockDim = dim3(1);
  gate.kernelParams = arguments;
  cudaGraphNode_t gate_node{}, body_node{};
  status = cudaGraphAddKernelNode(&gate_node, u.graph, nullptr, 0, &gate);
  if (status != cudaSuccess) return status;
  cudaGraphNodeParams body{};
  body.type = cudaGraphNodeTypeConditional;
  body.conditional.handle = handle;
  body.conditional.type = cudaGraphCondTypeIf;
  body.conditional.size = 1;
  status = cudaGraphAddNode(&body_node, u.graph, &gate_node, nullptr, 1, &body);
  if (status != cudaSuccess) return status;
  return cudaStreamBeginCaptureToGraph(s.handle(), body.conditional.phGraph_out[0], nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal);
}

cudaError_t CudaUnits::close(CudaStream& s) {
  UnitState& u = s.units;
  cudaGraph_t body = nullptr;
  cudaError_t status = cudaStreamEndCapture(s.handle(), &body);  // belongs to u.graph, unless the step is whole
  if (u.whole) u.graph = body;
  cudaGraphExec_t exec = nullptr;
  if (status == cudaSuccess) status = cudaGraphInstantiate(&exec, u.graph, 0);
  if (u.graph != nullptr) cudaGraphDestroy(u.graph);
  u.graph = nullptr;
  if (status == cudaSuccess) u.current->units.push_back(exec);
  return status;
}

void CudaUnits::check(Stream& stream, const SlotCheck& c) {
  CudaStream& s = use(stream);
  UnitState& u = s.units;
  const auto top_k = static_cast<int>(c.ids.dim(1));
  if (!u.recording || u.n_chosen.size() >= UnitState::kChecks || top_k > static_cast<int>(UnitPostMemory::kTopK)) fail(ErrorCode::Internal, "a slot check out of place");
  UnitPostMemory* const post = u.posts + u.n_chosen.size();
  u.n_chosen.push_back(top_k);
  launch_slot_check(s, c, s.step_inputs + kSerialWord, post, s.step_inputs + kMarkWord);
}

void CudaUnits::cut(Stream& stream) {
  CudaStream& s = use(stream);
  if (s.units.whole) return;
  cudaError_t status = close(s);
  if (status == cudaSuccess) status = open(s);
  if (status == cudaSuccess) return;
  cudaGetLastError();
  fail(ErrorCode::Unsupported, "this device cannot record a step in units: {}", cudaGetErrorString(status));
}

bool CudaUnits::end(Stream& stream, bool complete) {
  CudaStream& s = use(stream);
  UnitState& u = s.units;
  bool good = true;
  if (u.recording) {
    u.recording = s.capturing = false;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(s.handle(), &capture);
    good = capture != cudaStreamCaptureStatusNone && close(s) == cudaSuccess && complete;
    if (u.graph != nullptr) cudaGraphDestroy(u.graph);
    u.graph = nullptr;
    if (!good) {
      cudaGetLastError();
      for (cudaGraphExec_t unit : u.current->units) cudaGraphExecDestroy(unit);
      u.current->units.clear();
      u.overlap = u.overlap && !complete;  // the next try does without
    }
  }
  s.step_tokens = {};
  s.step_pos = -1;
  s.overlap = false;
  return good;
}

std::size_t CudaUnits::n_units(Stream& stream) const {
  const UnitState& u = static_cast<const CudaStream&>(stream).units;
  return u.current == nullptr ? 0 : u.current->units.size();
}

void CudaUnits::launch(Stream& stream, std::size_t unit) {
  CudaStream& s = use(stream);
  if (unit >= n_units(stream)) fail(ErrorCode::Internal, "unit {} of {}", unit, n_units(stream));
  check_cuda(cudaGraphLaunch(s.units.current->units[unit], s.handle()), "launching a unit");
}

UnitPost CudaUnits::wait(Stream& stream, std::size_t check) {
  CudaStream& s = use(stream);
  const UnitState& u = s.units;
  const UnitPostMemory& post = u.posts[check];
  const auto there = [&] { return __atomic_load_n(&post.serial, __ATOMIC_ACQUIRE) == u.serial; };
  for (int spin = 0; !there(); spin = (spin + 1) % kSpins) {
    if (spin != kSpins - 1) continue;
    const cudaError_t status = cudaStreamQuery(s.handle());
    if (status == cudaErrorNotReady) {
      std::this_thread::yield();
      continue;
    }
    check_cuda(status, "computing");
    if (!there()) fail(ErrorCode::Internal, "the check of layer {} among those with experts has not run", check);
  }
  return {post.missed != 0, {post.ids, static_cast<std::size_t>(u.n_chosen[check])}};
}

void CudaUnits::resume(Stream& stream) {
  CudaStream& s = use(stream);
  check_cuda(cudaMemsetAsync(s.step_inputs + kMarkWord, 0, 4, s.handle()), "going on after a miss");
}

void CudaUnits::upload(Stream& stream, std::byte* to, const std::byte* pinned, std::size_t bytes) {
  CudaStream& s = use(stream);
  check_cuda(cudaMemcpyAsync(to, pinned, bytes, cudaMemcpyHostToDevice, s.handle()), "copying a table");
}

}  // namespace moeflux::backend::cuda
