// A device that records steps in units, played by the CPU backend: what is launched waits in a queue and is done later, in order, as a
// device would, and a unit behind a miss does nothing.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "core/error.h"

namespace moeflux::test {

class UnitDevice final : public backend::Backend, public backend::UnitRunner {
 public:
  // Even seeds: it launches all units of a step at once when asked.
  explicit UnitDevice(backend::Backend& inner, std::uint32_t seed = 1) : inner_(inner), random_(seed), launches_all_(seed % 2 == 0) {}

  // For tests: recordings are refused from now on, n times; what happened.
  void refuse(int n) { to_refuse_ = n; }
  std::function<void(std::size_t check, const std::int32_t* slot_of)> on_check;  // when the device comes to it
  std::size_t n_shared = 0;  // experts left to the host
  std::size_t n_launched = 0, n_skipped = 0, n_eager_steps = 0, n_recorded = 0, n_replayed = 0, n_whole = 0, n_launched_all = 0, n_left = 0;

  std::string name() const override { return "units of " + inner_.name(); }
  std::unique_ptr<backend::Stream> create_stream() override {
    auto s = std::make_unique<Queue>();
    s->inner = inner_.create_stream();
    return s;
  }
  void synchronize(backend::Stream& stream) override { drain(of(stream)); }
  Allocator& allocator() noexcept override { return inner_.allocator(); }
  Copier& copier() noexcept override { return inner_.copier(); }
  bool routes_on_device() const noexcept override { return true; }
  backend::UnitRunner* units() noexcept override { return this; }
  bool run_routed(backend::Stream& stream, const backend::RoutedFfn& op) override {
    put(stream, [this, op](Queue& q) { routed(q, op); });
    return op.n_lent > 0 && op.slot_of != nullptr;
  }

