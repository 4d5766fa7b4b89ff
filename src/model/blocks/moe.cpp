// Mixture of experts: router, lease, shared expert while the misses fly, experts as they land, rows combined in rank order.
#include <algorithm>
#include <numeric>

#include "core/clock.h"
#include "model/blocks/blocks.h"
#include "model/blocks/unit_plan.h"

namespace moeflux::model {
namespace {

using backend::ExpertWork;
using backend::FfnMatrices;

// Groups the slots t * k + r by expert (counting sort, stable), and lists the experts that have any.
void group_by_expert(MoeScratch& m, std::int64_t n_tokens, std::int64_t top_k, std::int64_t n_experts) {
  const auto n = static_cast<std::size_t>(n_tokens * top_k);
  m.begin.assign(static_cast<std::size_t>(n_experts) + 1, 0);
  for (std::size_t i = 0; i < n; ++i) ++m.begin[static_cast<std::size_t>(m.ids[i]) + 1];
  m.wanted.clear();
  for (std::int32_t e = 0; e < n_experts; ++e) {
    if (m.begin[static_cast<std::size_t>(e) + 1] > 0) m.wanted.push_back(ExpertIdx(e));
    m.begin[static_cast<std::size_t>(e) + 1] += m.begin[static_cast<std::size_t>(e)];
  }
  m.order.resize(n);
  m.rows.resize(n);
  for (std::size_t i = n; i-- > 0;) {  // backwards, filling each expert's range from its end: order stays ascending
    const auto at = static_cast<std::size_t>(--m.begin[static_cast<std::size_t>(m.ids[i]) + 1]);
    m.order[at] = static_cast<std::int32_t>(i);
    m.rows[at] = static_cast<std::int32_t>(i / static_cast<std::size_t>(top_k));
  }
  // begin[e + 1] has walked back to the start of e; shift so that begin[e] is the start of e again.
  for (std::size_t e = 0; e < static_cast<std::size_t>(n_experts); ++e) m.begin[e] = m.begin[e + 1];
  m.begin.back() = static_cast<std::int32_t>(n);
}

ExpertWork work_of(const MoeScratch& m, ExpertIdx e, const store::ExpertView& view) {
  const auto i = static_cast<std::size_t>(raw(e));
  const auto first = static_cast<std::size_t>(m.begin[i]), n = static_cast<std::size_t>(m.begin[i + 1]) - first;
  return {FfnMatrices{view.gate, view.up, view.down, view.gate_bias, view.up_bias, view.down_bias}, std::span(m.rows).subspan(first, n), std::span(m.order).subspan(first, n)};
}

// Computes one lease: whatever is ready goes out as one op, together with `also` in the first; when nothing is, waits for one.
void run_lease(Context& c, const MoeSpec& spec, store::ExpertLease& lease, std::span<const ExpertIdx> experts, const TensorView& x,
               const TensorView& rows, const ExpertWork* also) {
  MoeScratch& m = c.moe;
  m.pending.resize(experts.size());
  std::iota(m.pending.begin(), m.pending.end(), std::size_t{0});
  c.counters.requests += experts.size();
  for (std::size_t i : m.pending) c.counters.hits += lease.ready(i) ? 1 : 0;
  while (!m.pending.empty()) {
    m.works.clear();
    if (also != nullptr) m.works.push_back(*also);
    also = nullptr;
    std::size_t kept = 0;
    for (std::size_t i : m.pending) {
      if (lease.ready(i))
        m.works.push_back(work_of(m, experts[i], lease.wait(i)));
      else
        m.pending[kept++] = i;
    }
    m.pending.resize(kept);
    if (m.works.empty()) {
      const std::uint64_t start = now_ns();
      lease.wait(m.pending.front());
      c.counters.stall_ns += now_ns() - start;
      continue;
    }
    c.run(backend::ExpertFfn{x, m.works, rows, spec.glu, spec.glu_limit, spec.glu_alpha, c.precision});
  }
}

// The shared expert as one more that all tokens have chosen; its rows stand behind those of the others.
ExpertWork shared_work(Context& c, const MoeSpec& spec, const MoeWeights& w, std::int64_t n_tokens) {
  const auto rows = all_rows(c.moe, n_tokens * (spec.top_k + 1));
  const auto n = static_cast<std::size_t>(n_tokens);
  return {FfnMatrices{w.shared.gate, w.shared.up, w.shared.down, {}, {}, {}}, rows.first(n), rows.last(n)};
}

// The shared expert goes along with the others in one op where nothing has to be waited for and it is made like them.
bool shared_goes_along(const Context& c, const MoeSpec& spec) {
  return spec.shared_dim > 0 && spec.shared_dim == spec.inner_dim && spec.glu == backend::GluKind::Silu && c.experts.resident();
}

void run_shared(Context& c, const MoeSpec& spec, const MoeWeights& w, const TensorView& x, const MoeTensorScratch& s) {
  if (spec.shared_dim > 0 && !shared_goes_along(c, spec)) {
    const ExpertWork work = shared_work(c, spec, w, x.dim(0));
    c.run(backend::ExpertFfn{x, {&work, 1}, s.all_rows, backend::GluKind::Silu, 0.0f, 0.0f, c.precision});
  }
  if (spec.shared_gate) c.matmul(x, w.shared_gate, s.shared_gate, Precision::Exact);
}

void record_reads(Context& c, LayerIdx layer, const store::ExpertLease& lease, std::span<const ExpertIdx> experts) {
  LayerReads& r = c.reads->emplace_back();
  r.layer = raw(layer);
  for (std::size_t i = 0; i < experts.size(); ++i) {
    if (lease.hit(i))
      ++r.n_hits;
    else
      r.missed.push_back(raw(experts[i]));
  }
}

// Tells the store what this visit of the layer wants.
void report_visit(Context& c, LayerIdx layer, std::int64_t n_tokens) {
  MoeScratch& m = c.moe;
  m.counts.clear();
  if (n_tokens > 1)
    for (ExpertIdx e : m.wanted) {
      const auto i = static_cast<std::size_t>(raw(e));
      m.counts.push_back(static_cast<std::uint32_t>(m.begin[i + 1] - m.begin[i]));
    }
  c.experts.visit(layer, m.wanted, m.counts, static_cast<std::uint32_t>(n_tokens));
}

// The experts of a layer in ascending order, which is file order, a batch at a time: while one is computed the next is being
// read. The first goes out before the shared expert is computed, so that its misses fly meanwhile.
void run_experts(Context& c, LayerIdx layer, const MoeSpec& spec, const MoeWeights& w, const TensorView& x, const MoeTensorScratch& s, const TensorView& h,
                 const NextRouter& next_router) {
  report_visit(c, layer, x.dim(0));
  const std::span<const ExpertIdx> all(c.moe.wanted);
  const std::size_t batch = x.dim(0) == 1 ? c.experts.max_lease() : c.experts.scan_batch();
  const auto part = [&](std::size_t at) { return all.subspan(at, std::min(batch, all.size() - at)); };

  store::ExpertLease lease = c.experts.acquire(layer, part(0));
  if (c.reads != nullptr && x.dim(0) == 1) record_reads(c, layer, lease, part(0));
  run_shared(c, spec, w, x, s);
  if (c.prefetch && x.dim(0) == 1 && next_router.spec != nullptr) predict_experts(c, next_router, h);
  for (std::size_t at = 0; at < all.size();) {
    const std::span<const ExpertIdx> now = part(at);
    const std::size_t after = at + now.size();
    store::ExpertLease next;
    if (after < all.size()) next = c.experts.try_acquire(layer, part(after));
    const bool along = at == 0 && shared_goes_along(c, spec);
    const ExpertWork shared = along ? shared_work(c, spec, w, x.dim(0)) : ExpertWork{};
    run_lease(c, spec, lease, now, x, s.all_rows, along ? &shared : nullptr);
    c.backend.synchronize(c.stream);  // the lease may go only when its experts were used
    lease = store::ExpertLease{};
    if (after < all.size() && !next) next = c.experts.acquire(layer, part(after));
    lease = std::move(next);
    at = after;
  }
}

backend::RoutedFfn routed_ffn(const Context& c, const store::SlotExperts& slots, const std::int32_t* slot_of, const MoeSpec& spec, const MoeWeights& w,
                              const TensorView& x, const MoeTensorScratch& s) {
  const store::ExpertView& e = slots.first;
  backend::RoutedFfn op{.x = x,
                        .ids = s.ids,
                        .first = {e.gate, e.up, e.down, e.gate_bias, e.up_bias, e.down_bias},
                        .stride = slots.stride,
                        .slot_of = slot_of,
                        .host_offset = slots.host_offset,
                        .n_experts = spec.n_experts,
                        .y = s.rows,
                        .shared = {},
                        .shared_y = {},
                        .glu = spec.glu,
                        .limit = spec.glu_limit,
                        .alpha = spec.glu_alpha,
                        .precision = c.precision};
  if (spec.shared_dim > 0) {
    op.shared = FfnMatrices{w.shared.gate, w.shared.up, w.shared.down, {}, {}, {}};
    op.shared_y = s.shared;
  }
  return op;
}

// Everything on the device: the router's choice is not looked at here.
void run_on_device(Context& c, const store::ResidentExperts& r, const MoeSpec& spec, const MoeWeights& w, const TensorView& x, const MoeTensorScratch& s) {
  const auto n_chosen = static_cast<std::uint64_t>(x.dim(0) * spec.top_k);
  c.counters.requests += n_chosen;
  c.counters.hits += n_chosen;
  c.backend.run_routed(c.stream, routed_ffn(c, {r.first, r.stride, spec.n_experts}, nullptr, spec, w, x, s));
}

// The step is being recorded in units: the choice is checked against the table of slots, the experts are a unit of their own.
void record_units(Context& c, LayerIdx layer, const MoeSpec& spec, const MoeWeights& w, const TensorView& x, const MoeTensorScratch& s) {
  UnitPlan& plan = *c.units;
  backend::UnitRunner& units = *c.backend.units();
  const std::int32_t* const slot_of = plan.slot_of + raw(layer) * plan.row;
  const auto n_sites = static_cast<std::int64_t>(plan.sites.size());
  backend::RoutedFfn op = routed_ffn(c, c.experts.slot_layer(layer), slot_of, spec, w, x, s);
  op.n_lent = plan.n_lent;
  const backend::SlotCheck check{.ids = s.ids,
                                 .slot_of = slot_of,
                                 .forced = plan.forced == nullptr ? nullptr : plan.forced + n_sites * plan.forced_row,
                                 .shares = plan.shares ? slot_of + spec.n_experts + plan.n_lent : nullptr,
                                 .ffn = &op};
  if (!units.check(c.stream, check)) plan.takes_share[static_cast<std::size_t>(raw(layer))] = 0;
  units.cut(c.stream);
  if (!c.backend.run_routed(c.stream, op)) plan.fills_lent[static_cast<std::size_t>(raw(layer))] = 0;
  units.cut(c.stream);
  plan.sites.push_back({layer, &spec});
}

// What a recording of this layer will need.
void reserve_units(Context& c, LayerIdx layer, const MoeSpec& spec, const MoeWeights& w, const TensorView& x, const MoeTensorScratch& s) {
  c.backend.units()->reserve(c.stream, routed_ffn(c, c.experts.slot_layer(layer), c.units->slot_of, spec, w, x, s));
}

}  // namespace

bool routed_on_device(const backend::Backend& backend, const store::ResidentExperts& r) {
  return backend.routes_on_device() && !r.first.gate.empty() && r.first.gate.format == r.first.up.format;
}

std::span<const std::int32_t> all_rows(MoeScratch& s, std::int64_t n) {
  if (s.all.size() < static_cast<std::size_t>(n)) {
    s.all.resize(static_cast<std::size_t>(n));
    std::iota(s.all.begin(), s.all.end(), 0);
  }
  return std::span(s.all).first(static_cast<std::size_t>(n));
}

MoeTensorScratch::MoeTensorScratch(Arena& a, const MoeSpec& s, std::int64_t n, std::int64_t d)
    : logits(a.f32({n, s.n_experts})),
      ids(a.i32({n, s.top_k})),
      weights(a.f32({n, s.top_k})),
      all_rows(a.f32({n * (s.top_k + (s.shared_dim > 0 ? 1 : 0)), d})),
      rows(all_rows.slice(0, n * s.top_k)) {
  if (s.shared_dim > 0) shared = all_rows.slice(n * s.top_k, n);
  if (s.shared_gate) shared_gate = a.f32({n, 1});
}

namespace {

// What the hook and the prediction have to do with a choice that has come to c.moe.ids.
void on_routed(Context& c, LayerIdx layer, const MoeSpec& spec, const TensorView& ids) {
  judge_prediction(c, layer);
  if (c.routing != nullptr && c.routing->routed(layer, spec.n_experts, spec.top_k, c.moe.ids))
    c.backend.copier().to_device(static_cast<std::byte*>(ids.data), reinterpret_cast<const std::byte*>(c.moe.ids.data()), c.moe.ids.size() * 4);
}

}  // namespace

store::ExpertLease bring_experts(Context& c, const MoeSite& site, std::span<const std::int32_t> ids) {
  c.moe.ids.assign(ids.begin(), ids.end());
  group_by_expert(c.moe, 1, site.spec->top_k, site.spec->n_experts);
  report_visit(c, site.layer, 1);
  store::ExpertLease lease = c.experts.acquire_at_rest(site.layer, c.moe.wanted);
  c.counters.requests += lease.size();
  for (std::size_t i = 0; i < lease.size(); ++i) c.counters.hits += lease.ready(i) ? 1 : 0;
  const std::uint64_t start = now_ns();
  for (std::size_t i = 0; i < lease.size(); ++i) lease.wait(i);
  c.counters.stall_ns += now_ns() - start;
  return lease;
}

void moe_ffn(Context& c, LayerIdx layer, const MoeSpec& spec, const MoeWeights& w, const TensorView& x, const TensorView& h, const NextRouter& next) {
  const std::int64_t n = x.dim(0), d = x.dim(1);
  const MoeTensorScratch s(c.arena, spec, n, d);
  // Routers see f32 activations in both precisions.
  const store::ResidentExperts resident = c.experts.resident_layer(layer);
  const bool recorded = c.units != nullptr && c.units->recording;
  const bool on_device = recorded || (c.routing == nullptr && routed_on_device(c.backend, resident));  // a hook wants to see the choice
  const backend::MatMulPart gates[] = {{w.router, w.router_bias, s.logits}, {w.shared_gate, {}, s.shared_gate}};
  c.run(backend::MatMul{x, {gates, on_device && spec.shared_gate ? 2u : 1u}, Precision::Exact});
  const RouterSpec& r = spec.router;
  c.run(backend::Route{s.logits, w.select_bias, s.ids, s.weights, r.score, r.n_groups, r.topk_groups, r.normalize, r.norm_eps, r.scaling});
  const backend::Combine combine{view_f32(s.rows.f32(), {n, spec.top_k, d}), s.weights, s.shared, s.shared_gate, h};
  if (recorded) {
    record_units(c, layer, spec, w, x, s);
    return c.run(combine);
  }
  if (c.units != nullptr) reserve_units(c, layer, spec, w, x, s);
  if (on_device) {
    run_on_device(c, resident, spec, w, x, s);
    return c.run(combine);
  }

  c.backend.synchronize(c.stream);
  c.moe.ids.resize(static_cast<std::size_t>(n * spec.top_k));
  c.backend.copier().to_host(reinterpret_cast<std::byte*>(c.moe.ids.data()), static_cast<const std::byte*>(s.ids.data), c.moe.ids.size() * 4);
  on_routed(c, layer, spec, s.ids);
  group_by_expert(c.moe, n, spec.top_k, spec.n_experts);

  run_experts(c, layer, spec, w, x, s, h, next);
  if (c.prefetch && n > 1 && next.spec != nullptr) announce_scan(c, next, n);
  c.run(combine);
}

}  // namespace moeflux::model
