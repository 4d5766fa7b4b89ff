#include "backend/cuda/units.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <span>
#include <thread>
#include <utility>

#include "backend/cuda/cuda_internal.h"
#include "core/error.h"

namespace moeflux::backend::cuda {
namespace {

// Words of a stream's inputs that a step of one token leaves free.
constexpr std::size_t kSerialWord = 14, kMarkWord = 15;
static_assert(CudaStream::kStepTokens >= kMarkWord);
constexpr int kSpins = 256;  // looks at a post between two looks at the stream
// A step of one unit is over in milliseconds, and the host may owe it something: until then nothing is asked of the driver, which may keep
// others waiting for the device meanwhile.
constexpr std::chrono::milliseconds kPatience{50};
// Words of Shares behind those of the checks.
constexpr std::size_t kForgiven = UnitState::kChecks, kMissing = UnitState::kChecks + 16, kShareWords = UnitState::kChecks + 32;
static_assert(UnitState::kChecks <= 256);  // share_tag

}  // namespace

void UnitState::forget() noexcept {
  for (auto& [key, r] : recordings) {
    if (!r.units.empty()) cudaGraphExecDestroy(r.units[0]);
    for (cudaGraphExec_t pair : r.pairs) cudaGraphExecDestroy(pair);
    if (r.all != nullptr) cudaGraphExecDestroy(r.all);
  }
  recordings.clear();
  current = nullptr;
}

bool UnitState::take_choice(std::size_t check) const noexcept {
  UnitPostMemory& post = posts[check];
  post.missed = 0;
  for (std::size_t r = 0; r < static_cast<std::size_t>(n_chosen[check]); ++r) {
    const std::uint64_t entry = __atomic_load_n(&choices[check].chosen[r], __ATOMIC_RELAXED);
    if (entry >> 32 != static_cast<std::uint64_t>(serial)) return false;
    const auto low = static_cast<std::uint32_t>(entry);
    if ((low & ChoicePost::kMissed) != 0) post.missed = 1;
    post.ids[r] = static_cast<std::int32_t>(low & ~ChoicePost::kMissed);
  }
  return true;
}

void UnitState::reserve_shares(std::int64_t width) {
  if (shares.width >= width) return;
  if (shares.width != 0) return;  // layers of other widths go without
  constexpr unsigned kFlags = cudaHostAllocPortable | cudaHostAllocMapped;
  const auto n = static_cast<std::size_t>(width);
  const auto pin = [](auto** p, std::size_t bytes) {
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(p), bytes, kFlags), "pinning memory for shares of experts");
    std::fill_n(reinterpret_cast<std::byte*>(*p), bytes, std::byte{0});
  };
  if (shares.x == nullptr) pin(&shares.x, 2 * n * 8);
  if (shares.rows == nullptr) pin(&shares.rows, 2 * UnitRunner::kMostShared * n * 4);
  if (shares.words == nullptr) pin(&shares.words, kShareWords * 4);
  shares.input.resize(n);
  shares.width = width;
}

void UnitState::drop_bodies() noexcept {
  for (cudaGraph_t body : bodies) cudaGraphDestroy(body);
  bodies.clear();
}

