#include "store/resident_store.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/thread_pool.h"
#include "store/bulk_load.h"

namespace moeflux::store {
namespace {

std::uint64_t total_bytes(const ExpertCatalog& catalog) {
  std::uint64_t total = 0;
  for (const ExpertLayer& l : catalog.layers) total += static_cast<std::uint64_t>(l.n_experts) * l.layout.bytes;
  return total;
}

// "layer 3, expert 7: ".
std::string expert_text(std::uint64_t layer, std::uint64_t expert) { return fmt::format("layer {}, expert {}: ", layer, expert); }

// Pieces that memory holds otherwise than the file, one after another.
void load_changed_pieces(std::span<const RecordPiece> pieces, const format::ModelFolder& folder, Copier& copier, std::byte* record,
                         std::vector<std::byte>& source, std::vector<std::byte>& staging) {
  const format::Extent* at_hand = nullptr;
  for (const RecordPiece& piece : pieces) {
    if (piece.direct()) continue;
    if (at_hand == nullptr || *at_hand != piece.source) {
      source.resize(piece.source.bytes);
      folder.file(piece.source.file).read_exact(piece.source.offset, source);
      at_hand = &piece.source;
    }
    RecordPiece p = piece;
    std::byte* const to = record + p.record_offset;
    staging.resize(p.record_bytes());
    p.record_offset = 0;
    place_piece(p, source, staging);
    copier.to_device(to, staging.data(), staging.size());
  }
}

void check_record(const RecordLayout& layout, Copier& copier, const std::byte* record, std::vector<std::byte>& staging) {
  staging.resize(layout.bytes);
  copier.to_host(staging.data(), record, staging.size());
  const ExpertView view = view_record(layout, staging.data());
  for (const quant::MatrixView* m : {&view.gate, &view.up, &view.down}) check_scales(*m, "expert");
}

bool has_checks(const RecordLayout& l) {
  const auto mx = [](const RecordMatrix& m) { return m.format.kind == quant::FormatKind::Mxfp4; };
  return mx(l.gate) || mx(l.up) || mx(l.down);
}

}  // namespace

// Counts the pieces of each record that are in place and brings whole records into bands, by threads of its own: those that load would leave
// the disk waiting, because the last pieces of a layer's records come within moments of each other.
class ResidentStore::Arrivals {
 public:
  Arrivals(ResidentStore& store, const ExpertCatalog& catalog, Allocator& allocator, bool bands) : store_(store), catalog_(catalog), allocator_(allocator) {
    if (!bands) return;
    for (const ExpertLayer& l : catalog.layers) {
      auto& left = left_.emplace_back(std::make_unique<std::atomic<std::size_t>[]>(static_cast<std::size_t>(l.n_experts)));
      for (std::int64_t e = 0; e < l.n_experts; ++e) left[static_cast<std::size_t>(e)] = l.pieces_per_expert;
    }
    for (int i = 0; i < std::clamp(usable_cores() / 2, 1, kMaxThreads); ++i) threads_.emplace_back([this] { work(); });
  }
  ~Arrivals() { stop(); }

  // A piece of this record is there. Any thread.
  void arrived(std::uint64_t layer, std::uint64_t expert) {
    if (left_.empty() || left_[layer][expert].fetch_sub(1) != 1) return;
    const std::lock_guard lock(mutex_);
    whole_.emplace_back(layer, expert);
    changed_.notify_one();
  }
  // Returns when all records that arrived are in bands. Throws what went wrong.
  void finish() {
    stop();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  static constexpr int kMaxThreads = 2;  // one brings some 7 GB/s into bands

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    for (std::thread& t : threads_) t.join();
    threads_.clear();
  }
  void work() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !whole_.empty(); });
      if (whole_.empty()) return;
      const auto [layer, expert] = whole_.front();
      whole_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        to_bands(catalog_.layers[layer].layout, store_.record(layer, expert), allocator_);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error) error_ = error;
    }
  }

  ResidentStore& store_;
  const ExpertCatalog& catalog_;
  Allocator& allocator_;
  std::vector<std::unique_ptr<std::atomic<std::size_t>[]>> left_;  // [layers][experts]; empty: nothing is brought anywhere
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::pair<std::uint64_t, std::uint64_t>> whole_;  // records to bring
  bool stopping_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

