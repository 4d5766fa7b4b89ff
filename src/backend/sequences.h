// Runs of ops that a backend may compute as one. Each is the ops it holds, in their order, every one reading what those before it
// wrote; a backend that computes them at once may leave tensors unwritten that only the run itself reads.
#pragma once

#include "backend/ops.h"

namespace moeflux::backend {

// Gated DeltaNet between its projections. Read outside: conv.state, delta.state, norm.y.
struct DeltaMix {
  CausalConv conv;
  L2Norm q_norm, k_norm;
  DeltaGates gates;
  GatedDelta delta;
  GatedRmsNorm norm;
};

// Heads of attention between the projections and the keys. Read outside: q_norm.y, and the caches. q, k are [T, H, hd]; a norm without
// a weight and a rotation without frequencies are left out.
struct HeadInputs {
  RmsNorm q_norm, k_norm;
  Rope q_rope, k_rope;
  CacheWrite k, v;
};

}  // namespace moeflux::backend
