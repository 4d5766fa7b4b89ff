#include "store/resident_store.h"

#include <algorithm>

#include "core/error.h"

namespace moeflux::store {
namespace {

std::uint64_t total_bytes(const ExpertCatalog& catalog) {
  std::uint64_t total = 0;
  for (const ExpertLayer& l : catalog.layers) total += static_cast<std::uint64_t>(l.n_experts) * l.layout.bytes;
  return total;
}

void read_record(const ExpertLayer& layer, std::int64_t expert, const format::ModelFolder& folder, std::span<std::byte> record,
                 std::vector<std::byte>& scratch) {
  const format::Extent* in_scratch = nullptr;
  for (const RecordPiece& p : layer.expert(ExpertIdx(static_cast<std::int32_t>(expert)))) {
    if (p.direct()) {
      folder.file(p.source.file).read_exact(p.source.offset, record.subspan(p.record_offset, p.source.bytes));
      continue;
    }
    if (in_scratch == nullptr || *in_scratch != p.source) {
      scratch.resize(p.source.bytes);
      folder.file(p.source.file).read_exact(p.source.offset, scratch);
      in_scratch = &p.source;
    }
    place_piece(p, scratch, record);
  }
}

}  // namespace

ResidentStore::ResidentStore(const ExpertCatalog& catalog, const format::ModelFolder& folder, Allocator& allocator,
                             Copier& copier, const ProgressSink& progress) {
  const std::uint64_t total = total_bytes(catalog);
  std::uint64_t done = 0;
  std::vector<std::byte> staging, scratch;
  for (std::size_t l = 0; l < catalog.layers.size(); ++l) {
    const ExpertLayer& source = catalog.layers[l];
    Layer& layer = layers_.emplace_back();
    if (source.n_experts == 0) continue;
    layer.layout = source.layout;
    layer.n_experts = source.n_experts;
    layer.records = allocator.allocate(mul_or_fail(static_cast<std::uint64_t>(source.n_experts), source.layout.bytes, "experts of a layer"), kRecordAlign);
    max_experts_ = std::max(max_experts_, static_cast<std::size_t>(source.n_experts));
    staging.assign(source.layout.bytes, std::byte{0});
    for (std::int64_t e = 0; e < source.n_experts; ++e) {
      try {
        read_record(source, e, folder, staging, scratch);
        const ExpertView view = view_record(source.layout, staging.data());
        for (const quant::MatrixView* m : {&view.gate, &view.up, &view.down}) check_scales(*m, "expert");
      } catch (const Error& error) {
        fail(error.code(), "layer {}, expert {}: {}", l, e, error.what());
      }
      copier.to_device(layer.records.data() + static_cast<std::uint64_t>(e) * source.layout.bytes, staging.data(), staging.size());
      done += source.layout.bytes;
      if (progress) progress("experts", done, total);
    }
  }
}

std::uint32_t ResidentStore::pin(LayerIdx layer, std::span<const ExpertIdx> experts) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(tickets_.size()));
    tickets_.emplace_back().experts.reserve(max_experts_);
    free_.reserve(tickets_.size());
  }
  const std::uint32_t ticket = free_.back();
  free_.pop_back();
  tickets_[ticket].layer = layer;
  tickets_[ticket].experts.assign(experts.begin(), experts.end());
  stats_.requests += experts.size();
  stats_.hits += experts.size();
  return ticket;
}

ExpertView ResidentStore::wait(std::uint32_t ticket, std::size_t i) {
  const std::lock_guard lock(mutex_);
  const Ticket& t = tickets_[ticket];
  const Layer& layer = layers_[static_cast<std::size_t>(raw(t.layer))];
  const auto e = static_cast<std::uint64_t>(raw(t.experts[i]));
  return view_record(layer.layout, layer.records.data() + e * layer.layout.bytes);
}

ResidentExperts ResidentStore::resident(LayerIdx layer) const noexcept {
  const Layer& l = layers_[static_cast<std::size_t>(raw(layer))];
  if (l.n_experts == 0) return {};
  return {view_record(l.layout, l.records.data()), l.layout.bytes, l.n_experts};
}

void ResidentStore::unpin(std::uint32_t ticket) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(ticket);
}

StoreStats ResidentStore::stats() const noexcept {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace moeflux::store
