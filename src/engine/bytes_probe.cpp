// The bytes of a token without its arithmetic.
#include <moeflux/probe.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/thread_pool.h"
#include "engine/expert_setup.h"
#include "engine/inspect.h"
#include "format/model_folder.h"
#include "io/async_reader.h"
#include "io/machine.h"
#include "io/region.h"
#include "model/binder.h"
#include "model/family.h"
#include "store/slot_layout.h"

namespace moeflux {
namespace {

constexpr std::size_t kPoolBytes = std::size_t{512} << 20;  // larger than any cache: hits come from here
constexpr std::size_t kLine = 128;                          // sixteen words
constexpr std::chrono::seconds kPatience{10};

// Memory with pages of its own behind it.
class Touched {
 public:
  Touched(std::size_t bytes, ThreadPool& pool) : words_(new (std::nothrow) std::uint64_t[bytes / 8]), bytes_(bytes) {
    if (words_ == nullptr) fail(ErrorCode::OutOfMemory, "the probe needs {} bytes", bytes);
    constexpr std::size_t kTask = std::size_t{4} << 20;
    pool.run(static_cast<std::int64_t>((bytes + kTask - 1) / kTask), [&](std::int64_t t, int) noexcept {
      const std::size_t first = static_cast<std::size_t>(t) * kTask / 8, last = std::min(bytes, (static_cast<std::size_t>(t) + 1) * kTask) / 8;
      std::fill(words_.get() + first, words_.get() + last, std::uint64_t{1});
    });
  }
  const std::uint64_t* words() const noexcept { return words_.get(); }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::unique_ptr<std::uint64_t[]> words_;
  std::size_t bytes_;
};

// Reads [at, at + bytes) of a block with all threads, from its start again after its end.
class MemoryWalk {
 public:
  MemoryWalk(const Touched& block, ThreadPool& pool) : block_(block), pool_(pool) {}

  void read(std::size_t bytes) {
    bytes = std::min(bytes / kLine * kLine, block_.bytes());
    if (at_ + bytes > block_.bytes()) at_ = 0;
    const int n = pool_.size();
    pool_.run(n, [&](std::int64_t t, int) noexcept {
      const std::size_t lines = bytes / kLine, first = lines * static_cast<std::size_t>(t) / static_cast<std::size_t>(n),
                        last = lines * (static_cast<std::size_t>(t) + 1) / static_cast<std::size_t>(n);
      sums_[static_cast<std::size_t>(t) % sums_.size()].value += sum_words_(block_.words() + (at_ + first * kLine) / 8, (last - first) * kLine / 8);
    });
    at_ += bytes;
  }
  std::uint64_t sum() const noexcept {
    std::uint64_t s = 0;
    for (const Sum& x : sums_) s += x.value;
    return s;
  }

 private:
  struct alignas(64) Sum {
    std::uint64_t value = 0;
  };
  const Touched& block_;
  ThreadPool& pool_;
  const backend::WordSum sum_words_ = backend::widest_word_sum();
  std::size_t at_ = 0;
  std::vector<Sum> sums_ = std::vector<Sum>(1024);
};

class Probe {
 public:
  explicit Probe(const BytesProbeOptions& o)
      : options_(o), folder_(format::ModelFolder::open(o.model)), parsed_(model::parse_model(folder_)), binding_(model::bind(folder_, parsed_.spec, parsed_.names)),
        layout_(binding_.experts), pool_(o.n_threads) {
    info_ = engine::describe(folder_, parsed_, binding_);
    cut_into_tokens();
    const double trunk = static_cast<double>(info_.trunk_bytes_per_token) + o.other_bytes;
    const model::ModelSources& s = binding_.sources;
    head_bytes_ = static_cast<std::size_t>(parsed_.spec.tied_head ? s.embed.bytes() : s.head.bytes());
    layer_bytes_ = static_cast<std::size_t>(std::max(0.0, trunk - static_cast<double>(head_bytes_)) / static_cast<double>(parsed_.spec.layers.size()));
    region_ = io::Region::allocate(2 * std::max<std::size_t>(most_missed_, 1) * layout_.slot_bytes());
    reader_ = engine::make_model_reader(folder_, o.io, {region_.span()});
  }

  BytesProbe run() {
    const Touched trunk(std::max(head_bytes_ + layer_bytes_ * parsed_.spec.layers.size(), kLine) / kLine * kLine, pool_);
    const Touched hits(kPoolBytes, pool_);
    MemoryWalk trunk_walk(trunk, pool_), hit_walk(hits, pool_);
    BytesProbe result;
    result.n_tokens = static_cast<std::int64_t>(tokens_.size());
    for (const auto& token : tokens_) add_bytes(token, result);
    if (!tokens_.empty()) result.memory_bytes /= static_cast<double>(tokens_.size());
    if (!tokens_.empty()) result.disk_bytes /= static_cast<double>(tokens_.size());
    for (int round = 0; round < options_.n_rounds && !tokens_.empty(); ++round)
      for (const bool ahead : {false, true}) {
        const std::uint64_t start = now_ns();
        walk(trunk_walk, hit_walk, ahead);
        const double seconds = static_cast<double>(now_ns() - start) / 1e9;
        (ahead ? result.ahead : result.dependent).push_back(static_cast<double>(tokens_.size()) / seconds);
      }
    if (trunk_walk.sum() + hit_walk.sum() == 0 && !tokens_.empty()) fail(ErrorCode::Internal, "the probe read nothing");
    return result;
  }