  std::size_t max_top_k() const noexcept override { return 16; }
  std::size_t max_checks() const noexcept override { return 64; }
  Mode begin(backend::Stream& stream, std::span<const std::int32_t> tokens, std::int64_t pos0, bool whole) override {
    Queue& q = of(stream);
    drain(q);
    q.whole = whole;
    q.marked = q.owed = q.forgiven = false;
    q.tokens.assign(tokens.begin(), tokens.end());
    q.pos0 = pos0;
    for (Post& p : q.posts) p.there = false;
    if (!q.units().empty()) {
      ++n_replayed;
      n_whole += whole ? 1 : 0;
      return Mode::Replay;
    }
    if (!q.seen[whole]) {
      q.seen[whole] = true;
      ++n_eager_steps;
      return Mode::Eager;
    }
    q.recording = true;
    q.posts.clear();
    q.units().emplace_back();
    return Mode::Record;
  }
  bool check(backend::Stream& stream, const backend::SlotCheck& check) override {
    Queue& q = of(stream);
    const std::size_t n = q.posts.size();
    q.posts.emplace_back();
    backend::SlotCheck c = check;
    const TensorView x = c.ffn != nullptr ? c.ffn->x : TensorView();
    c.ffn = nullptr;  // gone by then
    if (!q.whole) c.shares = nullptr;
    put(stream, [this, c, n, x](Queue& to) {
      if (on_check) on_check(n, c.slot_of);
      Post& p = to.posts[n];
      p.ids.clear();
      p.missed = false;
      for (std::int64_t r = 0; r < c.ids.dim(1); ++r) {
        std::int32_t& id = c.ids.i32()[r];
        if (c.forced != nullptr) id = c.forced[r];
        p.ids.push_back(id);
        p.missed |= c.slot_of[id] == -1;
      }
      p.there = true;
      to.marked |= p.missed;
      if (c.shares != nullptr) share(to, p, c, x);
    });
    return true;
  }
  backend::HostShare take_share(backend::Stream& stream, std::size_t check) override {
    Queue& q = of(stream);
    if (!q.owed || q.owed_by != check) fail(ErrorCode::Internal, "check {} has no share for the host", check);
    return {q.x, q.rows.data()};
  }
  void give_share(backend::Stream& stream, std::size_t check) override {
    Queue& q = of(stream);
    if (!std::exchange(q.owed, false) || q.owed_by != check) fail(ErrorCode::Internal, "nothing is owed to check {}", check);
    run_some(q);
  }
  void forgive(backend::Stream& stream) noexcept override {
    of(stream).owed = false;
    of(stream).forgiven = true;
  }
  void cut(backend::Stream& stream) override {
    if (to_refuse_ > 0) fail(ErrorCode::Unsupported, "no units today");
    if (!of(stream).whole) of(stream).units().emplace_back();
  }
  bool end(backend::Stream& stream, bool complete) override {
    Queue& q = of(stream);
    if (!std::exchange(q.recording, false)) return true;
    const bool good = complete && to_refuse_ == 0;
    if (to_refuse_ > 0) --to_refuse_;
    if (!good) q.units().clear();
    n_recorded += good ? 1 : 0;
    return good;
  }
  void reserve(backend::Stream&, const backend::RoutedFfn&) override {}
  std::size_t n_units(backend::Stream& stream) const override { return static_cast<const Queue&>(stream).lists[static_cast<const Queue&>(stream).whole].size(); }
  void launch(backend::Stream& stream, std::size_t first, std::size_t last) override {
    for (std::size_t unit = first; unit <= last; ++unit) launch_one(stream, unit);
  }
  void launch_one(backend::Stream& stream, std::size_t unit) {
    Queue& q = of(stream);
    ++n_launched;
    const auto& ops = q.units().at(unit);
    q.waiting.push_back([this](Queue& to) {
      to.skips = to.marked;
      n_skipped += to.skips ? 1 : 0;
    });
    for (const auto& op : ops)
      q.waiting.push_back([&op](Queue& to) {
        if (!to.skips) op(to);
      });
    run_some(q);
  }
  bool launch_all(backend::Stream& stream) override {
    if (!launches_all_) return false;
    ++n_launched_all;
    for (std::size_t u = 0; u < n_units(stream); ++u) launch_one(stream, u);
    return true;
  }
  backend::UnitPost wait(backend::Stream& stream, std::size_t check) override {
    Queue& q = of(stream);
    while (!q.posts.at(check).there) {
      if (q.waiting.empty() || q.owed) fail(ErrorCode::Internal, "check {} does not come", check);
      one(q);
    }
    return {q.posts[check].missed, q.posts[check].ids};
  }
  void resume(backend::Stream& stream) override {
    of(stream).waiting.push_back([](Queue& q) { q.marked = false; });
  }
  void upload(backend::Stream& stream, std::byte* to, const std::byte* pinned, std::size_t bytes) override {
    of(stream).waiting.push_back([to, pinned, bytes](Queue&) { std::memcpy(to, pinned, bytes); });
  }

 protected:
#define MOEFLUX_UNIT_OP(Op) \
  void execute(backend::Stream& stream, const backend::Op& op) override { record(stream, op); }
  MOEFLUX_FOR_EACH_OP(MOEFLUX_UNIT_OP)
#undef MOEFLUX_UNIT_OP

