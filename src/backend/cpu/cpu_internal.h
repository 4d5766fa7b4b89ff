// What the ops_*.cpp files share: the backend class, its streams with their scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernels/kernel_table.h"
#include "core/buffer.h"
#include "core/thread_pool.h"

namespace moeflux::backend::cpu {

// Scratch memory that grows to the largest need seen and then stays: no allocation after warm-up.
class Scratch {
 public:
  explicit Scratch(Allocator& allocator) : allocator_(&allocator) {}
  // At least `bytes`, aligned to 64; contents are not kept when it grows.
  std::byte* get(std::size_t bytes);

 private:
  Allocator* allocator_;
  Buffer buffer_;
};

class CpuStream final : public Stream {
 public:
  CpuStream(int n_workers, Allocator& a) : activations(a), partials(a), tables(a) {
    for (int i = 0; i < n_workers; ++i) workers.emplace_back(a);
  }
  std::vector<Scratch> workers;  // one per pool worker: decoded rows, attention tiles
  Scratch activations;           // quantized activations of the current op
  Scratch partials;              // attention groups, expert intermediates
  Scratch tables;                // task lists
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& table, const CpuOptions& options)
      : k_(table), pool_(options.n_threads), allocator_(options.allocator != nullptr ? *options.allocator : plain_) {}

  std::string name() const override;
  void expect(bool ops) noexcept override { pool_.stay_awake(ops); }
  std::unique_ptr<Stream> create_stream() override { return std::make_unique<CpuStream>(pool_.size(), allocator_); }
  void synchronize(Stream&) override {}
  Allocator& allocator() noexcept override { return allocator_; }
  Copier& copier() noexcept override { return copier_; }
  bool wants_bands() const noexcept override { return k_.bands; }

 protected:
  void execute(Stream& stream, const Embed& op) override;
  void execute(Stream& stream, const Add& op) override;
  void execute(Stream& stream, const RmsNorm& op) override;
  void execute(Stream& stream, const AddRmsNorm& op) override;
  void execute(Stream& stream, const MatMul& op) override;
  void execute(Stream& stream, const HeadMatMul& op) override;
  void execute(Stream& stream, const Rope& op) override;
  void execute(Stream& stream, const CacheWrite& op) override;
  void execute(Stream& stream, const Attention& op) override;
  void execute(Stream& stream, const Clamp& op) override;
  void execute(Stream& stream, const SigmoidGate& op) override;
  void execute(Stream& stream, const Glu& op) override;
  void execute(Stream& stream, const Route& op) override;
  void execute(Stream& stream, const ExpertFfn& op) override;
  void execute(Stream& stream, const Combine& op) override;
  void execute(Stream& stream, const CausalConv& op) override;
  void execute(Stream& stream, const L2Norm& op) override;
  void execute(Stream& stream, const DeltaGates& op) override;
  void execute(Stream& stream, const GatedDelta& op) override;
  void execute(Stream& stream, const GatedRmsNorm& op) override;

 private:
  const KernelTable& k_;
  ThreadPool pool_;
  HostAllocator plain_;
  Allocator& allocator_;
  HostCopier copier_;
};

// Small ops are not worth waking the pool for: about what a wake-up costs (some microseconds) in work items.
inline constexpr std::int64_t kInlineElements = 4096;

// [T, .., D] views as rows of D: row i of a view of rank 2 or 3.
inline float* head_row(const TensorView& v, std::int64_t i) noexcept {
  if (v.rank == 2) return v.f32() + i * v.stride(0);
  return v.f32() + i / v.dim(1) * v.stride(0) + i % v.dim(1) * v.stride(1);
}
inline std::int64_t n_rows(const TensorView& v) noexcept { return v.rank == 2 ? v.dim(0) : v.dim(0) * v.dim(1); }

}  // namespace moeflux::backend::cpu
