#include "backend/backend.h"

namespace moeflux::backend {

void Backend::execute(Stream& stream, const AddRmsNorm& op) {
  execute(stream, Add{op.h, op.delta, op.h});
  execute(stream, RmsNorm{op.h, op.weight, op.y, op.eps});
}

void Backend::run_sequence(Stream& stream, const DeltaMix& m) {
  run(stream, m.conv);
  run(stream, m.q_norm);
  run(stream, m.k_norm);
  run(stream, m.gates);
  run(stream, m.delta);
  run(stream, m.norm);
}

void Backend::run_sequence(Stream& stream, const HeadInputs& m) {
  if (!m.q_norm.weight.empty()) run(stream, m.q_norm);
  if (!m.k_norm.weight.empty()) run(stream, m.k_norm);
  if (!m.q_rope.inv_freq.empty()) run(stream, m.q_rope);
  if (!m.k_rope.inv_freq.empty()) run(stream, m.k_rope);
  run(stream, m.k);
  run(stream, m.v);
}

}  // namespace moeflux::backend