 private:
  struct Queue;
  using Work = std::function<void(Queue&)>;
  struct Post {
    bool there = false, missed = false;
    std::vector<std::int32_t> ids;
  };
  struct Queue final : backend::Stream {
    std::unique_ptr<backend::Stream> inner;
    std::vector<std::vector<Work>> lists[2];  // of steps in units, and of whole ones
    std::vector<std::vector<Work>>& units() { return lists[whole]; }
    std::deque<Post> posts;
    std::deque<Work> waiting;
    std::vector<std::int32_t> tokens;
    std::int64_t pos0 = 0;
    bool marked = false, recording = false, whole = false, seen[2] = {};
    bool skips = false;  // the unit under way
    // The host owes its share to a check: until it comes nothing is done.
    bool owed = false, forgiven = false;
    std::size_t owed_by = 0;
    std::vector<float> x, rows;
    std::vector<int> host_row;  // of each rank; -1: the device's
  };
  static Queue& of(backend::Stream& stream) { return static_cast<Queue&>(stream); }
  static void one(Queue& q) {
    const Work work = std::move(q.waiting.front());
    q.waiting.pop_front();
    work(q);
  }
  static void drain(Queue& q) {
    while (!q.waiting.empty()) {
      if (q.owed) fail(ErrorCode::Internal, "the device waits for the host, and the host for it");
      one(q);
    }
  }
  // The last ones of those in main memory, in rank order.
  void share(Queue& q, const Post& p, const backend::SlotCheck& c, const TensorView& x) {
    q.host_row.assign(p.ids.size(), -1);
    std::vector<std::size_t> far;
    for (std::size_t r = 0; r < p.ids.size(); ++r)
      if (c.slot_of[p.ids[r]] < -1) far.push_back(r);
    const auto n = static_cast<std::size_t>(c.shares[std::min<std::size_t>(far.size(), backend::SlotCheck::kShares - 1)]);
    if (n == 0) return;
    if (n > std::min(far.size(), kMostShared)) fail(ErrorCode::Internal, "a share of {} of {} experts", n, far.size());
    for (std::size_t i = 0; i < n; ++i) q.host_row[far[far.size() - n + i]] = static_cast<int>(i);
    q.x.assign(x.f32(), x.f32() + x.dim(1));
    q.rows.assign(kMostShared * q.x.size(), std::numeric_limits<float>::quiet_NaN());
    q.owed = !q.forgiven;
    q.owed_by = static_cast<std::size_t>(std::distance(q.posts.begin(), std::find_if(q.posts.begin(), q.posts.end(), [&](const Post& o) { return &o == &p; })));
    n_shared += n;
  }
  void put(backend::Stream& stream, Work work) {
    Queue& q = of(stream);
    if (q.recording) return q.units().back().push_back(std::move(work));
    q.waiting.push_back(std::move(work));
    run_some(q);
  }
  void run_some(Queue& q) {
    while (!q.waiting.empty() && !q.owed && random_() % 3 == 0) one(q);
  }