ResidentStore::ResidentStore(const ExpertCatalog& catalog, const format::ModelFolder& folder, Allocator& allocator,
                             Copier& copier, const ProgressSink& progress, bool bands) {
  for (const ExpertLayer& source : catalog.layers) {
    Layer& layer = layers_.emplace_back();
    if (source.n_experts == 0) continue;
    layer.layout = source.layout;
    layer.n_experts = source.n_experts;
    layer.records = allocator.allocate(mul_or_fail(static_cast<std::uint64_t>(source.n_experts), source.layout.bytes, "experts of a layer"), kRecordAlign);
    max_experts_ = std::max(max_experts_, static_cast<std::size_t>(source.n_experts));
  }
  const std::uint64_t total = total_bytes(catalog);
  std::uint64_t last = 0;
  const auto report = [&](std::uint64_t done) {
    if (!progress || done <= last) return;
    last = done;
    progress("experts", done, total);
  };
  Arrivals arrivals(*this, catalog, allocator, bands);
  load_direct_pieces(catalog, folder, copier, arrivals, report);
  load_the_rest(catalog, folder, copier, arrivals);
  arrivals.finish();
  if (bands)
    for (Layer& l : layers_) l.layout = with_bands(l.layout);
  report(total);  // records are a little larger than what was read
}

void ResidentStore::load_direct_pieces(const ExpertCatalog& catalog, const format::ModelFolder& folder, Copier& copier, Arrivals& arrivals,
                                       const std::function<void(std::uint64_t)>& progress) {
  std::vector<BulkRead> reads;
  for (std::size_t l = 0; l < layers_.size(); ++l)
    for (std::int64_t e = 0; e < layers_[l].n_experts; ++e)
      for (const RecordPiece& p : catalog.layers[l].expert(ExpertIdx(static_cast<std::int32_t>(e))))
        if (p.direct())
          reads.push_back({p.source, record(l, static_cast<std::uint64_t>(e)) + p.record_offset,
                           static_cast<std::uint64_t>(l) << 32 | static_cast<std::uint64_t>(e), catalog.layers[l].check(ExpertIdx(static_cast<std::int32_t>(e)))});
  BulkHooks hooks;
  hooks.progress = progress;
  hooks.arrived = [&](std::uint64_t id) { arrivals.arrived(id >> 32, id & 0xffffffffu); };
  hooks.describe = [](std::uint64_t id) { return expert_text(id >> 32, id & 0xffffffffu); };
  bulk_load(folder, reads, copier, hooks);
}

// What needs more than copying: transforms, and scales whose values must be looked at.
void ResidentStore::load_the_rest(const ExpertCatalog& catalog, const format::ModelFolder& folder, Copier& copier, Arrivals& arrivals) {
  std::vector<std::byte> source, staging;
  for (std::size_t l = 0; l < layers_.size(); ++l)
    for (std::int64_t e = 0; e < layers_[l].n_experts; ++e) {
      const auto pieces = catalog.layers[l].expert(ExpertIdx(static_cast<std::int32_t>(e)));
      std::byte* const to = record(l, static_cast<std::uint64_t>(e));
      try {
        load_changed_pieces(pieces, folder, copier, to, source, staging);
        if (has_checks(layers_[l].layout)) check_record(layers_[l].layout, copier, to, staging);
        for (const RecordPiece& p : pieces)
          if (!p.direct()) arrivals.arrived(l, static_cast<std::uint64_t>(e));
      } catch (const Error& error) {
        fail(error.code(), "{}{}", expert_text(l, static_cast<std::uint64_t>(e)), error.what());
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

ResidentExperts ResidentStore::resident_layer(LayerIdx layer) const noexcept {
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