void UnitState::release() noexcept {
  forget();
  if (posts != nullptr) cudaFreeHost(posts);
  if (choices != nullptr) cudaFreeHost(choices);
  if (slots != nullptr) cudaFree(slots);
  for (void* p : {static_cast<void*>(shares.x), static_cast<void*>(shares.rows), static_cast<void*>(shares.words)})
    if (p != nullptr) cudaFreeHost(p);
  shares = {};
  posts = nullptr;
  choices = nullptr;
  slots = nullptr;
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
  if (u.slots == nullptr) check_cuda(cudaMalloc(reinterpret_cast<void**>(&u.slots), UnitPostMemory::kTopK * 4), "allocating a stream's choices");
  if (u.posts == nullptr) {
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&u.posts), sizeof(UnitPostMemory) * UnitState::kChecks, cudaHostAllocPortable | cudaHostAllocMapped),
               "pinning a stream's posts");
    std::fill_n(reinterpret_cast<std::int32_t*>(u.posts), sizeof(UnitPostMemory) * UnitState::kChecks / 4, 0);
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&u.choices), sizeof(ChoicePost) * UnitState::kChecks, cudaHostAllocPortable | cudaHostAllocMapped),
               "pinning a stream's posts");
    std::fill_n(reinterpret_cast<std::uint64_t*>(u.choices), sizeof(ChoicePost) * UnitState::kChecks / 8, 0);
  }
  u.serial = u.serial == INT32_MAX ? 1 : u.serial + 1;
  s.step_host[0] = static_cast<std::int32_t>(pos0);
  s.step_host[1] = tokens[0];
  s.step_host[kSerialWord] = u.serial;
  s.step_host[kMarkWord] = 0;
  u.pulls.n = 0;
  u.pulls.add(s.step_inputs, s.step_host, (CudaStream::kStepTokens + 1) * 4);
  constexpr std::int64_t kGroupKeys = Attention::kTile * Attention::kGroupTiles;
  u.whole = whole;
  u.current = &u.recordings[static_cast<std::uint64_t>(pos0 / kGroupKeys) * 2 + (whole ? 1 : 0)];
  s.recording = nullptr;
  s.overlap = false;
  s.step_tokens = {};
  s.step_pos = -1;
  if (!u.current->units.empty()) return Mode::Replay;
  launch_pulls(s, u.pulls);
  s.step_tokens = tokens;
  s.step_pos = pos0;
  if (u.current->seen++ == 0) return Mode::Eager;
  u.n_chosen.clear();
  u.checked_ids = u.checked_table = nullptr;
  u.host_rows = {};
  u.recording = true;
  s.overlap = u.overlap;
  s.capturing = true;
  if (open(s) == cudaSuccess) return Mode::Record;
  cudaGetLastError();
  u.recording = s.overlap = s.capturing = false;
  return Mode::Eager;
}

// A new unit; what is queued from now on is its body.
cudaError_t CudaUnits::open(CudaStream& s) { return cudaStreamBeginCapture(s.handle(), cudaStreamCaptureModeThreadLocal); }

