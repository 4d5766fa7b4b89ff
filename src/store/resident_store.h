// An ExpertStore that holds every expert in memory: all hits, for models that fit and as the oracle of stores that
// stream.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/buffer.h"
#include "store/expert_store.h"

namespace moeflux::store {

class ResidentStore final : public ExpertStore {
 public:
  // Reads all experts of the catalog. The folder is needed only here; allocator and copier must outlive the store. `bands`: what has
  // bands is brought into them (the allocator's memory is the host's).
  // Throws Io and InvalidModel (a damaged record of a pack) with file, layer and expert; OutOfMemory.
  ResidentStore(const ExpertCatalog& catalog, const format::ModelFolder& folder, Allocator& allocator, Copier& copier,
                const ProgressSink& progress, bool bands = false);

  void visit(LayerIdx, std::span<const ExpertIdx>, std::span<const std::uint32_t>, std::uint32_t) noexcept override {}
  void hint(LayerIdx, std::span<const ExpertIdx>, float) noexcept override {}
  std::size_t max_lease() const noexcept override { return max_experts_; }
  std::size_t scan_batch() const noexcept override { return max_experts_; }
  StoreStats stats() const noexcept override;
  bool resident() const noexcept override { return true; }
  ResidentExperts resident_layer(LayerIdx layer) const noexcept override;

 protected:
  std::uint32_t pin(LayerIdx layer, std::span<const ExpertIdx> experts) override;
  bool try_pin(LayerIdx layer, std::span<const ExpertIdx> experts, std::uint32_t& ticket) override {
    ticket = pin(layer, experts);
    return true;
  }
  bool ready(std::uint32_t, std::size_t) noexcept override { return true; }
  bool hit(std::uint32_t, std::size_t) noexcept override { return true; }
  ExpertView wait(std::uint32_t ticket, std::size_t i) override;
  void unpin(std::uint32_t ticket) noexcept override;

 private:
  struct Layer {
    RecordLayout layout;
    Buffer records;  // [n_experts] of layout.bytes
    std::int64_t n_experts = 0;
  };
  struct Ticket {
    LayerIdx layer{};
    std::vector<ExpertIdx> experts;
  };

  class Arrivals;
  void load_direct_pieces(const ExpertCatalog& catalog, const format::ModelFolder& folder, Copier& copier, Arrivals& arrivals,
                          const std::function<void(std::uint64_t)>& progress);
  void load_the_rest(const ExpertCatalog& catalog, const format::ModelFolder& folder, Copier& copier, Arrivals& arrivals);
  std::byte* record(std::size_t layer, std::uint64_t expert) noexcept { return layers_[layer].records.data() + expert * layers_[layer].layout.bytes; }

  std::vector<Layer> layers_;
  std::size_t max_experts_ = 0;
  mutable std::mutex mutex_;  // tickets and counters
  std::vector<Ticket> tickets_;
  std::vector<std::uint32_t> free_;
  StoreStats stats_;
};

}  // namespace moeflux::store