  // A copy that owns what the op's spans show, with the token and position of the step it is replayed in.
  template <class Op>
  void record(backend::Stream& stream, const Op& op) {
    const bool recorded = of(stream).recording;
    put(stream, [this, op, recorded](Queue& q) {
      Op now = op;
      if constexpr (requires { now.pos0; }) {
        if (recorded) now.pos0 = q.pos0;
      } else {
        static_cast<void>(recorded);
      }
      forward_to(inner_, *q.inner, now);
    });
  }
  void record(backend::Stream& stream, const backend::MatMul& op) {
    auto parts = std::make_shared<std::vector<backend::MatMulPart>>(op.parts.begin(), op.parts.end());
    put(stream, [this, op, parts](Queue& q) {
      backend::MatMul now = op;
      now.parts = *parts;
      forward_to(inner_, *q.inner, now);
    });
  }
  void record(backend::Stream& stream, const backend::Embed& op) {
    const bool recorded = of(stream).recording;
    auto tokens = std::make_shared<std::vector<std::int32_t>>(op.tokens.begin(), op.tokens.end());
    put(stream, [this, op, tokens, recorded](Queue& q) {
      backend::Embed now = op;
      now.tokens = recorded ? q.tokens : *tokens;
      forward_to(inner_, *q.inner, now);
    });
  }
  void record(backend::Stream& stream, const backend::ExpertFfn& op) {
    auto works = std::make_shared<std::vector<backend::ExpertWork>>(op.works.begin(), op.works.end());
    auto lists = std::make_shared<std::vector<std::vector<std::int32_t>>>();
    lists->reserve(2 * works->size());
    for (backend::ExpertWork& w : *works) {
      w.rows = lists->emplace_back(w.rows.begin(), w.rows.end());
      w.slots = lists->emplace_back(w.slots.begin(), w.slots.end());
    }
    put(stream, [this, op, works, lists](Queue& q) {
      backend::ExpertFfn now = op;
      now.works = *works;
      forward_to(inner_, *q.inner, now);
    });
  }
  static quant::MatrixView moved(quant::MatrixView m, std::int64_t by) {
    m.data += by;
    if (m.scales != nullptr) m.scales += by;
    if (m.biases != nullptr) m.biases += by;
    return m;
  }
  static TensorView moved(TensorView v, std::int64_t by) {
    if (!v.empty()) v.data = static_cast<std::byte*>(v.data) + by;
    return v;
  }
  // All parts of an expert from one place to another.
  void leave(const backend::FfnMatrices& f, std::int64_t from, std::int64_t to) {
    ++n_left;
    const auto copy = [&](const std::byte* p, std::size_t bytes) {
      if (p != nullptr && bytes > 0) std::memcpy(const_cast<std::byte*>(p) + to, p + from, bytes);
    };
    for (const quant::MatrixView* m : {&f.gate, &f.up, &f.down}) {
      const auto n_rows = static_cast<std::size_t>(m->rows);
      copy(m->data, n_rows * m->row_bytes());
      copy(m->scales, n_rows * m->scale_row_bytes());
      copy(m->biases, n_rows * m->scale_row_bytes());
    }
    for (const TensorView* v : {&f.gate_bias, &f.up_bias, &f.down_bias})
      if (!v->empty()) copy(static_cast<const std::byte*>(v->data), static_cast<std::size_t>(v->dim(0)) * 4);
  }
  void routed(Queue& q, const backend::RoutedFfn& op) {
    const std::int64_t k = op.ids.dim(1);
    std::vector<std::int32_t> rows, slots;
    for (std::int64_t i = 0; i < op.x.dim(0) * k; ++i) rows.push_back(static_cast<std::int32_t>(i / k)), slots.push_back(static_cast<std::int32_t>(i));
    std::vector<backend::ExpertWork> works;
    std::int64_t n_far = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int32_t id = op.ids.i32()[i], slot = op.slot_of == nullptr ? id : op.slot_of[id];
      if (slot == -1) fail(ErrorCode::Internal, "expert {} was computed without a slot", id);
      const auto stride = static_cast<std::int64_t>(op.stride);
      const std::int64_t by = slot < 0 ? op.host_offset + (-2 - slot) * stride : slot * stride;
      const backend::FfnMatrices& f = op.first;
      const bool host = slot < 0 && i < q.host_row.size() && q.host_row[i] >= 0;
      if (host) {
        ++n_far;
        std::copy_n(q.rows.begin() + q.host_row[i] * op.y.dim(1), op.y.dim(1), op.y.row(slots[i]));
        continue;
      }
      if (slot < 0 && n_far++ < op.n_lent)
        if (const std::int32_t lent = op.slot_of[op.n_experts + n_far - 1]; lent >= 0) leave(f, by, lent * stride);
      works.push_back({{moved(f.gate, by), moved(f.up, by), moved(f.down, by), moved(f.gate_bias, by), moved(f.up_bias, by), moved(f.down_bias, by)},
                       std::span(rows).subspan(i, 1),
                       std::span(slots).subspan(i, 1)});
    }
    q.host_row.clear();
    if (!works.empty()) forward_to(inner_, *q.inner, backend::ExpertFfn{op.x, works, op.y, op.glu, op.limit, op.alpha, op.precision});
    if (op.shared.gate.empty()) return;
    const backend::ExpertWork shared{op.shared, std::span(slots).first(static_cast<std::size_t>(op.x.dim(0))), std::span(slots).first(static_cast<std::size_t>(op.x.dim(0)))};
    forward_to(inner_, *q.inner, backend::ExpertFfn{op.x, {&shared, 1}, op.shared_y, backend::GluKind::Silu, 0.0f, 0.0f, op.precision});
  }

  backend::Backend& inner_;
  std::mt19937 random_;
  bool launches_all_;
  int to_refuse_ = 0;
};

}  // namespace moeflux::test