namespace {

// Behind `last` a gate that looks at the mark, and what is to be done when it is not set. `last` becomes its end.
cudaError_t add_unit(cudaGraph_t graph, const std::int32_t* mark, std::span<const cudaGraph_t> bodies, cudaGraphNode_t& last) {
  cudaGraphConditionalHandle handle{};
  if (const cudaError_t status = cudaGraphConditionalHandleCreate(&handle, graph, 0, cudaGraphCondAssignDefault); status != cudaSuccess) return status;
  void* arguments[] = {&handle, &mark};
  cudaKernelNodeParams gate{};
  gate.func = gate_function();
  gate.gridDim = gate.blockDim = dim3(1);
  gate.kernelParams = arguments;
  cudaGraphNode_t gate_node{}, body_node{}, inside{};
  if (const cudaError_t status = cudaGraphAddKernelNode(&gate_node, graph, &last, last == nullptr ? 0 : 1, &gate); status != cudaSuccess) return status;
  cudaGraphNodeParams choice{};
  choice.type = cudaGraphNodeTypeConditional;
  choice.conditional.handle = handle;
  choice.conditional.type = cudaGraphCondTypeIf;
  choice.conditional.size = 1;
  if (const cudaError_t status = cudaGraphAddNode(&body_node, graph, &gate_node, nullptr, 1, &choice); status != cudaSuccess) return status;
  last = body_node;
  for (cudaGraph_t body : bodies) {
    const cudaGraphNode_t before = inside;
    if (const cudaError_t status = cudaGraphAddChildGraphNode(&inside, choice.conditional.phGraph_out[0], &before, before == nullptr ? 0 : 1, body); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t make_unit(const std::int32_t* mark, std::span<const cudaGraph_t> bodies, cudaGraphExec_t& exec) {
  cudaGraph_t graph = nullptr;
  cudaGraphNode_t last = nullptr;
  cudaError_t status = cudaGraphCreate(&graph, 0);
  if (status == cudaSuccess) status = add_unit(graph, mark, bodies, last);
  if (status == cudaSuccess) status = cudaGraphInstantiate(&exec, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  return status;
}

}  // namespace

cudaError_t CudaUnits::close(CudaStream& s) {
  UnitState& u = s.units;
  const std::int32_t* mark = s.step_inputs + kMarkWord;
  cudaGraph_t body = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaError_t status = cudaStreamEndCapture(s.handle(), &body);
  const bool first = u.current->units.empty();  // the others are launched in pairs
  if (status == cudaSuccess && u.whole)
    status = cudaGraphInstantiate(&exec, body, 0);
  else if (status == cudaSuccess && first)
    status = make_unit(mark, {&body, 1}, exec);
  if (status == cudaSuccess) u.current->units.push_back(exec);
  if (status == cudaSuccess && !u.whole) {
    if (u.all == nullptr) status = cudaGraphCreate(&u.all, 0);
    u.bodies.push_back(std::exchange(body, nullptr));
    // A layer's experts and what follows up to the next check stand behind one gate.
    if (status == cudaSuccess && u.current->units.size() % 2 == 1) {
      status = add_unit(u.all, mark, u.bodies, u.last);
      if (status == cudaSuccess && u.bodies.size() == 2) {
        status = make_unit(mark, u.bodies, exec);
        if (status == cudaSuccess) u.current->pairs.push_back(exec);
      }
      u.drop_bodies();
    }
  }
  if (body != nullptr) cudaGraphDestroy(body);
  return status;
}

bool CudaUnits::check(Stream& stream, const SlotCheck& c) {
  auto& s = static_cast<CudaStream&>(stream);
  UnitState& u = s.units;
  const auto top_k = static_cast<int>(c.ids.dim(1));
  if (!u.recording || u.n_chosen.size() >= UnitState::kChecks || top_k > static_cast<int>(UnitPostMemory::kTopK)) fail(ErrorCode::Internal, "a slot check out of place");
  const std::size_t which = u.n_chosen.size();
  u.n_chosen.push_back(top_k);
  if (u.whole) {
    ChoiceCheck choice{.slot_of = c.slot_of, .forced = c.forced, .serial = s.step_inputs + kSerialWord, .post = u.choices + which, .slots = u.slots};
    u.checked_ids = c.ids.i32();
    u.checked_table = c.slot_of;
    u.host_rows = {};
    check_cuda(cudaSetDevice(device_), "choosing the device");
    const bool shares = c.shares != nullptr && c.ffn != nullptr && takes_host_rows(s, *c.ffn);
    if (shares) {
      const UnitState::Shares& m = u.shares;
      const std::size_t turn = which % 2, width = static_cast<std::size_t>(m.width);
      choice.shares = c.shares, choice.x = c.ffn->x.f32(), choice.x_post = m.x + turn * width;
      choice.width = static_cast<int>(m.width), choice.which = static_cast<std::uint32_t>(which);
      u.host_rows = {m.rows + turn * kMostShared * width, m.words + which, m.words + kForgiven, s.step_inputs + kSerialWord, m.words + kMissing, m.width};
    }
    if (s.waiting != nullptr && s.waiting->launch_with(s, choice)) {
      s.waiting.reset();
      return shares;
    }
    use(stream);
    launch_choice_check(s, c, choice);
    return shares;
  }
  use(stream);
  UnitPostMemory* const post = u.posts + which;
  launch_slot_check(s, c, s.step_inputs + kSerialWord, post, s.step_inputs + kMarkWord);
  return true;
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
    if (good && u.all != nullptr && cudaGraphInstantiate(&u.current->all, u.all, 0) != cudaSuccess) {
      cudaGetLastError();
      u.current->all = nullptr;
    }
    u.drop_bodies();
    if (u.all != nullptr) cudaGraphDestroy(u.all);
    u.all = nullptr;
    u.last = nullptr;
    if (!good) {
      cudaGetLastError();
      if (!u.current->units.empty()) cudaGraphExecDestroy(u.current->units[0]);
      for (cudaGraphExec_t pair : u.current->pairs) cudaGraphExecDestroy(pair);
      u.current->units.clear();
      u.current->pairs.clear();
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

void CudaUnits::launch(Stream& stream, std::size_t first, std::size_t last) {
  CudaStream& s = use(stream);
  if (last >= n_units(stream) || (first == 0 ? last != 0 : last != first + 1 || first % 2 == 0)) fail(ErrorCode::Internal, "units {} to {} of {}", first, last, n_units(stream));
  launch_pulls(s, s.units.pulls);
  const UnitState::Recording& r = *s.units.current;
  check_cuda(cudaGraphLaunch(first == 0 ? r.units[0] : r.pairs.at(first / 2), s.handle()), "launching a unit");
}

bool CudaUnits::launch_all(Stream& stream) {
  CudaStream& s = use(stream);
  if (s.units.current == nullptr || s.units.current->all == nullptr) return false;
  launch_pulls(s, s.units.pulls);
  check_cuda(cudaGraphLaunch(s.units.current->all, s.handle()), "launching a step's units");
  return true;
}

UnitPost CudaUnits::wait(Stream& stream, std::size_t check) {
  CudaStream& s = use(stream);
  const UnitState& u = s.units;
  UnitPostMemory& post = u.posts[check];
  const auto n = static_cast<std::size_t>(u.n_chosen[check]);
  const auto there = [&] { return u.whole ? u.take_choice(check) : __atomic_load_n(&post.serial, __ATOMIC_ACQUIRE) == u.serial; };
  std::chrono::steady_clock::time_point ask;
  for (int spin = 0; !there(); spin = (spin + 1) % kSpins) {
    if (spin != kSpins - 1) continue;
    if (u.whole) {
      const auto now = std::chrono::steady_clock::now();
      if (ask == std::chrono::steady_clock::time_point()) ask = now + kPatience;
      if (now < ask) {
        std::this_thread::yield();
        continue;
      }
    }
    const cudaError_t status = cudaStreamQuery(s.handle());
    if (status == cudaErrorNotReady) {
      std::this_thread::yield();
      continue;
    }
    check_cuda(status, "computing");
    if (!there()) fail(ErrorCode::Internal, "the check of layer {} among those with experts has not run", check);
  }
  return {post.missed != 0, {post.ids, n}};
}

HostShare CudaUnits::take_share(Stream& stream, std::size_t check) {
  UnitState& u = static_cast<CudaStream&>(stream).units;
  UnitState::Shares& m = u.shares;
  const auto width = static_cast<std::size_t>(m.width);
  const std::uint64_t* post = m.x + check % 2 * width;
  const std::uint64_t tag = share_tag(u.serial, static_cast<std::uint32_t>(check));
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (std::size_t i = 0; i < width; ++i) {
    std::uint64_t entry = __atomic_load_n(post + i, __ATOMIC_RELAXED);
    for (int spin = 0; entry >> 32 != tag; entry = __atomic_load_n(post + i, __ATOMIC_RELAXED))
      if (++spin % kSpins == 0 && std::chrono::steady_clock::now() > give_up) fail(ErrorCode::Internal, "the device does not post the experts' input");
    m.input[i] = std::bit_cast<float>(static_cast<std::uint32_t>(entry));
  }
  return {m.input, m.rows + check % 2 * kMostShared * width};
}

void CudaUnits::give_share(Stream& stream, std::size_t check) {
  const UnitState& u = static_cast<const CudaStream&>(stream).units;
  __atomic_store_n(u.shares.words + check, u.serial, __ATOMIC_RELEASE);
}

void CudaUnits::forgive(Stream& stream) noexcept {
  const UnitState& u = static_cast<const CudaStream&>(stream).units;
  if (u.shares.words != nullptr) __atomic_store_n(u.shares.words + kForgiven, u.serial, __ATOMIC_RELEASE);
}

void CudaUnits::settle_shares(Stream& stream) {
  const UnitState& u = static_cast<const CudaStream&>(stream).units;
  if (u.shares.words != nullptr && __atomic_load_n(u.shares.words + kMissing, __ATOMIC_ACQUIRE) == u.serial)
    fail(ErrorCode::Internal, "the device waited in vain for experts that the processor computes");
}

void CudaUnits::resume(Stream& stream) {
  CudaStream& s = use(stream);
  check_cuda(cudaMemsetAsync(s.step_inputs + kMarkWord, 0, 4, s.handle()), "going on after a miss");
}

void CudaUnits::upload(Stream& stream, std::byte* to, const std::byte* pinned, std::size_t bytes) {
  CudaStream& s = use(stream);
  Pulls& pulls = s.units.pulls;
  if (pulls.n == Pulls::kMost) launch_pulls(s, pulls);
  pulls.add(to, pinned, bytes);
}

}  // namespace moeflux::backend::cuda
