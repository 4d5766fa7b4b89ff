// Steps in units on a CUDA stream (backend/units.h). Each unit is a graph of its own: a gate that looks at the stream's mark, and the
// unit's kernels as the body of a conditional node. So kernels know nothing of it, and a unit that shall do nothing costs a gate. All of
// them one behind the other are one more graph: what a step begins with.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "backend/units.h"

namespace moeflux::backend::cuda {

class CudaStream;

// What a check leaves in host memory. `serial` is written last: the post is there when it is the step's.
struct UnitPostMemory {
  static constexpr std::size_t kTopK = 62;  // 256 bytes in all
  std::int32_t serial, missed;
  std::int32_t ids[kTopK];
};

// What the check of a step leaves where nothing can be missed. Every entry has the step's number in its upper half: none has to be written
// before another, so nothing waits for the host's memory. Lower half: the id, and kMissed.
struct ChoicePost {
  static constexpr std::uint32_t kMissed = 1u << 31;
  std::uint64_t chosen[UnitPostMemory::kTopK];
};
struct ChoiceCheck {
  const std::int32_t *slot_of = nullptr, *forced = nullptr, *serial = nullptr;
  ChoicePost* post = nullptr;  // null: no check
  std::int32_t* slots = nullptr;  // the chosen experts' by rank, for the kernels behind it; kByHost + i: the i-th of the host's
  // The host's share (SlotCheck::shares), or null; then a block of its own posts x, every number with the check's tag in its upper half.
  const std::int32_t* shares = nullptr;
  const float* x = nullptr;
  std::uint64_t* x_post = nullptr;
  int width = 0;
  std::uint32_t which = 0;
};
constexpr std::int32_t kByHost = INT32_MIN;
// Of one check of one step; comes again after 2^24 steps.
constexpr std::uint32_t share_tag(std::int32_t serial, std::uint32_t which) { return static_cast<std::uint32_t>(serial) * 256u + which; }

// Where kernels find what the host has computed, once `given` has the step's number. `forgiven` has it: nothing more comes.
struct HostRows {
  const float* rows = nullptr;  // null: the host has no share here
  const std::int32_t *given = nullptr, *forgiven = nullptr, *serial = nullptr;
  std::int32_t* missing = nullptr;  // gets the step's number when a kernel has waited for too long
  std::int64_t width = 0;
};

#ifdef __CUDACC__
// Of rank r; `from`: the slot, or whose share it is.
__device__ inline void post_choice(const ChoiceCheck& c, std::int32_t id, int r, std::int32_t slot, std::int32_t from, std::int32_t serial) {
  c.slots[r] = from;
  const std::uint32_t low = static_cast<std::uint32_t>(id) | (slot == -1 ? ChoicePost::kMissed : 0u);
  *const_cast<volatile std::uint64_t*>(&c.post->chosen[r]) = static_cast<std::uint64_t>(static_cast<std::uint32_t>(serial)) << 32 | low;
}

// By a whole warp, a rank a lane: the slot, or which one of the host's it is. `share`: entry `lane` of c.shares.
__device__ inline std::int32_t with_share(const ChoiceCheck& c, bool chosen, std::int32_t slot, std::int32_t share, int lane) {
  if (c.shares == nullptr) return slot;
  const bool far = chosen && slot < -1;
  const unsigned all = __ballot_sync(~0u, far);
  const int n = __popc(all), most = static_cast<int>(SlotCheck::kShares) - 1, first = n - __shfl_sync(~0u, share, n < most ? n : most);
  const int index = __popc(all & ((1u << lane) - 1u));
  return far && index >= first ? kByHost + index - first : slot;
}

// By a block of its own.
__device__ inline void post_x(const ChoiceCheck& c, std::int32_t serial) {
  const std::uint64_t tag = static_cast<std::uint64_t>(share_tag(serial, c.which)) << 32;
  for (int i = static_cast<int>(threadIdx.x); i < c.width; i += static_cast<int>(blockDim.x))
    *const_cast<volatile std::uint64_t*>(c.x_post + i) = tag | __float_as_uint(c.x[i]);
}

// A thread's part of what the check of one token needs, asked for before the choice is made: it has been there since the step began.
struct CheckInputs {
  std::int32_t slot = 0, forced = 0, serial = 0;  // of expert threadIdx.x; of rank threadIdx.x
  std::int32_t share = 0;                         // entry threadIdx.x
  __device__ CheckInputs(const ChoiceCheck& c, int n_experts, int top_k) {
    if (c.post == nullptr) return;
    const int i = static_cast<int>(threadIdx.x);
    if (i < n_experts) slot = c.slot_of[i];
    if (c.shares != nullptr && i < SlotCheck::kShares) share = c.shares[i];
    serial = *c.serial;
    if (i < top_k && c.forced != nullptr) forced = c.forced[i];
  }
};
#endif

// Small copies from pinned memory to the device that a step begins with, in one kernel: the copy engine and the kernels behind it would have to
// wait for each other.
struct Pulls {
  static constexpr std::size_t kMost = 4;
  struct Pull {
    std::uint32_t* to;
    const std::uint32_t* from;
    std::uint32_t n_words;
  };
  Pull pull[kMost];
  std::uint32_t n = 0;

