#include "backend/backend.h"

namespace moeflux::backend {

void Backend::execute(Stream& stream, const AddRmsNorm& op) {
  execute(stream, Add{op.h, op.delta, op.h});
  execute(stream, RmsNorm{op.h, op.weight, op.y, op.eps});
}

}  // namespace moeflux::backend
