// What a block needs besides its weights.
#pragma once

#include <cstdint>
#include <vector>

#include <moeflux/session.h>
#include <moeflux/types.h>

#include "backend/backend.h"
#include "model/arena.h"
#include "model/routing_hook.h"
#include "store/expert_store.h"

namespace moeflux::model {

// Counted by the MoE blocks of one session.
struct ExpertCounters {
  std::uint64_t requests = 0;
  std::uint64_t hits = 0;  // in memory when they were asked for
  std::uint64_t stall_ns = 0;
  std::uint64_t predicted = 0, predicted_right = 0;  // experts foretold for the next layer, and chosen there
};

// What the layer before foretold of a layer's choice, and how often it has been right.
struct Prediction {
  LayerIdx layer{-1};
  std::vector<std::int32_t> ids;  // empty: nothing was foretold, or it has been judged
  std::vector<ExpertIdx> experts;
  double recall = 0.5;            // running mean; the start is a guess between nothing and all
};

// Host memory of the MoE block, kept between calls so that a step allocates nothing.
struct MoeScratch {
  std::vector<std::int32_t> ids;      // [T, k]
  std::vector<std::int32_t> order;    // slots t * k + r, grouped by expert
  std::vector<std::int32_t> rows;     // token of each entry of `order`
  std::vector<std::int32_t> begin;    // first entry of each expert, n_experts + 1
  std::vector<ExpertIdx> wanted;      // experts with at least one token, ascending
  std::vector<std::uint32_t> counts;  // tokens of each wanted expert, for the store; empty for a single token
  std::vector<backend::ExpertWork> works;
  std::vector<std::size_t> pending;
  std::vector<std::int32_t> all;      // 0, 1, 2, ..
  Prediction prediction;
};

struct UnitPlan;

// One forward pass of one session. Blocks run ops through it.
struct Context {
  backend::Backend& backend;
  backend::Stream& stream;
  store::ExpertStore& experts;
  Arena& arena;
  MoeScratch& moe;
  ExpertCounters& counters;
  Precision precision = Precision::Exact;
  bool prefetch = false;           // foretell the next layer's experts
  RoutingHook* routing = nullptr;  // may be null
  std::vector<LayerReads>* reads = nullptr;  // of single tokens; may be null
  UnitPlan* units = nullptr;       // of a step in units; may be null

  template <class Op>
  void run(const Op& op) {
    backend.run(stream, op);
    if (prefetch) experts.poll();
  }
  template <class Sequence>
  void run_sequence(const Sequence& ops) {
    backend.run_sequence(stream, ops);
    if (prefetch) experts.poll();
  }
  // y = W x for one matrix.
  void matmul(const TensorView& x, const quant::MatrixView& w, const TensorView& y, Precision p) {
    const backend::MatMulPart part{w, {}, y};
    backend.run(stream, backend::MatMul{x, {&part, 1}, p});
  }
};

// Whether a layer with these experts runs without the host seeing the router's choice.
bool routed_on_device(const backend::Backend& backend, const store::ResidentExperts& experts);

// 0 .. n-1 as the row list of a feed-forward that takes every token.
std::span<const std::int32_t> all_rows(MoeScratch& scratch, std::int64_t n);

}  // namespace moeflux::model