  void add(void* to, const void* from, std::size_t bytes) noexcept {
    pull[n++] = {static_cast<std::uint32_t*>(to), static_cast<const std::uint32_t*>(from), static_cast<std::uint32_t>(bytes / 4)};
  }
};

// The units of one stream.
struct UnitState {
  static constexpr std::size_t kChecks = 256;  // layers with experts
  struct Recording {
    std::vector<cudaGraphExec_t> units;  // only the first is there, alone
    std::vector<cudaGraphExec_t> pairs;  // units 2j + 1 and 2j + 2 behind one gate
    cudaGraphExec_t all = nullptr;  // all units in one launch; null where that cannot be recorded
    int seen = 0;  // eager steps before: the first one sizes the scratch memory
  };
  std::map<std::uint64_t, Recording> recordings;  // by number of key groups, as for whole steps
  Recording* current = nullptr;
  UnitPostMemory* posts = nullptr;  // pinned, [kChecks]
  ChoicePost* choices = nullptr;    // pinned, [kChecks]
  std::vector<int> n_chosen;        // ids of each check
  std::int32_t serial = 0;
  cudaGraph_t all = nullptr;        // of the step being recorded: its units so far
  cudaGraphNode_t last = nullptr;   // its end
  std::vector<cudaGraph_t> bodies;  // units that will be added to it together
  bool recording = false;
  bool whole = false;               // the step is one unit without a gate
  Pulls pulls;                      // to be launched before the next unit
  // What the last check of the recording has looked up, for the experts behind it: slots by rank.
  std::int32_t* slots = nullptr;  // device, [UnitPostMemory::kTopK]
  const std::int32_t *checked_ids = nullptr, *checked_table = nullptr;
  HostRows host_rows;  // of that check
  // Memory of shares, pinned: two checks' inputs and results in turn, because results are read before the check after the next one posts.
  struct Shares {
    std::uint64_t* x = nullptr;      // [2, width]
    float* rows = nullptr;           // [2, kMostShared, width]
    std::int32_t* words = nullptr;   // [kChecks] given; forgiven; missing
    std::int64_t width = 0;
    std::vector<float> input;        // of the check under way
  } shares;
  const std::int32_t* chosen_slots(const std::int32_t* ids, const std::int32_t* table) const noexcept {
    return recording && table != nullptr && ids == checked_ids && table == checked_table ? slots : nullptr;
  }
  bool overlap = true;  // kernels of a unit may start before the one before has ended; off where that cannot be recorded

  // Takes the choice of a step where nothing can be missed to its post; false: it has not come yet.
  bool take_choice(std::size_t check) const noexcept;
  void reserve_shares(std::int64_t width);
  void forget() noexcept;
  void drop_bodies() noexcept;
  void release() noexcept;  // at the stream's end
};

// In units_kernels.cu. The pulls that are there, if any; leaves none. What is launched next must not overlap: a graph, or a kernel of a step
// that is computed as it comes.
void launch_pulls(CudaStream& stream, Pulls& pulls);
// Sets the conditional handle (first argument) to whether the mark (second) is 0; and the check of one token.
void* gate_function();
void launch_slot_check(CudaStream& stream, const SlotCheck& check, const std::int32_t* serial, UnitPostMemory* post, std::int32_t* mark);
void launch_choice_check(CudaStream& stream, const SlotCheck& check, const ChoiceCheck& choice);

// In ops_ffn.cu: whether its kernels take some rows from the host.
bool takes_host_rows(const CudaStream& stream, const RoutedFfn& op);

class CudaUnits final : public UnitRunner {
 public:
  explicit CudaUnits(int device) : device_(device) {}

  std::size_t max_top_k() const noexcept override { return UnitPostMemory::kTopK; }
  std::size_t max_checks() const noexcept override { return UnitState::kChecks; }
  Mode begin(Stream& stream, std::span<const std::int32_t> tokens, std::int64_t pos0, bool whole) override;
  bool check(Stream& stream, const SlotCheck& check) override;
  void cut(Stream& stream) override;
  bool end(Stream& stream, bool complete) override;
  void reserve(Stream& stream, const RoutedFfn& op) override;
  std::size_t n_units(Stream& stream) const override;
  void launch(Stream& stream, std::size_t first, std::size_t last) override;
  bool launch_all(Stream& stream) override;
  UnitPost wait(Stream& stream, std::size_t check) override;
  HostShare take_share(Stream& stream, std::size_t check) override;
  void give_share(Stream& stream, std::size_t check) override;
  void forgive(Stream& stream) noexcept override;
  void settle_shares(Stream& stream) override;
  void resume(Stream& stream) override;
  void upload(Stream& stream, std::byte* to, const std::byte* pinned, std::size_t bytes) override;

 private:
  CudaStream& use(Stream& stream) const;
  cudaError_t open(CudaStream& s);
  cudaError_t close(CudaStream& s);

  int device_;
};

}  // namespace moeflux::backend::cuda
