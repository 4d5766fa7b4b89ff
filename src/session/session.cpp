#include "session/session.h"

#include <algorithm>

#include "core/clock.h"
#include "core/error.h"
#include "core/hash.h"
#include "model/planner.h"

namespace moeflux::session {
namespace {

constexpr std::int64_t kDefaultContext = 4096;
constexpr std::int64_t kDefaultChunk = 512;

std::int64_t choose_context(std::int64_t wanted, std::int64_t limit) {
  if (wanted < 0) fail(ErrorCode::InvalidArgument, "a context of {} positions makes no sense", wanted);
  if (wanted > limit) fail(ErrorCode::InvalidArgument, "a context of {} positions is over the model's limit of {}", wanted, limit);
  return wanted == 0 ? std::min(limit, kDefaultContext) : wanted;
}

std::int64_t choose_chunk(std::int64_t wanted, std::int64_t ctx) {
  if (wanted < 0) fail(ErrorCode::InvalidArgument, "a chunk of {} tokens makes no sense", wanted);
  return std::min(wanted == 0 ? kDefaultChunk : wanted, ctx);
}

}  // namespace

SessionSizes session_sizes(const SessionOptions& options, std::int64_t max_context, std::int64_t default_chunk) {
  const std::int64_t ctx = choose_context(options.ctx_size, max_context);
  return {ctx, choose_chunk(options.chunk_size != 0 ? options.chunk_size : default_chunk, ctx)};
}

Session::Session(const Parts& parts, const SessionOptions& options)
    : Session(parts, options, session_sizes(options, parts.model.spec().max_context, parts.default_chunk)) {}

Session::Session(const Parts& parts, const SessionOptions& options, SessionSizes sizes)
    : parts_(parts),
      ctx_(sizes.ctx),
      chunk_(sizes.chunk),
      stream_(parts.backend.create_stream()),
      state_(parts.model.spec(), ctx_, options.kv, parts.backend.allocator(), parts.backend.copier()),
      arena_(parts.backend.allocator().allocate(model::activation_bytes(parts.model.spec(), chunk_), 64)),
      // Steps in units ask no router ahead of time.
      governor_(UnitStep::possible(parts.model.spec(), parts.experts, parts.backend, parts.routing) ? Prefetch::Off : parts.prefetch, !parts.experts.resident()),
      record_reads_(options.record_reads),
      logits_device_(parts.backend.allocator().allocate(static_cast<std::size_t>(model::kLogitRows * parts.model.spec().vocab_size) * 4, 64)),
      logits_host_(parts.backend.copier().host_view(logits_device_.data()) != nullptr ? Buffer() : parts.backend.pinned_allocator().allocate(n_logits() * 4, 64)),
      repeatable_(routed_on_device()) {
  if (UnitStep::possible(parts.model.spec(), parts.experts, parts.backend, parts.routing))
    units_ = std::make_unique<UnitStep>(parts.model.spec(), parts.experts, parts.backend, *stream_, parts.routing, parts.cpu_experts == CpuExperts::Off ? nullptr : parts.processor,
                                        parts.cpu_experts);
  history_.reserve(static_cast<std::size_t>(ctx_));
  chunk_tokens_.reserve(static_cast<std::size_t>(chunk_));
}

bool Session::routed_on_device() const {
  if (parts_.routing != nullptr) return false;
  const auto& layers = parts_.model.spec().layers;
  for (std::size_t l = 0; l < layers.size(); ++l)
    if (std::holds_alternative<model::MoeSpec>(layers[l].ffn) &&
        !model::routed_on_device(parts_.backend, parts_.experts.resident_layer(LayerIdx(static_cast<std::int32_t>(l)))))
      return false;
  return parts_.backend.routes_on_device();
}

void Session::reset() {
  state_.reset();
  history_.clear();
  reads_.clear();
  has_logits_ = false;
  broken_ = false;
}

void Session::check_tokens(std::span<const TokenId> tokens) const {
  if (broken_) fail(ErrorCode::InvalidArgument, "this session was interrupted in the middle of a computation; reset it first");
  if (tokens.empty()) fail(ErrorCode::InvalidArgument, "no tokens to compute");
  const std::int64_t vocab = parts_.model.spec().vocab_size;
  for (TokenId t : tokens)
    if (raw(t) < 0 || raw(t) >= vocab) fail(ErrorCode::InvalidArgument, "token id {} is outside the vocabulary of {}", raw(t), vocab);
  const auto free = static_cast<std::size_t>(ctx_ - position());
  if (tokens.size() > free)
    fail(ErrorCode::InvalidArgument, "{} tokens do not fit: the context holds {}, {} of them used", tokens.size(), ctx_, position());
}

void Session::evaluate(std::span<const TokenId> tokens, const EvaluateOptions& options) {
  if (cancelled()) fail(ErrorCode::Cancelled, "cancelled");
  check_tokens(tokens);
  const bool one_by_one = options.one_at_a_time || tokens.size() == 1;
  const auto step = static_cast<std::size_t>(one_by_one ? 1 : chunk_);
  const std::size_t start_size = history_.size();
  const std::uint64_t start = now_ns();
  try {
    for (std::size_t done = 0; done < tokens.size();) {
      if (cancelled()) fail(ErrorCode::Cancelled, "cancelled");
      const std::size_t n = std::min(step, tokens.size() - done);
      run_chunk(tokens.subspan(done, n), done + n == tokens.size(), one_by_one, options);
      done += n;
    }
  } catch (...) {
    // Chunks that were finished are in the cache but not wanted: without recurrent state the positions are simply free again.
    broken_ = parts_.model.spec().recurrent();
    history_.resize(start_size);
    has_logits_ = false;
    hash_stale_ = false;
    throw;
  }
  count(static_cast<std::int64_t>(tokens.size()), one_by_one, start);
}

// The model's ops over the chunk, and the logits that are wanted.
void Session::run_ops(model::Context& c, bool last, const EvaluateOptions& options, const model::ForwardHooks& hooks) {
  const std::int64_t pos0 = position();
  const TensorView hidden = parts_.model.forward(c, chunk_tokens_, pos0, state_.layers(), hooks);
  if (options.on_logits)
    hand_out_logits(c, hidden, pos0, options.on_logits);
  else if (last)
    parts_.model.logits(c, hidden.slice(hidden.dim(0) - 1, 1), view_f32(logits_row(), {1, parts_.model.spec().vocab_size}));
}

void Session::run_chunk(std::span<const TokenId> tokens, bool last, bool decode, const EvaluateOptions& options) {
  const std::uint64_t start = now_ns();
  model::Context c{parts_.backend, *stream_, parts_.experts, arena_, moe_, counters_, parts_.precision};
  // The governor judges decoding; a prompt's experts are nearly certain.
  c.prefetch = decode ? governor_.on() : parts_.prefetch != Prefetch::Off && !parts_.experts.resident();
  c.routing = parts_.routing;
  if (record_reads_ && decode) c.reads = &reads_;
  chunk_tokens_.clear();
  for (TokenId t : tokens) chunk_tokens_.push_back(raw(t));
  const std::int64_t pos0 = position();
  if (parts_.routing != nullptr) parts_.routing->begin_pass(pos0, static_cast<std::int64_t>(tokens.size()));
  model::ForwardHooks hooks;
  hooks.before_layer = [this] {
    if (cancelled()) fail(ErrorCode::Cancelled, "cancelled");
  };
  std::vector<float> row;
  if (options.on_hidden)
    hooks.hidden = [&](std::int64_t layer, const TensorView& h) {
      parts_.backend.synchronize(*stream_);
      row.resize(static_cast<std::size_t>(h.dim(1)));
      for (std::int64_t t = 0; t < h.dim(0); ++t) {
        parts_.backend.copier().to_host(reinterpret_cast<std::byte*>(row.data()), reinterpret_cast<const std::byte*>(h.row(t)), row.size() * 4);
        options.on_hidden(layer, pos0 + t, row);
      }
    };
  const bool single = !options.on_hidden && !options.on_logits && last && tokens.size() == 1;
  if (units_ && single) {
    c.prefetch = false;
    struct Frame {
      Session& self;
      const EvaluateOptions& options;
      const model::ForwardHooks& hooks;
    } frame{*this, options, hooks};  // one reference, so that the function below needs no memory of its own
    units_->run(c, chunk_tokens_, pos0, [&frame](model::Context& context) { frame.self.run_ops(context, true, frame.options, frame.hooks); }, hooks.before_layer);
  } else if (!parts_.backend.begin_step(*stream_, chunk_tokens_, pos0, repeatable_ && single)) {
    try {
      run_ops(c, last, options, hooks);
    } catch (...) {
      parts_.backend.end_step(*stream_, false);
      throw;
    }
    parts_.backend.end_step(*stream_, true);
  }
  parts_.backend.synchronize(*stream_);
  if (last && !options.on_logits) take_logits();
  history_.insert(history_.end(), tokens.begin(), tokens.end());
  has_logits_ = last;
  if (parts_.routing != nullptr) parts_.routing->end_pass(decode);
  if (decode) governor_.step_took(now_ns() - start);
}

// Where the head leaves the only row that is wanted: in main memory, where the device can write it while it computes.
float* Session::logits_row() const noexcept {
  return parts_.backend.reads_pinned() && !logits_host_.empty() ? logits_host_.as<float>() : logits_device_.as<float>();
}

void Session::take_logits() {
  if (logits_row() == logits_device_.as<float>()) return fetch_logits(0);
  logits_ = logits_row();
  hash_stale_ = true;
}

void Session::fetch_logits(std::int64_t row) {
  const auto bytes = n_logits() * 4;
  const std::byte* at = logits_device_.data() + static_cast<std::size_t>(row) * bytes;
  Copier& copier = parts_.backend.copier();
  if (logits_host_.empty()) {
    logits_ = reinterpret_cast<const float*>(copier.host_view(at));
  } else {
    copier.to_host(logits_host_.data(), at, bytes);
    logits_ = logits_host_.as<float>();
  }
  hash_stale_ = true;
}

const SessionStats& Session::stats() const noexcept {
  if (hash_stale_) stats_.logits_hash = hash_bytes(logits_, n_logits() * 4);
  hash_stale_ = false;
  return stats_;
}

// A few rows at a time: the logits of a whole prompt over a large vocabulary would dwarf everything else. logits_ ends up
// with the last row.
void Session::hand_out_logits(model::Context& c, const TensorView& hidden, std::int64_t pos0, const LogitsSink& sink) {
  const std::int64_t vocab = parts_.model.spec().vocab_size;
  for (std::int64_t first = 0; first < hidden.dim(0); first += model::kLogitRows) {
    const std::int64_t n = std::min(model::kLogitRows, hidden.dim(0) - first);
    const TensorView rows = view_f32(logits_device_.as<float>(), {n, vocab});
    parts_.model.logits(c, hidden.slice(first, n), rows);
    parts_.backend.synchronize(*stream_);
    for (std::int64_t t = 0; t < n; ++t) {
      fetch_logits(t);
      if (sink) sink(pos0 + first + t, {logits_, n_logits()});
    }
  }
}

void Session::count_prefetch() {
  const store::StoreStats s = parts_.experts.stats();
  stats_.bytes_read = s.bytes_read;
  stats_.device_hits = s.hits;
  stats_.host_hits = s.host_hits;
  stats_.disk_misses = s.requests - s.hits - s.host_hits;
  stats_.bytes_to_device = s.bytes_to_device;
  stats_.bytes_to_host = s.bytes_to_host;
  if (units_) stats_.cpu_experts = units_->n_computed();
  stats_.hints_issued = s.hints_issued;
  stats_.hints_used = s.hints_used;
  stats_.hints_wasted = s.hints_wasted;
  stats_.predicted = counters_.predicted;
  stats_.predicted_right = counters_.predicted_right;
  stats_.prefetch_steps_on = governor_.steps_on();
  stats_.prefetch_steps_off = governor_.steps_off();
  stats_.prefetch_on_ns = governor_.median_on();
  stats_.prefetch_off_ns = governor_.median_off();
}

void Session::count(std::int64_t n_tokens, bool decode, std::uint64_t start_ns) {
  (decode ? stats_.decode_tokens : stats_.prefill_tokens) += n_tokens;
  (decode ? stats_.decode_ns : stats_.prefill_ns) += now_ns() - start_ns;
  stats_.expert_requests = counters_.requests;
  stats_.expert_hits = counters_.hits;
  stats_.stall_ns = counters_.stall_ns;
  count_prefetch();
}

}  // namespace moeflux::session