 private:
  using Token = std::vector<const LayerReads*>;  // by layer; null: no experts

  void cut_into_tokens() {
    const auto n_layers = static_cast<std::int32_t>(parsed_.spec.layers.size());
    std::int32_t last = n_layers;
    for (const LayerReads& r : options_.reads) {
      if (r.layer < 0 || r.layer >= n_layers) fail(ErrorCode::InvalidArgument, "reads of layer {}, the model has {}", r.layer, n_layers);
      for (std::int32_t e : r.missed)
        if (e < 0 || e >= binding_.experts.layer(LayerIdx(r.layer)).n_experts) fail(ErrorCode::InvalidArgument, "reads of layer {}: there is no expert {}", r.layer, e);
      if (r.layer <= last) tokens_.emplace_back(static_cast<std::size_t>(n_layers), nullptr);
      tokens_.back()[static_cast<std::size_t>(r.layer)] = &r;
      last = r.layer;
      most_missed_ = std::max(most_missed_, r.missed.size());
    }
  }

  std::size_t hit_bytes(const LayerReads* r) const { return r == nullptr ? 0 : r->n_hits * static_cast<std::size_t>(info_.bytes_per_expert); }

  void add_bytes(const Token& token, BytesProbe& result) const {
    result.memory_bytes += static_cast<double>(head_bytes_);
    for (const LayerReads* r : token) {
      result.memory_bytes += static_cast<double>(layer_bytes_ + hit_bytes(r));
      if (r != nullptr) result.disk_bytes += static_cast<double>(r->missed.size() * info_.bytes_per_expert);
    }
  }

  // The reads of a layer into one of the two halves of the region.
  void submit(const LayerReads* r, bool half) {
    if (r == nullptr) return;
    requests_.clear();
    for (std::size_t i = 0; i < r->missed.size(); ++i) {
      const LayerIdx layer{r->layer};
      const auto pieces = binding_.experts.layer(layer).expert(ExpertIdx(r->missed[i]));
      std::byte* const slot = region_.data() + (i + (half ? most_missed_ : 0)) * layout_.slot_bytes();
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        if (!store::SlotLayout::needs_read(pieces, p)) continue;
        const format::Extent& x = pieces[p].source;
        requests_.push_back({.file = x.file, .offset = x.offset, .bytes = x.bytes, .window = slot + layout_.window_at(layer, p), .tag = half ? 1u : 0u});
      }
    }
    if (const int error = reader_->submit(requests_); error != 0) fail(ErrorCode::Io, "{}: the probe's reads were refused ({})", folder_.path().string(), error);
    pending_[half ? 1 : 0] += requests_.size();
  }

  void finish(bool half) {
    io::ReadCompletion done[64];
    while (pending_[half ? 1 : 0] > 0) {
      const std::size_t n = reader_->wait(done, kPatience);
      if (n == 0) fail(ErrorCode::Io, "{}: a read does not come back", folder_.path().string());
      for (std::size_t i = 0; i < n; ++i) {
        if (done[i].status != 0) fail(ErrorCode::Io, "{}: a read failed ({})", folder_.path().string(), done[i].status);
        --pending_[done[i].tag];
      }
    }
  }

  void walk(MemoryWalk& trunk, MemoryWalk& hits, bool ahead) {
    const std::size_t n_layers = parsed_.spec.layers.size(), n = tokens_.size() * n_layers;
    const auto at = [&](std::size_t i) { return i < n ? tokens_[i / n_layers][i % n_layers] : nullptr; };
    if (ahead) submit(at(0), false);
    for (std::size_t i = 0; i < n; ++i) {
      const bool half = i % 2 == 1;
      if (ahead) submit(at(i + 1), !half);
      trunk.read(layer_bytes_);
      if (!ahead) submit(at(i), half);
      if (const std::size_t bytes = hit_bytes(at(i)); bytes > 0) hits.read(bytes);
      finish(half);
      if ((i + 1) % n_layers == 0) trunk.read(head_bytes_);
    }
  }

  const BytesProbeOptions& options_;
  format::ModelFolder folder_;
  model::ParsedModel parsed_;
  model::Binding binding_;
  ModelInfo info_;
  store::SlotLayout layout_;
  ThreadPool pool_;
  std::vector<Token> tokens_;
  std::size_t most_missed_ = 0, head_bytes_ = 0, layer_bytes_ = 0;
  io::Region region_;
  std::unique_ptr<io::AsyncReader> reader_;
  std::vector<io::ReadRequest> requests_;
  std::size_t pending_[2] = {0, 0};
};

}  // namespace

DiskSpeed probe_disk_speed(const std::filesystem::path& model, IoKind io) {
  const format::ModelFolder folder = format::ModelFolder::open(model);
  io::DiskProbeOptions o;
  o.reader = engine::reader_kind(io);
  const io::DiskProbe probe = io::probe_disk(engine::weight_files(folder), o);
  return {probe.bytes_per_second(), probe.direct};
}

BytesProbe probe_token_bytes(const BytesProbeOptions& options) { return Probe(options).run(); }

}  // namespace moeflux
